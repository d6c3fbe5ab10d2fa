#include "net/network.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <sstream>

#include "net/peer.h"

namespace ringcomm {
namespace {

constexpr size_t kMostStrangers = 64;  // connections that have not proved who they are
constexpr auto kGreetingTime = std::chrono::seconds(5), kAttemptTime = std::chrono::seconds(2);
constexpr auto kTick = std::chrono::milliseconds(10), kIdleTick = std::chrono::milliseconds(250);
constexpr auto kOutOfDescriptors = std::chrono::milliseconds(100);
constexpr size_t kStaging = 64 << 10;
constexpr size_t kQuantum = 1 << 20;  // read of one connection before others get their turn
constexpr uint64_t kWake = 63;        // listeners have the numbers below

}  // namespace

// ---- contacts

std::string Contact::to_text() const {
  std::string text = str(to_hex(id.data(), id.size()), ' ', to_hex(key.data(), key.size()));
  for (const Address& address : addresses) text += ' ' + address.to_text();
  return text;
}

Contact Contact::from_text(const std::string& text) {
  std::istringstream in(text);
  std::string id, key, address;
  in >> id >> key;
  Contact contact;
  from_hex(id, contact.id.data(), contact.id.size());
  from_hex(key, contact.key.data(), contact.key.size());
  while (in >> address) contact.addresses.push_back(Address::from_text(address));
  RINGCOMM_CHECK(!contact.addresses.empty(), "a rank without an address: ", text.substr(0, 80));
  return contact;
}

// ---- life

Network::Network(const NetworkOptions& options)
    : options_(options),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      staging_(kStaging),
      ticked_(Clock::now()) {
  if (!epoll_ || !wake_) throw SystemError("epoll");
  contact_.id = random_id();
  contact_.key = random_key();
  epoll_event event{EPOLLIN, {.u64 = kWake}};
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event);
  listen(options);
  keeper_ = std::thread(&Network::keep, this);
}

Network::~Network() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  const uint64_t one = 1;
  if (::write(wake_.get(), &one, sizeof one) < 0) std::terminate();
  quiet_.notify_all();
  keeper_.join();
}

void Network::listen(const NetworkOptions& options) {
  const auto routed =
      options.store_host.empty() ? std::nullopt : source_towards(options.store_host, 9);
  std::exception_ptr refused;
  for (const Address& address : choose_addresses(list_interfaces(), options.interfaces, routed)) {
    Fd listener;
    try {
      listener = listen_tcp(address, options.ports, 1024);
    } catch (const SystemError&) {  // one of several that cannot be had is no loss
      refused = std::current_exception();
      continue;
    }
    epoll_event event{EPOLLIN, {.u64 = listeners_.size()}};
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, listener.get(), &event) != 0) {
      throw SystemError("epoll_ctl");
    }
    contact_.addresses.push_back(local_address(listener));
    listeners_.push_back(std::move(listener));
  }
  if (listeners_.empty() && refused) std::rethrow_exception(refused);
  RINGCOMM_CHECK(!listeners_.empty(), "this host has no network interface that is up");
}

Wire& Network::reach(const Contact& contact) {
  const std::lock_guard lock(mutex_);
  auto& peer = peers_[contact.id];
  if (!peer) {
    const auto text = [](const auto& bytes) { return std::string(bytes.begin(), bytes.end()); };
    const bool first = contact_.id < contact.id;
    const Contact& low = first ? contact_ : contact;
    const Contact& high = first ? contact : contact_;
    const Key job = hmac({}, {"job", options_.secret});
    const Key pair =
        hmac(job, {"pair", text(low.id), text(low.key), text(high.id), text(high.key)});
    peer = std::make_unique<Peer>(*this, contact, pair);
  }
  return *peer;
}

void Network::forked() {
  for (auto& [number, link] : links_) link->socket.reset();
  listeners_.clear();
  epoll_.reset();
  wake_.reset();
}

// ---- driving

bool Network::progress() {
  Lock lock(mutex_, std::try_to_lock);
  if (!lock) return false;
  const bool arrived = handle_events(0, lock);
  const auto now = Clock::now();
  if (now - ticked_ >= kTick) tick(now);
  return arrived;
}

void Network::end_driving(bool rest) {
  const bool last = driving_.fetch_sub(1, std::memory_order_seq_cst) == 1;
  if (last && (rest || blocked_.load(std::memory_order_seq_cst) > 0)) quiet_.notify_one();
}

