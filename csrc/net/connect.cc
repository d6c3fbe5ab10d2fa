// Connections that are being made: strangers who may turn out to be peers, and ours to peers.
#include <poll.h>
#include <sys/epoll.h>

#include <algorithm>
#include <map>

#include "net/peers.h"

namespace ringcomm {

constexpr size_t kMostStrangers = 64;  // connections that have not said who they are
constexpr size_t kMostClaims = 8;      // that have, and not proved it: for each flow of a peer
constexpr auto kGreetingTime = std::chrono::seconds(5);
// For the first attempt. Hundreds of processes on a few cores may need longer.
constexpr Clock::duration kAttemptTime = std::chrono::seconds(2);
constexpr Clock::duration kConnectTime = std::chrono::milliseconds(700);  // then a packet is sent
constexpr auto kOutOfDescriptors = std::chrono::milliseconds(100);

// Where there is no room for another stranger, the one that has said nothing for longest goes.
void Network::accept_from(const Fd& listener) {
  for (int i = 0; i < 64; ++i) {
    Fd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      if (!is_own_limit(errno)) break;
      lacks(errno);
      return listen(false);
    }
    lacking_ = 0;
    const auto link = std::make_shared<Connection>();
    try {
      link->socket = std::move(socket);
      if (tls_.on()) link->tls = std::make_unique<Tls>(tls_, link->socket, true);
      link->handshake.emplace(contact_.id);
      add(link, nullptr);
    } catch (const std::runtime_error&) {  // epoll or OpenSSL is out of something
      listen(false);
      break;
    }
    take_events({link, nullptr}, EPOLLIN, true);  // it may have greeted
    drop_strangers(Clock::now());
  }
}

// Out of descriptors, listeners are left alone for a while.
void Network::listen(bool on) {
  if (!on) accept_again_.store(Clock::now() + kOutOfDescriptors);
  deaf_ = !on;
  for (size_t i = 0; i < listeners_.size(); ++i) {
    epoll_event event{on ? EPOLLIN : 0u, {.u64 = i}};
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, listeners_[i].get(), &event);
  }
}

// No socket is to be had, for a reason that is this process's own: no peer is to be blamed for it.
void Network::lacks(int code) {
  if (lacking_.exchange(code) != 0) return;
  Logger(options_.log, "").warning(lacking(), "; it tries again");
}

std::string Network::lacking() const {
  const int code = lacking_;
  return code == 0 ? "" : SystemError("this process cannot open another connection", code).what();
}

// Returns the peer that the other end says it is. Null: it has not said who it is, or it is of a
// group and was never heard of. There may be thousands of those.
const Network::Peer* Network::claimed(const Connection& link) {
  return link.peer != nullptr && link.peer->is_known() ? link.peer : nullptr;
}

// Its answer may have come, where this process had no time to look.
void Network::drop_late(const Entry& entry) {
  Lock lock = lock_of(entry);
  lock.lock();
  if (!entry.is_current()) return;
  Connection& link = *entry.link;
  pollfd ready{link.socket.get(), POLLIN | POLLOUT, 0};
  if (link.patient || ::poll(&ready, 1, 0) <= 0) return drop(link);
  link.patient = true;  // once
  lock.unlock();
  take_events(entry, static_cast<uint32_t>(ready.revents), true);
}

// The connections that are not up yet, the oldest first.
std::vector<Network::Entry> Network::handshakes() {
  std::vector<Entry> entries;
  const std::lock_guard lock(mutex_);
  for (const auto& [number, entry] : links_) {
    if (!entry.established) entries.push_back(entry);
  }
  std::ranges::sort(entries, {}, [](const Entry& entry) { return entry.link->number; });
  return entries;
}

// Anybody may say that it is some peer: of those who say so of one, the newest are kept.
void Network::drop_strangers(Clock::time_point now) {
  struct Claims {
    std::vector<Entry> entries;
    size_t most = kMostStrangers;
  };
  std::map<const Peer*, Claims> others;  // by claimed()
  for (const Entry& entry : handshakes()) {
    Lock lock = lock_of(entry);
    lock.lock();
    const Connection& link = *entry.link;
    if (!entry.is_current() || link.established) continue;
    const bool ours = link.is_ours();
    const Clock::duration time = link.connecting ? kConnectTime * link.patience
                                 : ours          ? kAttemptTime * link.patience
                                                 : kGreetingTime;
    if (now - link.began > time) {
      lock.unlock();
      drop_late(entry);
    } else if (!ours) {
      const Peer* const peer = claimed(link);
      Claims& claims = others[peer];
      claims.entries.push_back(entry);
      if (peer != nullptr) claims.most = kMostClaims * static_cast<size_t>(peer->session.used());
    }
  }
  for (const auto& [peer, claims] : others) {
    const size_t beyond = std::max(claims.entries.size(), claims.most) - claims.most;
    drop_claims(peer, std::span(claims.entries).first(beyond));
  }
}

