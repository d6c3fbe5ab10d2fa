// The rungs of net_ladder.cc: ways to move messages between two processes, from a socket upwards.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>

#include "cpp/harness.h"
#include "net/network.h"

namespace ringcomm::testing {

constexpr size_t kStaging = 64 << 10;
constexpr uint64_t kChannel = 1;

inline double seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

// The talk of the two processes beside the connection that is measured.
class Control {
 public:
  explicit Control(Fd socket) : socket_(std::move(socket)) {}
  void say(const std::string& text) {
    const uint64_t size = text.size();
    write(&size, sizeof size);
    write(text.data(), size);
  }
  std::string hear() {
    uint64_t size = 0;
    read(&size, sizeof size);
    std::string text(size, ' ');
    read(text.data(), size);
    return text;
  }

  // Returns when the other process has come here as well.
  void meet() {
    say("here");
    hear();
  }

 private:
  void write(const void* data, size_t bytes) {
    const auto done = ::send(socket_.get(), data, bytes, MSG_NOSIGNAL);
    require(done == static_cast<ssize_t>(bytes), "the other process is gone");
  }
  void read(void* data, size_t bytes) {
    const auto done = ::recv(socket_.get(), data, bytes, MSG_WAITALL);
    if (done != static_cast<ssize_t>(bytes)) throw Failure("the other process is gone");
  }
  Fd socket_;
};

struct Place {  // of one of the two processes
  int rank = 0;
  Control& control;
  std::chrono::microseconds spin{0};
  Address address;     // its own
  bool alone = false;  // both are on loopback