// While somebody drives, the keeper looks now and then whether that is still true.
void Network::keep() {
  Lock lock(mutex_);
  while (!stop_) {
    if (driving_.load(std::memory_order_seq_cst) > 0) {
      quiet_.wait_for(lock, 2 * kTick);
      handle_events(0, lock);  // it may be in a callback
    } else {
      handle_events(static_cast<int>(pause().count()), lock);
    }
    const auto now = Clock::now();
    if (now - ticked_ >= kTick) tick(now);
  }
}

std::chrono::milliseconds Network::pause() const { return peers_.empty() ? kIdleTick : kTick; }

// The lock is open while this thread waits.
bool Network::handle_events(int timeout_ms, Lock& lock) {
  std::array<epoll_event, 64> events;
  if (timeout_ms > 0) lock.unlock();
  const int count = ::epoll_wait(epoll_.get(), events.data(), events.size(), timeout_ms);
  if (timeout_ms > 0) lock.lock();
  bool arrived = false;
  for (int i = 0; i < count; ++i) {
    const epoll_event& event = events[static_cast<size_t>(i)];
    const uint64_t number = event.data.u64;
    if (number == kWake) {
      uint64_t rings = 0;
      if (::read(wake_.get(), &rings, sizeof rings) < 0) continue;
    } else if (number < kWake) {
      accept_from(listeners_[number]);
    } else if (const auto found = links_.find(number); found != links_.end()) {
      try {
        arrived = handle(*found->second, event.events) || arrived;
      } catch (const std::runtime_error&) {  // a peer's nonsense, or the system is out of something
        if (const auto again = links_.find(number); again != links_.end()) drop(*again->second);
      }
    }
  }
  if (arrived) options_.bell.notify();
  return arrived;
}

bool Network::handle(Link& link, uint32_t events) {
  if (link.connecting) {
    const int error = pending_error(link.socket);
    if (error != 0 || (events & (EPOLLERR | EPOLLHUP)) != 0) {
      drop(link, error == ECONNREFUSED || error == ECONNRESET);
      return false;
    }
    link.connecting = false;
    greet(link);
    return false;
  }
  const uint64_t number = link.number;
  bool arrived = false;
  if (!link.established) {
    if (!advance_handshake(link)) return false;
  } else if ((events & (EPOLLIN | EPOLLERR | EPOLLHUP)) != 0) {
    arrived = read_from(link);
  }
  if (links_.contains(number)) write_to(link);
  return arrived;
}

// ---- connections that are being made

// Where there is no room for another stranger, the one that has said nothing for longest goes.
void Network::accept_from(const Fd& listener) {
  for (int i = 0; i < 64; ++i) {
    Fd socket(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) listen(false);
      break;
    }
    try {
      Link& link = add_link(std::move(socket), nullptr, 0);
      link.handshake.emplace(contact_.id);
    } catch (const SystemError&) {
      listen(false);
      break;
    }
  }
  drop_strangers(Clock::now());
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

void Network::drop_strangers(Clock::time_point now) {
  std::vector<Link*> strangers, late;
  for (auto& [number, link] : links_) {
    if (link->established) continue;
    const bool ours = link->is_ours();
    if (now - link->began > (ours ? kAttemptTime : kGreetingTime)) {
      late.push_back(link.get());
    } else if (!ours) {
      strangers.push_back(link.get());
    }
  }
  for (Link* link : late) drop(*link);
  std::sort(strangers.begin(), strangers.end(),
            [](const Link* a, const Link* b) { return a->number < b->number; });
  for (size_t i = 0; i + kMostStrangers < strangers.size(); ++i) drop(*strangers[i]);
}

Network::Link& Network::add_link(Fd socket, Peer* peer, int flow) {
  auto link = std::make_unique<Link>();
  link->number = next_link_++;
  link->socket = std::move(socket);
  link->peer = peer;
  link->flow = flow;
  link->began = Clock::now();
  epoll_event event{EPOLLIN, {.u64 = link->number}};
  if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, link->socket.get(), &event) != 0) {
    throw SystemError("epoll_ctl");
  }
  return *links_.emplace(link->number, std::move(link)).first->second;
}

// Connected: the first of several attempts goes on, the others are not needed.
void Network::greet(Link& link) {
  Peer& peer = *link.peer;
  if (peer.session.is_up(link.flow) || peer.handshaking(link.flow)) return drop(link);
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
      const ssize_t got = ::recv(link.socket.get(), buffer, wanted - link.in.size(), 0);
      if (got < 0 && (errno == EAGAIN || errno == EINTR)) break;
      if (got <= 0) throw FlowError("closed");
      link.in.insert(link.in.end(), buffer, buffer + got);
      if (link.in.size() < wanted) continue;
      if (link.handshake->accepting() && link.peer != nullptr) check_turn(*link.peer, link.flow);
      link.handshake->take(std::exchange(link.in, {}).data());
      if (link.handshake->accepting() && link.peer == nullptr) meet_caller(link);
      const auto reply = link.handshake->output();
      link.out.insert(link.out.end(), reply.begin(), reply.end());
    }
  } catch (const FlowError& error) {
    if (dynamic_cast<const StrangerError*>(&error) != nullptr) link.peer->trouble = error.what();
    drop(link);
    return false;
  }
  if (link.handshake->done()) established(link);
  return true;
}

