#include "transport/neighbours.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <array>
#include <thread>

#include "net/handshake.h"
#include "transport/unix_socket.h"

namespace ringcomm {
namespace {

constexpr uint64_t kMagic = kSegmentMagic + 1;
constexpr uint64_t kListener = 0;
constexpr int kBacklog = 512;
constexpr size_t kMostStrangers = 64;  // connections that have not told their name
constexpr auto kLookEvery = std::chrono::milliseconds(1);
constexpr auto kDeafPause = std::chrono::milliseconds(5);
constexpr int kRefusals = 2;           // one may be a process that ends
constexpr size_t kMostKept = 1 << 16;  // words, some for each of 4,096 ranks; then the oldest go

}  // namespace

// A datagram of fixed size, with a descriptor or words. The first of each direction has the
// doorbell and the name.
struct Neighbours::Datagram {
  uint64_t magic = kMagic;
  Parcel parcel;
  char text[kMostWords + 1] = {};
};

// ---- a neighbour

Neighbour::Neighbour(Neighbours& all, Fd socket, uint64_t number)
    : all_(all),
      number_(number),
      socket_(std::move(socket)),
      process_(owner_of_peer(socket_).pid) {}

bool Neighbour::lost() const {
  all_.take_arrived();
  return lost_.load(std::memory_order_acquire);
}

bool Neighbour::uses_device(uint64_t name) const {
  if (page_.data() == nullptr) return false;
  const auto& used = *reinterpret_cast<const UsedDevices*>(page_.data() + UsedDevices::kOffset);
  return std::ranges::any_of(used.names, [&](const auto& known) {
    return known.load(std::memory_order_acquire) == name;  // partner: use_device()
  });
}

// A process that is short of addresses goes without.
void Neighbour::map_arena(const Fd& page) {
  try {
    arena_mapping_ = Mapping(page, Arena::kBytes, kDoorbellBytes);
  } catch (const SystemError&) {
    return;
  }
  ::madvise(arena_mapping_.data(), Arena::kBytes, MADV_DONTDUMP);
  arena_ = {arena_mapping_.data(), Arena::kBytes};
}

bool Neighbour::send(const Parcel& parcel, const Fd& descriptor, const std::string& words) {
  const std::lock_guard lock(all_.mutex_);
  return all_.send(*this, parcel, descriptor, words);
}

Fd Neighbour::take(const Parcel& parcel) {
  all_.wait({}, 0);
  return all_.take(parcel);
}

// ---- life

void Neighbours::open() {
  if (!doorbell_) doorbell_.emplace();
  Card card = make_card();
  card.tcp = !doorbell_->fd();
  Fd listener = listen_unix(card.socket, kBacklog);
  Fd epoll(::epoll_create1(EPOLL_CLOEXEC));
  if (!epoll) throw SystemError("epoll");
  add_to_epoll(epoll, listener, kListener);
  self_ = std::make_shared<Neighbour>(*this, Fd(), UINT64_MAX);
  self_->bell_ = doorbell_->bell();
  self_->arena_ = doorbell_->arena().all();
  self_->met_ = true;
  self_->name_ = card.socket;
  card_ = std::move(card);
  listener_ = std::move(listener);
  epoll_ = std::move(epoll);
}

Card Neighbours::card() {
  const std::lock_guard lock(mutex_);
  if (!epoll_) open();
  Card card = card_;
  card.nonce = random_id();
  return card;
}

Doorbell Neighbours::bell() {
  const std::lock_guard lock(mutex_);
  if (!doorbell_) doorbell_.emplace();
  return doorbell_->bell();
}

std::byte* Neighbours::notice() {
  const std::lock_guard lock(mutex_);
  if (!doorbell_) doorbell_.emplace();
  return doorbell_->notice();
}

Arena& Neighbours::arena() {
  const std::lock_guard lock(mutex_);
  if (!doorbell_) doorbell_.emplace();
  return doorbell_->arena();
}

// More than there is room for are left out: then kernels may be slow, and stay right.
void Neighbours::use_device(uint64_t name) {
  const std::lock_guard lock(mutex_);
  if (!doorbell_) doorbell_.emplace();
  for (auto& known : doorbell_->devices().names) {
    const uint64_t there = known.load(std::memory_order_relaxed);
    if (there == name) return;
    if (there != 0) continue;
    known.store(name, std::memory_order_release);  // partner: Neighbour::uses_device()
    return;
  }
}

bool Neighbours::shares_device(uint64_t name) {
  take_arrived();  // of those that have ended
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(sockets_, [&](const auto& entry) {
    return entry.second->met_ && entry.second->uses_device(name);
  });
}

void Neighbours::forked() {
  for (const auto& [number, other] : sockets_) {
    other->socket_.reset();
    other->forget();
  }
  if (doorbell_) doorbell_->arena().forked();
  listener_.reset();
  epoll_.reset();
  arrived_.clear();
}

// ---- meeting

Neighbours::NeighbourPtr Neighbours::add(Fd socket) {
  auto other = std::make_shared<Neighbour>(*this, std::move(socket), next_++);
  add_to_epoll(epoll_, other->socket_, other->number_);
  sockets_.emplace(other->number_, other);
  return other;
}

// A forked child may hold a copy of the socket for a moment: closing it is not enough for epoll.
void Neighbours::drop(const NeighbourPtr& other) {
  if (!other->socket_) return;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, other->socket_.get(), nullptr);
  other->socket_.reset();
  if (!other->name_.empty()) {
    Known& known = known_[other->name_];
    if (known.process == other) known.process.reset();
    if (other->ours_ && !other->met_ && !known.trouble && ++known.refused >= kRefusals) {
      known.set_apart("its process refuses the connection");
    }
    if (known.nothing()) known_.erase(other->name_);
  }
  if (other->met_) other->lost_.store(true, std::memory_order_release);  // partner: lost()
  sockets_.erase(other->number_);
}