  // As a group between hosts has it (comm/create.cc); without spinning, at once to sleep.
  Patience patience() const {
    return Patience(spin.count() == 0 ? SpinPolicy{{}, 0, 0} : SpinPolicy{spin, 4, 4, spin / 64});
  }
};

// ---- connections

inline void wait_for(const Fd& fd, short events) {
  pollfd entry{fd.get(), events, 0};
  require(::poll(&entry, 1, 10'000) == 1, "nothing within 10 s");
}

// Rank 1 listens, rank 0 connects. The listener lasts for as many connections as are wanted.
class Meeting {
 public:
  explicit Meeting(Place& place) : rank_(place.rank) {
    if (rank_ == 1) listener_ = listen_tcp(place.address, 0, 0, 8);
    if (rank_ == 1) place.control.say(local_address(listener_).to_text());
    if (rank_ == 0) at_ = Address::from_text(place.control.hear());
  }
  Fd connect() const {
    if (rank_ == 0) {
      Fd socket = connect_tcp(at_);
      wait_for(socket, POLLOUT);
      require(pending_error(socket) == 0, "no connection");
      return socket;
    }
    wait_for(listener_, POLLIN);
    Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket) throw SystemError("accept");
    return socket;
  }

 private:
  int rank_;
  Fd listener_;
  Address at_;
};

// A socket is polled for a while, then slept on.
class Waiter {
 public:
  Waiter(const Fd& socket, Patience patience) : socket_(socket), patience_(patience) {}
  void moved() { patience_.reset(); }
  void wait(short events) {
    if (patience_.again()) return;
    wait_for(socket_, events);
    patience_.reset();
  }

 private:
  const Fd& socket_;
  Patience patience_;
};

inline bool again(ssize_t done) {
  if (done == 0 || (done < 0 && errno != EAGAIN && errno != EINTR)) throw Failure("closed");
  return done < 0;
}

inline void send_all(const Fd& socket, Waiter& waiter, const std::byte* data, size_t bytes) {
  while (bytes > 0) {
    const ssize_t done = ::send(socket.get(), data, bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (again(done)) {
      waiter.wait(POLLOUT);
      continue;
    }
    waiter.moved();
    data += done;
    bytes -= static_cast<size_t>(done);
  }
}

inline void receive_all(const Fd& socket, Waiter& waiter, std::byte* data, size_t bytes) {
  while (bytes > 0) {
    const ssize_t done = ::recv(socket.get(), data, bytes, MSG_DONTWAIT);
    if (again(done)) {
      waiter.wait(POLLIN);
      continue;
    }
    waiter.moved();
    data += done;
    bytes -= static_cast<size_t>(done);
  }
}

// ---- rungs

// Messages out of one buffer into the other's. Each is of the whole buffer or of its first byte.
class Rung {
 public:
  explicit Rung(size_t bytes) : out(std::max<size_t>(bytes, 1)), in(out.size()) {}
  virtual ~Rung() = default;
  virtual void send(size_t bytes) = 0;
  virtual void receive(size_t bytes) = 0;
  std::vector<std::byte> out, in;
};

class SocketRung final : public Rung {
 public:
  SocketRung(Place& place, size_t bytes)
      : Rung(bytes), socket_(Meeting(place).connect()), waiter_(socket_, place.patience()) {}
  void send(size_t bytes) override { send_all(socket_, waiter_, out.data(), bytes); }
  void receive(size_t bytes) override { receive_all(socket_, waiter_, in.data(), bytes); }

 private:
  Fd socket_;
  Waiter waiter_;
};

// The kernel does all the waiting: it wakes us once a message, or when there is room again.
class BlockingRung final : public Rung {
 public:
  BlockingRung(Place& place, size_t bytes) : Rung(bytes), socket_(Meeting(place).connect()) {
    const int flags = ::fcntl(socket_.get(), F_GETFL);
    if (::fcntl(socket_.get(), F_SETFL, flags & ~O_NONBLOCK) != 0) throw SystemError("fcntl");
  }
  void send(size_t bytes) override {
    const ssize_t done = ::send(socket_.get(), out.data(), bytes, MSG_NOSIGNAL);
    require(done == static_cast<ssize_t>(bytes), "closed");
  }
  void receive(size_t bytes) override {
    const ssize_t done = ::recv(socket_.get(), in.data(), bytes, MSG_WAITALL);
    require(done == static_cast<ssize_t>(bytes), "closed");
  }

 private:
  Fd socket_;
};

// Where frames land, and how much has.
class Landing : public Receiver {
 public:
  explicit Landing(Rung& rung) : rung_(rung) {}
  std::byte* place(const Frame& frame) override {
    if (frame.offset + frame.bytes > rung_.in.size()) throw FlowError("beyond the buffer");
    return rung_.in.data() + frame.offset;
  }
  void deliver(const Frame& frame, std::span<const std::byte> /*payload*/) override {
    arrived_.fetch_add(frame.bytes, std::memory_order_seq_cst);  // partner: has()
  }
  void expect(size_t bytes) { wanted_ += bytes; }
  bool has() const { return arrived_.load(std::memory_order_seq_cst) >= wanted_; }

 private:
  Rung& rung_;
  std::atomic<uint64_t> arrived_{0};
  uint64_t wanted_ = 0;
};

template <typename Post>
void post_message(const Rung& rung, size_t bytes, Post&& post) {
  for (size_t done = 0; done < bytes;) {
    Frame frame;
    frame.type = FrameType::kPut;
    frame.channel = kChannel;
    frame.offset = done;
    frame.bytes = static_cast<uint32_t>(std::min(bytes - done, kFramePayload));
    post(frame, rung.out.data() + done);
    done += frame.bytes;
  }
}

// The session, and only the part of network.cc that moves bytes.
class SessionRung final : public Rung {
 public:
  SessionRung(Place& place, size_t bytes, bool verify)
      : Rung(bytes),
        landing_(*this),
        session_(landing_, 1, rules(verify)),
        socket_(Meeting(place).connect()),
        waiter_(socket_, place.patience()),
        staging_(kStaging) {
    session_.up(0, 1, Cursor{}, Clock::now());
  }
  void send(size_t bytes) override {
    post_message(*this, bytes,
                 [&](const Frame& f, const std::byte* p) { session_.post(f, Payload(p)); });
    move([&] { return !session_.has_output(0); });
  }
  void receive(size_t bytes) override {
    landing_.expect(bytes);
    move([&] { return landing_.has(); });
  }

 private:
  static SessionRules rules(bool verify) {
    SessionRules rules;
    rules.verify = verify;
    return rules;
  }
  template <typename Done>
  void move(Done&& done) {
    while (!done()) {
      const bool wrote = write();
      if (read() || wrote) {
        waiter_.moved();
      } else if (!done()) {
        waiter_.wait(session_.has_output(0) ? POLLIN | POLLOUT : POLLIN);
      }
    }
  }
  bool write() {
    std::array<iovec, 32> parts;
    const size_t count = session_.gather(0, parts);
    if (count == 0) return false;
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = count;
    const ssize_t sent = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (again(sent)) return false;
    session_.wrote(0, static_cast<size_t>(sent));
    return true;
  }
  bool read() {
    const auto landing = session_.landing(0);
    iovec parts[] = {{landing.data(), landing.size()}, {staging_.data(), staging_.size()}};
    const int skip = landing.empty() ? 1 : 0;
    const ssize_t got = ::readv(socket_.get(), parts + skip, 2 - skip);
    if (again(got)) return false;
    const size_t landed = std::min(static_cast<size_t>(got), landing.size());
    session_.landed(0, landed);
    session_.read(0, {staging_.data(), static_cast<size_t>(got) - landed}, Clock::now());
    return true;
  }

  Landing landing_;
  Session session_;
  Fd socket_;
  Waiter waiter_;
  std::vector<std::byte> staging_;
};

// As production has it; a waiting thread drives, as Progress::wait() does.
class NetworkRung final : public Rung {
 public:
  NetworkRung(Place& place, size_t bytes)
      : Rung(bytes),
        landing_(*this),
        patience_(place.patience()),
        event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        bell_(&page_, event_.get()),
        network_(options(place, bell_)) {
    place.control.say(network_.contact().to_text());
    wire_ = &network_.reach(Contact::from_text(place.control.hear()));
    wire_->open(kChannel, &landing_);
    place.control.meet();  // bytes that come before the other has opened it are dropped
  }
  ~NetworkRung() override { wire_->close(kChannel); }
  void send(size_t bytes) override {
    post_message(*this, bytes,
                 [&](const Frame& f, const std::byte* p) { wire_->post(f, Payload(p)); });
    wire_->flush();
  }
  void receive(size_t bytes) override {
    landing_.expect(bytes);
    wire_->need();
    network_.begin_driving();
    while (!landing_.has()) {
      require(!wire_->lost(), wire_->condition());
      if (network_.progress()) {
        patience_.reset();
      } else if (!patience_.again()) {
        bell_.sleep_with(
            network_.descriptor(), kAllNews, [&] { return landing_.has(); },
            std::chrono::milliseconds(50));
        patience_.reset();
      }
    }
    network_.end_driving(false);
  }

 private:
  static NetworkOptions options(const Place& place, const Doorbell& bell) {
    NetworkOptions options;
    options.places.addresses = {place.address.host()};
    options.bell = bell;
    return options;
  }
  Landing landing_;
  Patience patience_;
  DoorbellPage page_{};
  Fd event_;
  Doorbell bell_;
  Network network_;
  Wire* wire_ = nullptr;
};

inline std::unique_ptr<Rung> make_rung(const std::string& name, Place& place, size_t bytes) {
  if (name == "blocking") return std::make_unique<BlockingRung>(place, bytes);
  if (name == "socket") return std::make_unique<SocketRung>(place, bytes);
  if (name == "network") return std::make_unique<NetworkRung>(place, bytes);
  require(name == "session" || name == "checksum", "no rung is called ", name);
  return std::make_unique<SessionRung>(place, bytes, name == "checksum");
}

}  // namespace ringcomm::testing