// Drops these, if nothing has come of them meanwhile.
void Network::drop_claims(const Peer* peer, std::span<const Entry> entries) {
  for (const Entry& old : entries) {
    if (peer == nullptr) take_events(old, EPOLLIN, true);  // it may have greeted meanwhile
    const Entry entry = entry_of(old.link->number);
    if (!entry.link) continue;
    Lock lock = lock_of(entry);
    lock.lock();
    if (!entry.is_current() || entry.link->established) continue;
    if (claimed(*entry.link) == peer) drop(*entry.link);
  }
}

// Under the peer's lock, if there is one.
void Network::add(const std::shared_ptr<Connection>& link, const std::shared_ptr<Peer>& peer) {
  link->number = next_link_.fetch_add(1, std::memory_order_relaxed);
  link->peer = peer.get();
  link->began = Clock::now();
  add_to_epoll(epoll_, link->socket, link->number);
  if (peer) peer->sockets.push_back(link.get());
  const std::lock_guard lock(mutex_);
  links_.emplace(link->number, Entry{link, peer});
}

// Connected: the first of several attempts goes on. The others are not needed, and have ended: an
// attempt that counts as under way would keep back all later ones.
void Network::greet(Connection& link) {
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
bool Network::advance_handshake(Connection& link, Held& caller) {
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
      if (link.handshake->accepting() && link.peer == nullptr) meet_caller(link, caller);
      const auto reply = link.handshake->output();
      link.out.insert(link.out.end(), reply.begin(), reply.end());
    }
  } catch (const FlowError& error) {
    // A stranger may have made the failure, where somebody connects to us.
    const bool ours = link.is_ours();
    if (ours && dynamic_cast<const StrangerError*>(&error) != nullptr) {
      link.peer->trouble = error.what();
    }
    link.out = link.handshake->output();
    if (!link.out.empty()) write_to(link);
    if (!link.gone) drop(link, ours && dynamic_cast<const GoneError*>(&error) != nullptr);
    return false;
  }
  if (link.handshake->done()) established(link);
  return true;
}

// Finds out who said Hello, and whether it may connect. From here on that peer's lock guards the
// connection.
void Network::meet_caller(Connection& link, Held& caller) {
  const auto contact = peers_->contact_of(*link.handshake->caller());
  if (!contact) throw FlowError("a process of which we do not know");
  caller = peers_->meet(*contact);
  Peer& peer = *caller.peer;
  if (link.handshake->flows() != peer.flows()) {
    const auto text = [](int flows) { return flows == 0 ? "auto" : std::to_string(flows); };
    peer.trouble = str("RINGCOMM_FLOWS is ", text(peer.flows()), " here and ",
                       text(link.handshake->flows()), " there");
    throw FlowError("another number of flows");
  }
  check_turn(peer, link.handshake->flow());
  link.peer = &peer;
  peer.sockets.push_back(&link);
  {
    const std::lock_guard lock(mutex_);
    links_.at(link.number).peer = caller.peer;
  }
  link.flow = link.handshake->flow();
  link.handshake->with(peer);
}

// Both may connect at once: then the connection of the lower one counts.
void Network::check_turn(const Peer& peer, int flow) const {
  if (contact_.id < peer.contact.id && peer.handshaking(flow)) throw FlowError("ours comes first");
}

void Network::established(Connection& link) {
  Peer& peer = *link.peer;
  const auto& handshake = *link.handshake;
  std::vector<Connection*> others;  // attempts for this flow, or what it had before
  for (Connection* other : peer.sockets) {
    if (other != &link && other->flow == link.flow) others.push_back(other);
  }
  for (Connection* other : others) drop(*other);
  if (!peer.session.up(link.flow, handshake.generation(), handshake.theirs(), Clock::now())) {
    return drop(link);
  }
  if (peer.session.used() > 1) set_most_unsent(link.socket, kMostUnsent);
  link.established = true;
  {
    const std::lock_guard lock(mutex_);
    links_.at(link.number).established = true;
  }
  link.handshake.reset();
  peer.links[static_cast<size_t>(link.flow)] = &link;
  peer.use();
  peer.attempt_ended(link.flow, false);
  write_to(link);
}

}  // namespace ringcomm