Neighbours::Reached Neighbours::reach(const std::string& name) {
  const std::lock_guard lock(mutex_);
  if (name == card_.socket) return {self_, false, {}};
  if (const auto entry = known_.find(name); entry != known_.end()) {
    Known& known = entry->second;
    if (known.trouble) throw SystemError(*std::exchange(known.trouble, std::nullopt));
    if (known.process) return {known.process->met_ ? known.process : nullptr, false, {}};
    if (!known.apart.empty()) return {nullptr, false, known.apart};
  }
  if (name < card_.socket) return {};
  return connect(name);
}

Neighbours::Reached Neighbours::connect(const std::string& name) {
  try {
    const NeighbourPtr other = add(connect_unix(name));
    other->ours_ = true;
    other->name_ = name;
    known_[name].process = other;
    greet(other);
    return {};
  } catch (const SystemError& error) {
    if (error.code() == EAGAIN) return {};  // its queue is full: others connect as well
    if (error.code() == ECONNREFUSED) return {nullptr, true, {}};
    if (is_own_limit(error.code())) throw;
    known_[name].set_apart(error.what());
    return {nullptr, false, error.what()};
  }
}

bool Neighbours::is_gone(const std::string& name) const {
  try {
    connect_unix(name);
  } catch (const SystemError& error) {
    return error.code() == ECONNREFUSED;
  }
  return false;
}

void Neighbours::greet(const NeighbourPtr& other) {
  Datagram message;
  std::strncpy(message.text, card_.socket.c_str(), kMostWords);
  bool sent = false;
  try {
    sent = send_message(other->socket_, std::as_bytes(std::span(&message, 1)), doorbell_->fd());
  } catch (const SystemError&) {
    sent = false;  // it has closed, or is no process of ours
  }
  if (!sent) drop(other);
}

void Neighbours::meet(const NeighbourPtr& other, const std::string& name, const Fd& page) {
  try {
    const bool whole = bytes_of_memfd(page) == kBytesWithArena;
    check_sealed_memfd(page, whole ? kBytesWithArena : kDoorbellBytes, 0);
    other->page_ = Mapping(page, kDoorbellBytes);
    if (whole) other->map_arena(page);
  } catch (const PeerError&) {
    return drop(other);
  } catch (const SystemError& error) {
    note(name, error);
    return drop(other);
  }
  if (!other->ours_) {  // what it had before may have ended
    if (name.empty()) return drop(other);
    if (const NeighbourPtr old = known_[name].process) read_from(old);
    if (known_[name].process) return drop(other);
  }
  other->bell_ = Doorbell(reinterpret_cast<DoorbellPage*>(other->page_.data()));
  other->name_ = name;
  known_[name].process = other;
  if (!other->ours_) greet(other);
  other->met_ = static_cast<bool>(other->socket_);
}

// Meeting that one failed here: for want of something of this process's, or for good.
void Neighbours::note(const std::string& name, const SystemError& error) {
  if (is_own_limit(error.code())) {
    known_[name].trouble = error;
  } else {
    known_[name].set_apart(error.what());
  }
}

// ---- messages that come

void Neighbours::take_arrived() {
  const int64_t now = Clock::now().time_since_epoch().count();
  const int64_t before = looked_.load(std::memory_order_relaxed);
  if (now - before < std::chrono::nanoseconds(kLookEvery).count()) return;
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || !epoll_) return;
  looked_.store(now, std::memory_order_relaxed);
  progress();
}

void Neighbours::wait(Clock::duration most, uint64_t seen) {
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(most).count();
  epoll_event event;
  if (ms > 0 && news() == seen) {
    if (deaf() != 0) std::this_thread::sleep_for(kDeafPause);  // the listener stays readable
    if (::epoll_wait(epoll_.get(), &event, 1, static_cast<int>(ms)) <= 0) return;
  }
  const std::lock_guard lock(mutex_);
  progress();
}

