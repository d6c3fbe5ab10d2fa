// Connections that are being made: strangers who may turn out to be peers, and ours to peers.
#include <poll.h>
#include <sys/epoll.h>

#include <algorithm>
#include <map>

#include "net/peer.h"

namespace ringcomm {

constexpr size_t kMostStrangers = 64;  // connections that have not said who they are
constexpr size_t kMostClaims = 8;      // that have, and not proved it: for each flow of a peer
constexpr auto kGreetingTime = std::chrono::seconds(5);
// Of the first attempt. Hundreds of processes on a few cores may need longer.
constexpr Clock::duration kAttemptTime = std::chrono::seconds(2);
constexpr Clock::duration kConnectTime = std::chrono::milliseconds(700);  // then a packet is sent
constexpr auto kOutOfDescriptors = std::chrono::milliseconds(100);

// Where there is no room for another stranger, the one that has said nothing for longest goes.
void Network::accept_from(const Fd& listener) {
  for (int i = 0; i < 64; ++i) {
    Fd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) listen(false);
      break;
    }
    uint64_t number = 0;
    try {
      Link& link = add_link(std::move(socket), nullptr, 0);
      if (tls_.on()) link.tls = std::make_unique<Tls>(tls_, link.socket, true);
      link.handshake.emplace(contact_.id);
      number = link.number;
    } catch (const SystemError&) {
      listen(false);
      break;
    }
    take_events(number, EPOLLIN);  // it may have greeted
    drop_strangers(Clock::now());
  }
}

// Out of descriptors, listeners are left alone for a while.
void Network::listen(bool on) {
  if (!on) accept_again_ = Clock::now() + kOutOfDescriptors;
  deaf_ = !on;
  for (size_t i = 0; i < listeners_.size(); ++i) {
    epoll_event event{on ? EPOLLIN : 0u, {.u64 = i}};
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, listeners_[i].get(), &event);
  }
}

// Who says of itself that it is a peer. Null: it has not said who it is, or one of a group of whom
// nothing was ever heard. There may be thousands.
const Network::Peer* Network::claimed(const Link& link) {
  return link.peer != nullptr && link.peer->is_known() ? link.peer : nullptr;
}

// Its answer may have come, where this process had no time to look.
void Network::drop_late(uint64_t number) {
  const auto in = [&] { return links_.find(number); };
  if (in() == links_.end()) return;
  pollfd look{in()->second->socket.get(), POLLIN | POLLOUT, 0};
  if (!in()->second->patient && ::poll(&look, 1, 0) > 0) {
    in()->second->patient = true;  // once
    take_events(number, static_cast<uint32_t>(look.revents));
    return;
  }
  drop(*in()->second);
}

// Anybody may say that it is some peer: of those who say so of one, the newest are kept.
void Network::drop_strangers(Clock::time_point now) {
  std::vector<uint64_t> late;
  std::map<const Peer*, std::vector<uint64_t>> others;  // by claimed()
  for (auto& [number, link] : links_) {
    if (link->established) continue;
    const bool ours = link->is_ours();
    const Clock::duration time = link->connecting ? kConnectTime * link->patience
                                 : ours           ? kAttemptTime * link->patience
                                                  : kGreetingTime;
    if (now - link->began > time) {
      late.push_back(number);
    } else if (!ours) {
      others[claimed(*link)].push_back(number);
    }
  }
  for (const uint64_t number : late) drop_late(number);
  for (auto& [peer, numbers] : others) {
    const size_t most =
        peer == nullptr ? kMostStrangers : kMostClaims * static_cast<size_t>(peer->session.used());
    std::ranges::sort(numbers);
    for (size_t i = 0; i + most < numbers.size(); ++i) {
      if (peer == nullptr) take_events(numbers[i], EPOLLIN);  // it may have greeted meanwhile
      const auto found = links_.find(numbers[i]);
      if (found == links_.end() || found->second->established) continue;
      if (claimed(*found->second) == peer) drop(*found->second);
    }
  }
}

Network::Link& Network::add_link(Fd socket, Peer* peer, int flow) {
  auto link = std::make_unique<Link>();
  link->number = next_link_++;
  link->socket = std::move(socket);
  link->peer = peer;
  if (peer != nullptr) ++peer->sockets;
  link->flow = flow;
  link->began = Clock::now();
  add_to_epoll(epoll_, link->socket, link->number);
  return *links_.emplace(link->number, std::move(link)).first->second;
}

