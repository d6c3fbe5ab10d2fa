#include "net/network.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include "net/peer.h"

namespace ringcomm {

constexpr auto kTick = std::chrono::milliseconds(10), kDoze = std::chrono::milliseconds(500);
constexpr size_t kStaging = 64 << 10;
constexpr size_t kWakeAt = 64 << 10, kLongWait = 16 << 10;
constexpr size_t kQuantum = 1 << 20;  // read of one connection before others get their turn
constexpr uint64_t kWake = 63;        // listeners have the numbers below

// ---- contacts

std::string Contact::to_text() const {
  std::string text = tls;
  for (const uint64_t word : id) text += str(' ', word);
  for (const uint64_t word : key) text += str(' ', word);
  for (const Address& address : addresses) text += ' ' + address.to_text();
  return text;
}

Contact Contact::from_text(const std::string& text) {
  TextReader in(text);
  std::string address;
  Contact contact;
  in >> contact.tls;
  for (uint64_t& word : contact.id) in >> word;
  for (uint64_t& word : contact.key) in >> word;
  while (in >> address) contact.addresses.push_back(Address::from_text(address));
  RINGCOMM_CHECK(!contact.addresses.empty(), "a rank without an address: ", text.substr(0, 80));
  return contact;
}

// ---- life

Network::Network(const NetworkOptions& options)
    : options_(options),
      tls_(options, options.tls_records),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      staging_(kStaging),
      ticked_(Clock::now()) {
  if (!epoll_ || !wake_) throw SystemError("epoll");
  contact_.id = random_id();
  contact_.key = random_key();
  contact_.tls = tls_.way();
  add_to_epoll(epoll_, wake_, kWake);
  listen();
}

Network::~Network() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  rouse();
  quiet_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Network::listen() {
  const Places& places = options_.places;
  std::exception_ptr refused;
  for (const std::string& address : places.addresses) {
    Fd listener;
    try {
      listener = listen_tcp(Address::from_number(address).value(), places.first_port,
                            places.last_port, 1024);
    } catch (const SystemError&) {  // one of several that cannot be had is no loss
      refused = std::current_exception();
      continue;
    }
    set_congestion(listener, options_.congestion);  // accepted sockets inherit it
    add_to_epoll(epoll_, listener, listeners_.size());
    contact_.addresses.push_back(local_address(listener));
    listeners_.push_back(std::move(listener));
  }
  if (listeners_.empty() && refused) std::rethrow_exception(refused);
  RINGCOMM_CHECK(!listeners_.empty(), "this host has no network interface that is up");
}

// ---- peers

void Network::start() {
  if (!thread_.joinable()) thread_ = std::thread(&Network::run, this);
}

Wire& Network::reach(const Contact& contact) {
  check_tls(contact);
  const std::lock_guard lock(mutex_);
  Peer& peer = meet(contact);
  peer.keep();
  return peer;
}

Wire& Network::reach(const Contact& contact, uint64_t channel) {
  check_tls(contact);
  const std::lock_guard lock(mutex_);
  Peer& peer = meet(contact);
  peer.receiver_of(channel);
  return peer;
}

void Network::check_tls(const Contact& contact) const {
  RINGCOMM_CHECK(contact.tls == contact_.tls, "TLS is ", contact_.tls, " here and ",
                 contact.tls.substr(0, 20), " at ", contact.addresses[0].to_text(),
                 ": set RINGCOMM_TLS and its files alike on every rank");
}

void Network::enter(uint64_t channel, Directory& directory) {
  const std::lock_guard lock(mutex_);
  start();
  directories_[channel] = &directory;
}

void Network::leave(uint64_t channel) {
  const std::lock_guard lock(mutex_);
  directories_.erase(channel);
}

Network::Counts Network::counts() {
  const std::lock_guard lock(mutex_);
  return {peers_.size(), awake_.size(), resting_.size(), links_.size()};
}

Network::Peer& Network::meet(const Contact& contact) {
  start();
  auto& peer = peers_[contact.id];
  if (peer) return *peer;
  const auto text = [](const auto& words) {
    return std::string(reinterpret_cast<const char*>(words.data()), sizeof words);
  };
  const bool first = contact_.id < contact.id;
  const Contact& low = first ? contact_ : contact;
  const Contact& high = first ? contact : contact_;
  const Key job = hmac({}, {"job", options_.secret});
  const Key pair = hmac(job, {"pair", text(low.id), text(low.key), text(high.id), text(high.key)});
  const auto rest = resting_.extract(contact.id);
  peer =
      std::make_unique<Peer>(*this, contact, pair, rest ? rest.mapped().numbers : SessionNumbers());
  peer->wake();
  return *peer;
}

// Null: it is of no group here.
Network::Peer* Network::find(const ProcessId& id) {
  if (const auto found = peers_.find(id); found != peers_.end()) return found->second.get();
  for (const auto& [channel, directory] : directories_) {
    if (const auto contact = directory->contact_of(id)) return &meet(*contact);
  }
  if (const auto found = resting_.find(id); found != resting_.end()) {
    return &meet(Contact(found->second.contact));
  }
  return nullptr;
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
  return handle_events(0, lock);
}

void Network::rouse() {
  const uint64_t one = 1;
  if (::write(wake_.get(), &one, sizeof one) < 0) std::terminate();
}

// While another thread drives, this one looks now and then whether that is still true.
void Network::run() {
  Lock lock(mutex_);
  while (!stop_) {
    if (driving_.load(std::memory_order_seq_cst) > 0) {
      quiet_.wait_for(lock, 2 * kTick);
      handle_events(0, lock);  // it may be in a callback
    } else {
      dozing_ = dozes();
      handle_events(static_cast<int>((dozing_ ? kDoze : kTick).count()), lock);
      dozing_ = false;
    }
    if (!std::exchange(alarm_, false)) continue;
    lock.unlock();
    const bool again = options_.alarmed();
    lock.lock();
    alarm_ = alarm_ || again;
  }
}

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
    } else {
      arrived = take_events(number, event.events) || arrived;
    }
  }
  if (arrived) options_.bell.notify(kAllNews);
  if (const auto now = Clock::now(); now - ticked_ >= kTick) tick(now);
  return arrived;
}