void Neighbours::progress() {
  std::array<epoll_event, 64> events;
  const int count = ::epoll_wait(epoll_.get(), events.data(), events.size(), 0);
  if (count > 0) news_.fetch_add(1, std::memory_order_relaxed);
  for (int i = 0; i < count; ++i) {
    const uint64_t number = events[static_cast<size_t>(i)].data.u64;
    if (number == kListener) {
      accept_all();
    } else if (const auto entry = sockets_.find(number); entry != sockets_.end()) {
      read_from(NeighbourPtr(entry->second));
    }
  }
}

void Neighbours::accept_all() {
  try {
    while (Fd socket = accept_unix(listener_)) read_from(add(std::move(socket)));
    deaf_.store(0, std::memory_order_relaxed);
  } catch (const SystemError& error) {
    deaf_.store(error.code(), std::memory_order_relaxed);
  }
  drop_strangers();
}

// The oldest go first, of those that have still told no name.
void Neighbours::drop_strangers() {
  std::vector<NeighbourPtr> strangers;
  for (const auto& [number, other] : sockets_) {
    if (other->name_.empty()) strangers.push_back(other);
  }
  for (size_t i = 0; i + kMostStrangers < strangers.size(); ++i) {
    read_from(strangers[i]);
    if (strangers[i]->name_.empty()) drop(strangers[i]);
  }
}

void Neighbours::read_from(const NeighbourPtr& other) {
  while (other->socket_) {
    Datagram message;
    message.magic = 0;
    Fd descriptor;
    Received received = Received::kClosed;
    try {
      received =
          try_receive(other->socket_, std::as_writable_bytes(std::span(&message, 1)), descriptor);
    } catch (const SystemError& error) {
      if (other->met_ && message.magic == kMagic) {  // it came without its descriptor
        arrived_[message.parcel] = {Fd(), error.code(), ""};
        continue;
      }
      message.text[kMostWords] = '\0';
      if (!other->met_) note(other->ours_ ? other->name_ : message.text, error);
    }
    if (received == Received::kNothing) return;
    if (received == Received::kClosed || !hear(other, message, descriptor)) drop(other);
  }
}

bool Neighbours::hear(const NeighbourPtr& other, const Datagram& message, Fd& descriptor) {
  const std::string text(message.text, ::strnlen(message.text, sizeof message.text));
  const bool words = other->met_ && !text.empty();
  if (message.magic != kMagic || static_cast<bool>(descriptor) == words) return false;
  if (!other->met_) {
    if (other->ours_ && text != other->name_) return false;
    meet(other, text, descriptor);
    return true;
  }
  if (ended_.contains(message.parcel.group_id)) return true;
  arrived_[message.parcel] = {std::move(descriptor), 0, text};
  if (words) kept_.push_back(message.parcel);
  if (kept_.size() <= kMostKept) return true;
  std::erase_if(kept_, [&](const Parcel& parcel) { return !arrived_.contains(parcel); });
  while (kept_.size() > kMostKept / 4 * 3) {
    arrived_.erase(kept_.front());
    kept_.pop_front();
  }
  return true;
}

bool Neighbours::send(Neighbour& other, const Parcel& parcel, const Fd& descriptor,
                      const std::string& words) {
  Datagram message;
  message.parcel = parcel;
  words.copy(message.text, kMostWords);
  if (&other == self_.get()) {
    Fd copy(descriptor ? ::fcntl(descriptor.get(), F_DUPFD_CLOEXEC, 0) : -1);
    if (descriptor && !copy) throw SystemError("duplicating a descriptor");
    return hear(self_, message, copy);
  }
  if (!other.socket_) return false;
  try {
    return send_message(other.socket_, std::as_bytes(std::span(&message, 1)), descriptor);
  } catch (const SystemError& error) {
    if (error.code() != EPIPE && error.code() != ECONNRESET) throw;
    return false;  // its end comes to light where it is read
  }
}

Fd Neighbours::take(const Parcel& parcel) {
  const std::lock_guard lock(mutex_);
  auto node = arrived_.extract(parcel);
  if (!node) return Fd();
  Arrived& arrived = node.mapped();
  if (arrived.error != 0) throw SystemError("receiving shared memory", arrived.error);
  return std::move(arrived.descriptor);
}

void Neighbours::end(uint64_t group_id) {
  const std::lock_guard lock(mutex_);
  std::erase_if(arrived_, [&](const auto& entry) { return entry.first.group_id == group_id; });
  ended_.insert(group_id);
}

// ---- the doorbell

DoorbellMemory::DoorbellMemory() : event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  const bool with_arena = Arena::fits(kDoorbellBytes);
  try {
    fd_ = make_sealed_memfd("ringcomm-bell", with_arena ? kBytesWithArena : kDoorbellBytes);
  } catch (const SystemError& error) {
    if (!is_forbidden(error.code())) throw;
  }
  mapping_ = fd_ ? Mapping(fd_, kDoorbellBytes) : Mapping(kDoorbellBytes);
  if (fd_ && with_arena) arena_.map(fd_, kDoorbellBytes);
  if (!event_) throw SystemError("eventfd");
}

}  // namespace ringcomm
