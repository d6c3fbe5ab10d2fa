// This process's side of the network: its listeners, one session for each process it talks with,
// and the sockets between. A thread that waits for something drives it, by progress(). While none
// does, the *network thread* does, so that arriving bytes are taken, and the peers hear of us, also
// while the program computes. It begins with the first peer.
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "base/config.h"
#include "base/doorbell.h"
#include "net/address.h"
#include "net/handshake.h"
#include "net/session.h"
#include "net/tls.h"
#include "net/wire.h"

namespace ringcomm {

// The words of a process to the others, through the store.
struct Contact {
  ProcessId id{};
  Key key{};        // part of the key of each pair, see ProcessConfig::secret
  std::string tls;  // TlsSettings::way(): an attacker who changes it stops the job, no more
  std::vector<Address> addresses;

  std::string to_text() const;
  static Contact from_text(const std::string& text);  // throws UsageError
};

// A group whose ranks become peers when one of them has something to say. Both are called under the
// network's lock: they may not call the network or a wire, nor take a lock whose holder does.
class Directory {
 public:
  virtual ~Directory() = default;
  // Of a process that connects to this one. Null: it is none of this group.
  virtual std::optional<Contact> contact_of(const ProcessId& id) = 0;
  // Takes that process's frames of this group's channel, until the wire's close(). Called once,
  // when this side reaches the process or before its first frame is placed. Null: it is none of
  // this group, and its frames are dropped.
  virtual Receiver* receiver(const ProcessId& id, Wire& wire) = 0;
};

// Of the configuration: the secret, the flows and the level of the log.
struct NetworkOptions : ProcessConfig {
  Places places;
  std::chrono::milliseconds resume{std::chrono::seconds(30)};  // a peer not heard of is given up
  Doorbell bell;                                               // rung when something has arrived
  std::function<void()> alarmed = [] {};                       // see Wire::alarm()
  // Beyond so many, the connections to peers with which this process has nothing under way are
  // parked, those first that were used least recently.
  size_t most_connections = 64;
  uint64_t tls_records = TlsSettings::kMostRecords;  // of one connection, see there
};

class Network {
 public:
  explicit Network(const NetworkOptions& options);
  ~Network();

  const Contact& contact() const { return contact_; }
  // The session with that process, one for all groups. The wire lives as long as the network.
  Wire& reach(const Contact& peer);
  // The channel is open there, for that process's receiver of its directory. The wire lives until
  // it is closed.
  Wire& reach(const Contact& peer, uint64_t channel);
  // Before any other rank sends the first frame of this channel.
  void enter(uint64_t channel, Directory& directory);
  // The directory is called no more. Before the wires' close(): a frame would open them again.
  void leave(uint64_t channel);

  struct Counts {
    size_t peers = 0, awake = 0, resting = 0, sockets = 0;
  };
  Counts counts();  // what there is now, for people

  // Reads and writes sockets without waiting. True when something arrived. Any thread.
  bool progress();
  // Between these two, the calling thread calls progress() often, and the network thread stands
  // back.
  void begin_driving() { driving_.fetch_add(1, std::memory_order_seq_cst); }
  // `rest`: this thread sleeps now, and the network thread is to wake it.
  void end_driving(bool rest) {
    const bool last = driving_.fetch_sub(1, std::memory_order_seq_cst) == 1;
    if (last && (rest || blocked_.load(std::memory_order_seq_cst) > 0)) quiet_.notify_one();
  }
  void before_fork() { mutex_.lock(); }
  void after_fork() { mutex_.unlock(); }
  // For a forked child: closes the sockets. Nothing else of this may be used there.
  void forked();

 private:
  class Peer;
  struct Link;   // one connection
  struct Rest {  // a peer that nobody needs now: another session would number its frames anew
    Contact contact;
    SessionNumbers numbers;
  };
  using Lock = std::unique_lock<std::mutex>;

  void listen();
  void listen(bool on);
  void start();
  void check_tls(const Contact& contact) const;
  Peer& meet(const Contact& contact);
  Peer* find(const ProcessId& id);
  void run();
  bool handle_events(int timeout_ms, Lock& lock);
  bool take_events(uint64_t number, uint32_t events);
  bool handle(Link& link, uint32_t events);
  void accept_from(const Fd& listener);
  bool advance_handshake(Link& link);
  void greet(Link& link);
  void meet_caller(Link& link);
  void check_turn(const Peer& peer, int flow) const;
  void established(Link& link);
  bool read_from(Link& link);
  void wait_for_more(Link& link);
  void write_to(Link& link);
  void watch(Link& link, bool writable);
  Link& add_link(Fd socket, Peer* peer, int flow);
  void drop(Link& link, bool refused = false);
  static const Peer* claimed(const Link& link);
  void drop_late(uint64_t number);
  void drop_strangers(Clock::time_point now);
  void tick(Clock::time_point now);
  void park(Clock::time_point now);
  void forget(Peer& peer);
  bool dozes() const { return awake_.empty() && links_.empty() && !deaf_ && !alarm_; }
  void rouse();

  const NetworkOptions options_;
  const TlsSettings tls_;
  Contact contact_;
  Fd epoll_, wake_;
  std::vector<Fd> listeners_;
  std::vector<std::byte> staging_;

  std::mutex mutex_;  // guards what follows
  std::condition_variable quiet_;
  std::map<ProcessId, std::unique_ptr<Peer>> peers_;
  std::map<ProcessId, Rest> resting_;
  std::vector<Peer*> awake_;                    // that have connections, or want them
  std::map<uint64_t, Directory*> directories_;  // by channel
  std::unordered_map<uint64_t, std::unique_ptr<Link>> links_;
  uint64_t next_link_ = 64;  // below: listeners and wake_
  Clock::time_point ticked_, accept_again_;
  std::pair<Clock::time_point, Clock::time_point> stood_still_;  // from, to: this process itself
  bool stop_ = false, deaf_ = false, alarm_ = false;
  bool dozing_ = false;    // the network thread: until rouse()
  bool restless_ = false;  // ticks are to be frequent

  std::atomic<int> driving_{0};
  std::atomic<int> blocked_{0};  // connections that could not take all there was
  std::thread thread_;
};

}  // namespace ringcomm