// Who said Hello, and may it connect?
void Network::meet_caller(Link& link) {
  const auto found = peers_.find(*link.handshake->caller());
  if (found == peers_.end()) throw FlowError("a process of which we do not know");
  Peer& peer = *found->second;
  if (link.handshake->flows() != peer.flows()) {
    peer.trouble =
        str("RINGCOMM_FLOWS is ", peer.flows(), " here and ", link.handshake->flows(), " there");
    throw FlowError("another number of flows");
  }
  check_turn(peer, link.handshake->flow());
  link.peer = &peer;
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
  link.established = true;
  link.handshake.reset();
  peer.links[static_cast<size_t>(link.flow)] = &link;
  peer.attempt_ended(link.flow, false);
  write_to(link);
}

void Network::drop(Link& link, bool refused) {
  if (Peer* peer = link.peer) {
    auto& current = peer->links[static_cast<size_t>(link.flow)];
    if (current == &link) {
      current = nullptr;
      link.socket.reset();  // before the session says what came over it
      peer->session.down(link.flow);
    }
    if (link.is_ours() && !link.established) peer->attempt_ended(link.flow, refused);
  }
  if (link.watched_for_writing) blocked_.fetch_sub(1, std::memory_order_seq_cst);
  links_.erase(link.number);
}

// ---- connections that are up

bool Network::read_from(Link& link) {
  Session& session = link.peer->session;
  bool arrived = false;
  try {
    for (size_t total = 0; total < kQuantum;) {
      const auto landing = session.landing(link.flow);
      iovec parts[] = {{landing.data(), landing.size()}, {staging_.data(), staging_.size()}};
      const ssize_t got =
          ::readv(link.socket.get(), landing.empty() ? parts + 1 : parts, landing.empty() ? 1 : 2);
      if (got < 0 && (errno == EAGAIN || errno == EINTR)) break;
      if (got <= 0) throw FlowError("closed");
      arrived = true;
      const auto bytes = static_cast<size_t>(got);
      const size_t landed = std::min(bytes, landing.size());
      session.landed(link.flow, landed);
      session.read(link.flow, {staging_.data(), bytes - landed}, Clock::now());
      total += bytes;
      if (bytes < landing.size() + staging_.size()) break;
    }
  } catch (const FlowError&) {
    drop(link);
    return arrived;
  }
  for (const int flow : session.take_closed()) {
    if (Link* closed = link.peer->links[static_cast<size_t>(flow)]) drop(*closed);
  }
  return arrived;
}

void Network::write_to(Link& link) {
  while (true) {
    std::array<iovec, 32> parts;
    size_t count = 0;
    if (!link.out.empty()) {
      parts[count++] = {link.out.data(), link.out.size()};
    } else if (link.established) {
      count = link.peer->session.gather(link.flow, parts);
    }
    if (count == 0) return watch(link, false);
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = count;
    const ssize_t sent = ::sendmsg(link.socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0) {
      if (errno == EAGAIN || errno == EINTR) return watch(link, true);
      return drop(link);
    }
    const auto bytes = static_cast<size_t>(sent);
    if (!link.out.empty()) {
      link.out.erase(link.out.begin(), link.out.begin() + sent);
    } else {
      link.peer->session.wrote(link.flow, bytes);
    }
  }
}

void Network::watch(Link& link, bool writable) {
  if (link.watched_for_writing == writable) return;
  link.watched_for_writing = writable;
  blocked_.fetch_add(writable ? 1 : -1, std::memory_order_seq_cst);
  epoll_event event{EPOLLIN | (writable ? EPOLLOUT : 0u), {.u64 = link.number}};
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, link.socket.get(), &event);
}

void Network::tick(Clock::time_point now) {
  const auto since = now - std::exchange(ticked_, now);
  const Clock::duration stalled = since > std::chrono::seconds(1) ? since : Clock::duration{};
  drop_strangers(now);
  if (deaf_ && now >= accept_again_) listen(true);
  for (auto& [id, peer] : peers_) peer->tick(now, stalled);
}

}  // namespace ringcomm
