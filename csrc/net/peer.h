// A peer's process, as the network keeps it: the session, its connections, and when to connect.
// Included by the network's own files only.
#pragma once

#include "net/flow_count.h"
#include "net/meter.h"
#include "net/network.h"

namespace ringcomm {

// A process that connects to us needs so long for it, where many share a core.
inline constexpr Clock::duration kTurnedAway = std::chrono::milliseconds(500);
// Bytes that the kernel has taken, another flow cannot carry any more.
inline constexpr size_t kMostUnsent = kFramePayload / 2;

struct Network::Connection {
  uint64_t number = 0;
  Fd socket;
  Peer* peer = nullptr;  // not known before the Hello, where we accept
  int flow = 0;
  bool gone = false;  // dropped

  bool connecting = false, established = false, watched_for_writing = false;
  size_t low_water = 1;      // bytes that make the socket readable
  int address = -1;          // which of the peer's; -1: it connected to us
  bool patient = false;      // it was looked at once more before it is dropped
  bool turned_away = false;  // it comes to us itself, see check_turn()
  int patience = 1;          // each of our attempts waits twice as long as the one before
  bool homeward = false;     // replaces one that is up at another address than the flow's own
  std::unique_ptr<Tls> tls;
  std::optional<Handshake> handshake;
  std::vector<std::byte> in, out;  // the handshake's
  Clock::time_point began;
  Meter meter;
  uint64_t arrived = 0;  // bytes, when they were counted last

  // Work as readv(2) and sendmsg(2) do; with TLS they take fewer bytes, and throw FlowError.
  ssize_t receive(std::span<const iovec> parts);
  ssize_t send(std::span<iovec> parts);
  bool is_worn() const { return tls && tls->is_worn(); }
  bool is_ours() const { return connecting || (handshake && !handshake->accepting()); }
};

// A stranger that has said who it is has another lock now. Then `gone` is not to be read.
inline bool Network::Entry::is_current() const { return link->peer == peer.get() && !link->gone; }

class Network::Peer final : public Wire,
                            public Party,
                            public Receiver,
                            public std::enable_shared_from_this<Peer> {
 public:
  Peer(Network& network, const Contact& contact, const Key& key, const SessionNumbers& numbers);

  // ---- Wire; take the lock
  void open(uint64_t channel, Receiver* receiver) override;
  void close(uint64_t channel) override;
  void post(const Frame& frame, Payload payload) override {
    const std::lock_guard lock(mutex);
    use();
    session.post(frame, std::move(payload));
  }
  void reclaim_lent(uint64_t channel) override {
    const std::lock_guard lock(mutex);
    session.reclaim_lent(channel);
  }
  void flush() override {
    const std::lock_guard lock(mutex);
    write_all();
  }
  bool reached() override {
    const std::lock_guard lock(mutex);
    return session.posted() > 0 || session.last_heard() != Clock::time_point{};
  }
  bool parked() override {
    const std::lock_guard lock(mutex);
    return session.parked();
  }
  uint64_t undelivered() override;
  uint64_t resent() const override { return session.counters().resent; }
  uint64_t broken() const override { return broken_; }
  void count_broken() { broken_ += wanted() ? 1 : 0; }
  void need() override {
    const std::lock_guard lock(mutex);
    use();
    session.unpark();
    needed_ = true;
    write_all();  // connects now, not at the next tick
  }
  void alarm() override {
    network_.alarm_.store(true, std::memory_order_seq_cst);
    network_.rouse();
  }
  bool lost() override { return lost_.load(std::memory_order_acquire); }
  std::string condition() override;

  // ---- Party and Receiver; under the lock
  const Key& key() const override { return key_; }
  int flows() const override { return network_.options_.flows; }
  uint64_t generation(int flow) const override { return session.generation(flow); }
  Cursor fence(int flow) override;
  std::byte* place(const Frame& frame) override;
  void deliver(const Frame& frame, std::span<const std::byte> payload) override;

  // ---- connections; under the lock
  bool wanted() const;  // somebody has something to say, or to hear
  void wake();          // there will be something to do at each tick
  bool may_sleep() const { return (lost_ || !wanted()) && sockets.empty(); }
  void sleep() { life_ = Life::kAsleep; }
  // Notes that no table has it any more: meet() makes another peer.
  void forget() { life_ = Life::kForgotten; }
  bool is_forgotten() const { return life_ == Life::kForgotten; }
  bool restless() const;         // it has to be looked at often
  void keep() { kept_ = true; }  // as long as the network lives
  bool is_held() const { return kept_ || !channels_.empty(); }
  // Tells whether this process has something to do with it, or it has proved who it is.
  bool is_known() const { return is_held() || session.last_heard() != Clock::time_point{}; }

  // ---- parking; under the lock
  void use() {
    wake();
    used_at_ = Clock::now();
  }
  Clock::time_point used_at() const { return used_at_; }
  bool idle() override;
  bool was_asked(Clock::time_point now) const;
  bool may_be_asked(Clock::time_point now);
  bool is_done(Clock::time_point now) const;
  void ask_to_park(Clock::time_point now);

  Receiver* receiver_of(uint64_t channel);
  void tick(Clock::time_point now, Clock::duration stalled);
  void connect(int flow, Clock::time_point now);
  void connect_again(int flow) { attempts_[static_cast<size_t>(flow)] = {}; }  // at once
  bool is_away(int flow) const;
  void attempt_ended(int flow, bool refused);
  void turned_away(int flow) {
    attempts_[static_cast<size_t>(flow)].next = Clock::now() + kTurnedAway;
  }
  bool handshaking(int flow) const;
  void write_all();
  void update_paces(Clock::time_point now);
  void count_flows(Clock::time_point now);
  void log_changed_bytes();

  std::mutex mutex;  // guards what follows, and the connections
  Session session;
  std::vector<Connection*> links;    // established, by flow
  std::vector<Connection*> sockets;  // these, and those of which a handshake may make one
  const Contact contact;
  std::string trouble;  // why a handshake failed, for the text of giving up

 private:
  struct Attempts {  // to connect one flow
    int tries = 0, asked = 0, under_way = 0, refused = 0;
    Clock::time_point next;
    Clock::duration pause{std::chrono::milliseconds(50)};
  };
  void take_from(uint64_t channel, Receiver* receiver);
  void give_up(const std::string& why);
  std::string where() const;

  Network& network_;
  const Key key_;
  std::unordered_map<uint64_t, Receiver*> channels_;
  enum class Life : uint8_t { kAsleep, kAwake, kForgotten } life_ = Life::kAsleep;
  bool kept_ = false, needed_ = false, died_ = false, told_changed_ = false;
  std::vector<Attempts> attempts_;
  FlowCount count_{kAutoFlows};
  void send_news(Clock::time_point now);
  Clock::time_point told_news_, told_paces_, used_at_, asked_at_;
  Clock::time_point wanted_since_, refused_since_, gave_up_at_;
  std::atomic<bool> lost_{false};
  std::atomic<uint64_t> broken_{0};  // partner: broken()
  std::string why_lost_;
};

}  // namespace ringcomm