// Of a connection, if there still is one of that number.
bool Network::take_events(uint64_t number, uint32_t events) {
  const auto found = links_.find(number);
  if (found == links_.end()) return false;
  try {
    return handle(*found->second, events);
  } catch (const std::runtime_error&) {  // a peer's nonsense, or the system is out of something
    if (const auto again = links_.find(number); again != links_.end()) drop(*again->second);
  }
  return false;
}

bool Network::handle(Link& link, uint32_t events) {
  if (link.connecting) {
    const int error = pending_error(link.socket);
    if (error != 0 || (events & (EPOLLERR | EPOLLHUP)) != 0) {
      drop(link, error == ECONNREFUSED || error == ECONNRESET);
      return false;
    }
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

// ---- connections that are up

ssize_t Network::Link::receive(std::span<const iovec> parts) {
  if (tls) return tls->read({static_cast<std::byte*>(parts[0].iov_base), parts[0].iov_len});
  return ::readv(socket.get(), parts.data(), static_cast<int>(parts.size()));
}

ssize_t Network::Link::send(std::span<iovec> parts) {
  try {
    if (tls) return tls->write(parts);
  } catch (const FlowError&) {  // why, the next read will say
    return 0;
  }
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = parts.size();
  return ::sendmsg(socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

void Network::drop(Link& link, bool refused) {
  if (Peer* peer = link.peer) {
    auto& current = peer->links[static_cast<size_t>(link.flow)];
    if (current == &link) {
      current = nullptr;
      if (!link.is_worn()) peer->count_broken();
      link.socket.reset();  // before the session says what came over it
      peer->session.down(link.flow);
      peer->connect_again(link.flow);
    }
    if (link.is_ours() && !link.established) peer->attempt_ended(link.flow, refused);
  }
  if (link.watched_for_writing) blocked_.fetch_sub(1, std::memory_order_seq_cst);
  if (link.peer != nullptr) --link.peer->sockets;
  links_.erase(link.number);
}

bool Network::read_from(Link& link) {
  Peer& peer = *link.peer;
  Session& session = peer.session;
  bool arrived = false;
  try {
    for (size_t total = 0; total < kQuantum || (link.tls && link.tls->has_more());) {
      const auto landing = session.landing(link.flow);
      const iovec parts[] = {{landing.data(), landing.size()}, {staging_.data(), staging_.size()}};
      const ssize_t got = link.receive(std::span(parts).subspan(landing.empty() ? 1 : 0));
      if (got < 0 && (errno == EAGAIN || errno == EINTR)) break;
      if (got <= 0) throw FlowError("closed");
      arrived = true;
      const auto bytes = static_cast<size_t>(got);
      const size_t landed = std::min(bytes, landing.size());
      session.landed(link.flow, landed);
      session.read(link.flow, {staging_.data(), bytes - landed}, Clock::now());
      total += bytes;
      if (!link.tls && bytes < landing.size() + staging_.size()) break;
    }
    wait_for_more(link);
  } catch (const ChangedError&) {
    peer.tell_changed();
    drop(link);
  } catch (const FlowError&) {
    drop(link);
  }
  for (const int flow : session.take_closed()) {
    if (Link* closed = peer.links[static_cast<size_t>(flow)]) drop(*closed);
  }
  return arrived;
}

// While a long payload comes, this process is woken for large pieces, not for every packet.
void Network::wait_for_more(Link& link) {
  const size_t here = link.tls ? Tls::kMostHeld : 0;
  const size_t expected = std::max(link.peer->session.expected(link.flow), here) - here;
  const size_t wanted = expected < kLongWait ? 1 : std::min(expected, kWakeAt);
  if (wanted == link.low_water) return;
  link.low_water = wanted;
  set_low_water(link.socket, wanted);
}

void Network::write_to(Link& link) {
  if (link.established) link.peer->tell_paces(Clock::now());
  while (true) {
    std::array<iovec, 32> parts;
    size_t count = 0;
    if (!link.out.empty()) {
      parts[count++] = {link.out.data(), link.out.size()};
    } else if (link.established) {
      count = link.peer->session.gather(link.flow, parts);
    }
    if (count == 0) return watch(link, false);
    const ssize_t sent = link.send(std::span(parts).first(count));
    if (sent <= 0) {
      const bool later = sent < 0 && (errno == EAGAIN || errno == EINTR);
      return later ? watch(link, !link.tls || !link.tls->waits_to_read()) : drop(link);
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
  if (stalled > Clock::duration{}) stood_still_ = {now - since, now};
  drop_strangers(now);
  if (deaf_ && now >= accept_again_) listen(true);
  for (size_t i = 0; i < awake_.size(); ++i) awake_[i]->tick(now, stalled);  // more may wake
  const auto idle = std::ranges::partition(awake_, [](Peer* peer) { return !peer->may_sleep(); });
  for (Peer* peer : idle) forget(*peer);
  awake_.erase(idle.begin(), idle.end());
  park(now);
}

}  // namespace ringcomm