// Connected: the first of several attempts goes on. The others are not needed, and have ended: an
// attempt that counts as under way would keep back all later ones.
void Network::greet(Link& link) {
  Peer& peer = *link.peer;
  const bool needed = !peer.session.is_up(link.flow) || link.homeward;
  if (!needed || peer.handshaking(link.flow)) return drop(link);
  link.connecting = false;
  if (tls_.on()) link.tls = std::make_unique<Tls>(tls_, link.socket, false);
  link.handshake.emplace(contact_.id, peer.contact.id, link.flow, peer);
  link.out = link.handshake->output();
  watch(link, false);
  write_to(link);
}

// False when the link is gone, or waits for more.
bool Network::advance_handshake(Link& link) {
  try {
    while (!link.handshake->done()) {
      const size_t wanted = link.handshake->wanted();
      std::byte buffer[Handshake::kMostBytes];
      const iovec rest{buffer, wanted - link.in.size()};
      const ssize_t got = link.receive({&rest, 1});
      if (got < 0 && (errno == EAGAIN || errno == EINTR)) break;
      link.turned_away = got == 0 && link.is_ours();
      if (got <= 0) throw FlowError("closed");
      link.in.insert(link.in.end(), buffer, buffer + got);
      if (link.in.size() < wanted) continue;
      if (link.tls) link.handshake->bind(link.tls->binding());
      if (link.handshake->accepting() && link.peer != nullptr) check_turn(*link.peer, link.flow);
      link.handshake->take(std::exchange(link.in, {}).data());
      if (link.is_ours()) link.began = Clock::now();  // it answers
      if (link.handshake->accepting() && link.peer == nullptr) meet_caller(link);
      const auto reply = link.handshake->output();
      link.out.insert(link.out.end(), reply.begin(), reply.end());
    }
  } catch (const FlowError& error) {
    // Of somebody who connects to us, the failure may be a stranger's.
    const bool ours = link.is_ours();
    if (ours && dynamic_cast<const StrangerError*>(&error) != nullptr) {
      link.peer->trouble = error.what();
    }
    link.out = link.handshake->output();
    const uint64_t number = link.number;
    if (!link.out.empty()) write_to(link);
    if (links_.contains(number))
      drop(link, ours && dynamic_cast<const GoneError*>(&error) != nullptr);
    return false;
  }
  if (link.handshake->done()) established(link);
  return true;
}

// Who said Hello, and may it connect?
void Network::meet_caller(Link& link) {
  Peer* const known = find(*link.handshake->caller());
  if (known == nullptr) throw FlowError("a process of which we do not know");
  Peer& peer = *known;
  if (link.handshake->flows() != peer.flows()) {
    const auto text = [](int flows) { return flows == 0 ? "auto" : std::to_string(flows); };
    peer.trouble = str("RINGCOMM_FLOWS is ", text(peer.flows()), " here and ",
                       text(link.handshake->flows()), " there");
    throw FlowError("another number of flows");
  }
  check_turn(peer, link.handshake->flow());
  link.peer = &peer;
  ++peer.sockets;
  link.flow = link.handshake->flow();
  link.handshake->with(peer);
}

// Both may connect at once: then the connection of the lower one counts.
void Network::check_turn(const Peer& peer, int flow) const {
  if (contact_.id < peer.contact.id && peer.handshaking(flow)) throw FlowError("ours comes first");
}

void Network::established(Link& link) {
  Peer& peer = *link.peer;
  const auto& handshake = *link.handshake;
  std::vector<Link*> others;  // attempts for this flow, or what it had before
  for (auto& [number, other] : links_) {
    if (other.get() != &link && other->peer == &peer && other->flow == link.flow) {
      others.push_back(other.get());
    }
  }
  for (Link* other : others) drop(*other);
  if (!peer.session.up(link.flow, handshake.generation(), handshake.theirs(), Clock::now())) {
    return drop(link);
  }
  if (peer.session.used() > 1) set_most_unsent(link.socket, kMostUnsent);
  link.established = true;
  link.handshake.reset();
  peer.links[static_cast<size_t>(link.flow)] = &link;
  peer.use();
  peer.attempt_ended(link.flow, false);
  write_to(link);
}

}  // namespace ringcomm
