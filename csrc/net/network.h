// This process's side of the network: its listeners, one session for each process it talks with,
// and the sockets between. A thread that waits for something drives it, by progress(). While none
// does, the *network thread* does, so that arriving bytes are taken, and the peers hear of us, also
// while the program computes. It begins with the first peer.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
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

// A group whose ranks become peers when one of them has something to say. Its functions are called
// one at a time, under locks of the network: they may not call the network or a wire, nor take a
// lock whose holder does.
class Directory {
 public:
  virtual ~Directory() = default;
  // Tells how a process is reached that connects to this one; nothing if it is not of this group.
  virtual std::optional<Contact> contact_of(const ProcessId& id) = 0;
  // Takes that process's frames of this group's channel, until the wire's close(). Called once,
  // when this side reaches the process or before its first frame is placed. Null: it is none of
  // this group, and its frames are dropped.
  virtual Receiver* receiver(const ProcessId& id, Wire& wire) = 0;
};

// The configuration gives the secret, the flows and the level of the log.
struct NetworkOptions : ProcessConfig {
  Places places;
  std::chrono::milliseconds resume{std::chrono::seconds(30)};  // a peer not heard of is given up
  Doorbell bell;                                               // rung when something has arrived
  std::function<void()> alarmed = [] {};                       // see Wire::alarm()
  // Beyond so many, the connections to peers with which this process has nothing under way are
  // parked, those first that were used least recently.
  size_t most_connections = 64;
  uint64_t tls_records = TlsSettings::kMostRecords;  // that one connection seals at most
};

// Each peer has a lock, for its session and its connections. So several threads send, read and add
// up checksums side by side, each with another peer. Tables have locks that are held for moments.
// Locks are taken in this order: strangers, a peer, directories, tables.
class Network {
 public:
  explicit Network(const NetworkOptions& options);
  ~Network();

  const Contact& contact() const { return contact_; }
  // Begins or finds the session with that process, one for all groups. The channel, if one is
  // named, is open for that process's receiver of its directory, and the wire lives until it is
  // closed. Else the wire lives as long as the network. Throws UsageError where TLS is on at one
  // end only.
  Wire& reach(const Contact& peer, std::optional<uint64_t> channel = std::nullopt);
  // Takes frames of this channel from now on: before any other rank sends the first.
  void enter(uint64_t channel, Directory& directory);
  // Calls the directory no more. Before the wires' close(): a frame would open them again.
  void leave(uint64_t channel);

  // Sets NetworkOptions::most_connections.
  void keep(size_t connections) { most_connections_ = connections; }

  struct Counts {
    size_t peers = 0, awake = 0, resting = 0, sockets = 0;
  };
  Counts counts();  // the present ones, for people

  // Reads and writes sockets without waiting. Returns true when something arrived. Any thread may
  // call it.
  bool progress();
  int descriptor() const { return epoll_.get(); }  // readable: progress() has something to do
  // Has the network thread stand back between these two, because the calling thread calls
  // progress() often.
  void begin_driving() { driving_.fetch_add(1, std::memory_order_seq_cst); }
  // Ends it. `rest`: this thread sleeps now, and the network thread is to wake it.
  void end_driving(bool rest) {
    const bool last = driving_.fetch_sub(1, std::memory_order_seq_cst) == 1;
    if (last && (rest || blocked_.load(std::memory_order_seq_cst) > 0) &&
        standing_back_.load(std::memory_order_seq_cst)) {
      rouse();
    }
  }
  void before_fork() { mutex_.lock(); }
  void after_fork() { mutex_.unlock(); }
  // Closes the sockets in a forked child. Nothing else of this may be used there.
  void forked();

 private:
  class Peer;
  class Peers;
  struct Connection;
  using Lock = std::unique_lock<std::mutex>;
  struct Entry {  // a connection with its peer
    std::shared_ptr<Connection> link;
    std::shared_ptr<Peer> peer;  // whose lock guards it; null: strangers_ does
    bool established = false;
    bool is_current() const;  // under that lock: it still is what guards it
  };
  struct Held {
    std::shared_ptr<Peer> peer;
    Lock lock;  // the peer's
  };

  void listen();
  void listen(bool on);
  void start();
  void run();
  // `patient`: waits for the locks of peers that another thread serves. Else they are left to it.
  bool handle_events(bool patient);
  bool take_events(const Entry& entry, uint32_t events, bool patient);
  bool service(Connection& link, uint32_t events, Held& caller);
  Entry entry_of(uint64_t number);
  Lock lock_of(const Entry& entry);
  void accept_from(const Fd& listener);
  bool advance_handshake(Connection& link, Held& caller);
  void greet(Connection& link);
  void meet_caller(Connection& link, Held& caller);
  void check_turn(const Peer& peer, int flow) const;
  void established(Connection& link);
  bool read_from(Connection& link);
  void wait_for_more(Connection& link);
  void write_to(Connection& link);
  void watch(Connection& link, bool writable);
  void add(const std::shared_ptr<Connection>& link, const std::shared_ptr<Peer>& peer);
  void drop(Connection& link, bool refused = false);
  static const Peer* claimed(const Connection& link);
  void drop_late(const Entry& entry);
  void drop_strangers(Clock::time_point now);
  void drop_claims(const Peer* peer, std::span<const Entry> entries);
  std::vector<Entry> handshakes();
  void tick(Clock::time_point now);
  int interval_ms(bool driven);
  void rouse();
  void survive(const std::exception& error);
  void lacks(int code);
  std::string lacking() const;

  const NetworkOptions options_;
  const TlsSettings tls_;
  Contact contact_;
  Fd epoll_, wake_;  // sockets; an eventfd, of which the network thread alone hears
  std::vector<Fd> listeners_;

  std::mutex strangers_;  // guards connections that have not said who they are
  std::mutex ticking_;    // held by the one thread that does

  const std::unique_ptr<Peers> peers_;

  std::mutex mutex_;  // guards what follows
  std::unordered_map<uint64_t, Entry> links_;
  std::pair<Clock::time_point, Clock::time_point> stood_still_;  // from, to: this process itself

  std::atomic<uint64_t> next_link_{64};  // below: listeners
  std::atomic<Clock::time_point> ticked_, accept_again_{Clock::time_point()};
  std::atomic<bool> stop_{false}, deaf_{false};
  std::atomic<bool> alarm_{false};          // partner: run()
  std::atomic<bool> standing_back_{false};  // the network thread, until rouse(); partner: driving_
  std::atomic<bool> restless_{false};       // ticks are to be frequent
  std::atomic<int> lacking_{0};        // errno of the last socket not to be had; partner: lacking()
  std::atomic<bool> survived_{false};  // an error, and people were told
  std::atomic<size_t> most_connections_;  // partner: park()
  std::atomic<int> crowd_{0};             // peers that are awake; partner: Peer::send_news()
  std::atomic<int> driving_{0};           // partner: standing_back_
  std::atomic<int> blocked_{0};           // connections that could not take all there was
  std::thread thread_;
};

}  // namespace ringcomm
