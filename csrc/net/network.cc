#include "net/network.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include "net/peers.h"

namespace ringcomm {

constexpr auto kTick = std::chrono::milliseconds(10);  // while connections are being made
constexpr auto kCalm = std::chrono::milliseconds(100), kDoze = std::chrono::milliseconds(500);
constexpr size_t kStaging = 64 << 10;  // on the stack
constexpr size_t kWakeAt = 64 << 10, kLongWait = 16 << 10;
constexpr size_t kQuantum = 1 << 20;  // read of one connection before others get their turn
constexpr uint64_t kListeners = 64;   // links have higher numbers

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
      peers_(std::make_unique<Peers>(*this)),
      ticked_(Clock::now()),
      most_connections_(options.most_connections) {
  if (!epoll_ || !wake_) throw SystemError("epoll");
  contact_.id = random_id();
  contact_.key = random_key();
  contact_.tls = tls_.way();
  listen();
}

Network::~Network() {
  stop_ = true;
  rouse();
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

void Network::start() {
  const std::lock_guard lock(mutex_);
  if (!thread_.joinable()) thread_ = std::thread(&Network::run, this);
}

Wire& Network::reach(const Contact& contact, std::optional<uint64_t> channel) {
  RINGCOMM_CHECK(contact.tls == contact_.tls, "TLS is ", contact_.tls, " here and ",
                 contact.tls.substr(0, 20), " at ", contact.addresses[0].to_text(),
                 ": set RINGCOMM_TLS and its files alike on every rank");
  const Held held = peers_->meet(contact);
  channel ? void(held.peer->receiver_of(*channel)) : held.peer->keep();
  return *held.peer;
}

void Network::enter(uint64_t channel, Directory& directory) {
  start();
  peers_->enter(channel, directory);
}

void Network::leave(uint64_t channel) { peers_->leave(channel); }

Network::Counts Network::counts() {
  Counts counts = peers_->counts();
  const std::lock_guard lock(mutex_);
  counts.sockets = links_.size();
  return counts;
}

void Network::forked() {
  for (auto& [number, entry] : links_) entry.link->socket.reset();
  listeners_.clear();
  epoll_.reset();
  wake_.reset();
}

// ---- driving

bool Network::progress() { return handle_events(false); }

void Network::rouse() {
  const uint64_t increment = 1;
  if (::write(wake_.get(), &increment, sizeof increment) < 0) std::terminate();
}

// Waits for wake_, and for the sockets unless another thread looks after them. A word written to
// wake_ before the wait ends it as well, so no word of end_driving(), wake() or alarm() is missed.
void Network::run() {
  while (!stop_) {
    standing_back_.store(true, std::memory_order_seq_cst);  // before driving_: see end_driving()
    const bool driven = driving_.load(std::memory_order_seq_cst) > 0;
    if (!driven) standing_back_.store(false, std::memory_order_relaxed);
    try {
      std::array<pollfd, 2> polled = {{{wake_.get(), POLLIN, 0}, {epoll_.get(), POLLIN, 0}}};
      ::poll(polled.data(), driven ? 1 : 2, interval_ms(driven));
      standing_back_.store(false, std::memory_order_relaxed);
      uint64_t rings = 0;
      if (polled[0].revents != 0 && ::read(wake_.get(), &rings, sizeof rings) < 0) continue;
      handle_events(!driven);  // a driver may be in a callback
      if (alarm_.exchange(false, std::memory_order_seq_cst)) options_.alarmed();
    } catch (const std::exception& error) {
      survive(error);
    }
  }
}

// This process is out of memory, say. Its unfinished work is done at a later tick, or when the
// connection is made anew.
void Network::survive(const std::exception& error) {
  if (survived_.exchange(true)) return;
  Logger(options_.log, "")
      .warning("this process could not serve its connections, and tries again: ", error.what(),
               " (said once)");
}

int Network::interval_ms(bool driven) {
  const Counts now = counts();
  const bool dozes = now.awake == 0 && now.sockets == 0 && !deaf_;
  const auto most = restless_ ? (driven ? 2 * kTick : kTick) : dozes && !driven ? kDoze : kCalm;
  return static_cast<int>(most.count());
}

bool Network::handle_events(bool patient) {
  std::array<epoll_event, 64> events;
  const int count = ::epoll_wait(epoll_.get(), events.data(), events.size(), 0);
  bool arrived = false;
  for (int i = 0; i < count; ++i) {
    const epoll_event& event = events[static_cast<size_t>(i)];
    const uint64_t number = event.data.u64;
    if (number < kListeners) {
      accept_from(listeners_[number]);
    } else if (const Entry entry = entry_of(number); entry.link) {
      arrived = take_events(entry, event.events, patient) || arrived;
    }
  }
  if (arrived) options_.bell.notify(kAllNews);
  if (const auto now = Clock::now(); now - ticked_.load() >= (restless_ ? kTick : kCalm)) tick(now);
  return arrived;
}

Network::Entry Network::entry_of(uint64_t number) {
  const std::lock_guard lock(mutex_);
  const auto link = links_.find(number);
  return link == links_.end() ? Entry() : link->second;
}

Network::Lock Network::lock_of(const Entry& entry) {
  return Lock(entry.peer ? entry.peer->mutex : strangers_, std::defer_lock);
}

// An event that is left to another thread comes again: epoll tells of it until it was read.
bool Network::take_events(const Entry& entry, uint32_t events, bool patient) {
  Lock lock = lock_of(entry);
  if (!patient && !lock.try_lock()) return false;
  if (patient) lock.lock();
  Connection& link = *entry.link;
  if (!entry.is_current()) return false;
  Held caller;
  try {
    return service(link, events, caller);
  } catch (const FlowError&) {  // a peer's nonsense
    if (!link.gone) drop(link);
  } catch (const std::exception& error) {
    survive(error);
    if (!link.gone) drop(link);
  }
  return false;
}

// Does all that the connection can do now, whatever state it is in.
bool Network::service(Connection& link, uint32_t events, Held& caller) {
  if (link.connecting) {
    const int error = pending_error(link.socket);
    if (error != 0 || (events & (EPOLLERR | EPOLLHUP)) != 0) {
      drop(link, error == ECONNREFUSED || error == ECONNRESET);
      return false;
    }
    greet(link);
    return false;
  }
  bool readable = (events & (EPOLLIN | EPOLLERR | EPOLLHUP)) != 0;
  if (!link.established) {
    if (!advance_handshake(link, caller)) return false;
    readable = link.established;  // TLS may hold what came with the handshake's last message
  }
  const bool arrived = readable && !link.gone && read_from(link);
  if (!link.gone) write_to(link);
  return arrived;
}

// ---- connections that are up

ssize_t Network::Connection::receive(std::span<const iovec> parts) {
  if (tls) return tls->read({static_cast<std::byte*>(parts[0].iov_base), parts[0].iov_len});
  return ::readv(socket.get(), parts.data(), static_cast<int>(parts.size()));
}

ssize_t Network::Connection::send(std::span<iovec> parts) {
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

void Network::drop(Connection& link, bool refused) {
  decltype(links_)::node_type kept;  // until the end of this function, at least
  {
    const std::lock_guard lock(mutex_);
    kept = links_.extract(link.number);
    link.socket.reset();  // before the session says what came over it
  }
  link.gone = true;
  if (link.watched_for_writing) blocked_.fetch_sub(1, std::memory_order_seq_cst);
  if (Peer* peer = link.peer) {
    std::erase(peer->sockets, &link);
    auto& current = peer->links[static_cast<size_t>(link.flow)];
    if (current == &link) {
      current = nullptr;
      if (!link.is_worn()) peer->count_broken();
      peer->session.down(link.flow);
      peer->connect_again(link.flow);
    }
    if (link.is_ours() && !link.established) peer->attempt_ended(link.flow, refused);
    if (link.turned_away) peer->turned_away(link.flow);
  }
}

bool Network::read_from(Connection& link) {
  Peer& peer = *link.peer;
  Session& session = peer.session;
  bool arrived = false;
  std::array<std::byte, kStaging> staging;
  try {
    for (size_t total = 0; total < kQuantum || (link.tls && link.tls->has_more());) {
      const auto landing = session.landing(link.flow);
      const iovec parts[] = {{landing.data(), landing.size()}, {staging.data(), staging.size()}};
      const ssize_t got = link.receive(std::span(parts).subspan(landing.empty() ? 1 : 0));
      if (got < 0 && (errno == EAGAIN || errno == EINTR)) break;
      if (got <= 0) throw FlowError("closed");
      arrived = true;
      const auto bytes = static_cast<size_t>(got);
      const size_t landed = std::min(bytes, landing.size());
      session.landed(link.flow, landed);
      session.read(link.flow, {staging.data(), bytes - landed}, Clock::now());
      total += bytes;
      if (!link.tls && bytes < landing.size() + staging.size()) break;
    }
    wait_for_more(link);
  } catch (const ChangedError&) {
    peer.log_changed_bytes();
    drop(link);
  } catch (const FlowError&) {
    drop(link);
  }
  for (const int flow : session.take_closed()) {
    if (Connection* closed = peer.links[static_cast<size_t>(flow)]) drop(*closed);
  }
  return arrived;
}

// While a long payload comes, this process is woken for large pieces, not for every packet.
void Network::wait_for_more(Connection& link) {
  const size_t here = link.tls ? Tls::kMostHeld : 0;
  const size_t expected = std::max(link.peer->session.expected(link.flow), here) - here;
  const size_t wanted = expected < kLongWait ? 1 : std::min(expected, kWakeAt);
  if (wanted == link.low_water) return;
  link.low_water = wanted;
  set_low_water(link.socket, wanted);
}

void Network::write_to(Connection& link) {
  if (link.established) link.peer->update_paces(Clock::now());
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

void Network::watch(Connection& link, bool writable) {
  if (link.watched_for_writing == writable) return;
  link.watched_for_writing = writable;
  blocked_.fetch_add(writable ? 1 : -1, std::memory_order_seq_cst);
  epoll_event event{EPOLLIN | (writable ? EPOLLOUT : 0u), {.u64 = link.number}};
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, link.socket.get(), &event);
}

void Network::tick(Clock::time_point now) {
  const Lock ticking(ticking_, std::try_to_lock);
  if (!ticking) return;
  const auto since = now - ticked_.exchange(now);
  const Clock::duration stalled = since > std::chrono::seconds(1) ? since : Clock::duration{};
  if (stalled > Clock::duration{}) {
    const std::lock_guard lock(mutex_);
    stood_still_ = {now - since, now};
  }
  drop_strangers(now);
  if (deaf_ && now >= accept_again_.load()) listen(true);
  restless_ = deaf_.load();
  const auto peers = peers_->awake();
  crowd_ = static_cast<int>(peers.size());
  for (const auto& peer : peers) {
    const std::lock_guard lock(peer->mutex);
    try {
      peer->tick(now, stalled);
    } catch (const std::exception& error) {
      survive(error);
    }
    if (peer->restless()) restless_ = true;
    if (peer->may_sleep()) peers_->let_sleep(*peer);
  }
  peers_->park(now, most_connections_);
}

}  // namespace ringcomm
