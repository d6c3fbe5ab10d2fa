// Joins the ranks of one group. Ranks of one host share memory: windows are memfds, signals
// are counters, sleeping is a futex on the receiver's doorbell, and the Unix socket to each peer's
// process tells when it is gone (transport/neighbours.h). Peers on other hosts are reached through
// their shadows (transport/remote.h).
//
// Contract: signal() is a release of everything this rank did before it, as seen by `peer` once
// arrived() there returns the new count. Counters are 64-bit, per (ordered pair, lane), and only
// grow. `half` is the number of the plan mod 2: each half has its own memory and lines. All ranks
// count the plans that they begin alike, one for an operation, or for each piece of a long one.
// One thread drives a transport at a time, except where a function says otherwise.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "base/doorbell.h"
#include "transport/neighbours.h"
#include "transport/remote_ranks.h"

namespace ringcomm {

// One rank as seen from another: its segment, its doorbell, its process (null in tests that have
// but one).
struct ShmPeer {
  Rank rank = 0;
  Segment segment;
  int place = -1;  // among the writers of its host's segments; -1: its rank
  Doorbell doorbell;
  std::span<std::byte> arena;
  std::shared_ptr<Neighbour> process;
  uint64_t group_id = 0;           // in what passes between the processes
  uint64_t sent[kLineLanes] = {};  // signals, on each lane
};

// Traffic to other hosts, since the group was made.
struct Traffic {
  uint64_t sent = 0;    // bytes
  uint64_t resent = 0;  // frames, of other groups as well
  uint64_t broken = 0;  // connections, of other groups as well
};

// A peer's words about itself; all of them only grow.
struct PeerState {
  uint64_t called = 0;    // sequence of the operation it is in or was in last
  uint64_t finished = 0;  // sequence of the last one it finished
  bool left = false;      // said goodbye
  bool failed = false;    // its group failed there: see failure()
  bool hearsay = false;   // so others say, and messages that it sent before may still come
};

// Some functions are virtual so that tests can break them and check that the break is noticed.
class Transport {
 public:
  // `here`: the ranks of this host, this one among them. All others are `remote_ranks`, which may
  // be null. The mappings outlive the transport.
  Transport(Rank rank, std::vector<ShmPeer> here,
            std::unique_ptr<RemoteRanks> remote_ranks = nullptr);
  virtual ~Transport() = default;

  int size() const { return static_cast<int>(peers_.size()); }  // of the group
  Rank rank() const { return rank_; }
  uint64_t group_id() const {
    return peer(rank_).group_id;
  }  // the same on all ranks, and no other's

  // Returns the half that `owner`, a rank of this host, writes for all of them.
  std::byte* window(Rank owner, int half) const { return peer(owner).segment.half(half); }
  // Returns the memory that `from` writes for `owner`; one of them is this rank. For a remote owner
  // it is a copy here: the owner sees only the bytes that put() names. Throws SystemError when
  // there is no memory.
  std::byte* inbox(Rank owner, Rank from, int half) {
    const auto [segment, place] = part(owner, from);
    return segment.inbox(place, half);
  }
  // Returns the bytes that ride with `from`'s data signals to `owner`; the same otherwise.
  std::byte* line(Rank owner, Rank from, int half) {
    const auto [segment, place] = part(owner, from);
    return segment.line(place, 0, half).payload;
  }
  // Throws SystemError if there was no memory for what a remote rank has sent.
  void check_memory() const {
    each_remote([](const RemotePeer& remote) { remote.check_memory(); });
  }
  // Tells whether loads and stores do not reach that rank.
  bool is_remote(Rank rank) const { return here(rank) == nullptr; }
  // Sends `bytes` at `target` with the next signal to the remote rank `to`. If `source` is given,
  // the bytes are read from there, and that memory is lent until reclaim_lent().
  void put(Rank to, std::byte* target, uint64_t bytes, const std::byte* source) {
    use(remote_ranks_->get(to)).put(target, bytes, source);
  }
  void reclaim_lent() {
    for (RemotePeer* remote : used_) remote->reclaim_lent();
  }

  // Signals a rank. The stamp says which operation the signal belongs to.
  virtual void signal(Rank to, int lane, int half, uint64_t stamp) {
    ShmPeer* const peer = here(to);
    if (peer == nullptr) return use(remote_ranks_->get(to)).signal(lane, half, stamp);
    Line& line = peer->segment.line(place(rank_), lane, half);
    line.stamp.store(stamp, std::memory_order_relaxed);  // ordered by the store of count
    // Partner: arrived(), and Doorbell::sleep.
    line.count.store(++sent(to, lane), std::memory_order_seq_cst);
    peer->doorbell.notify(kSignalNews);
  }
  virtual uint64_t arrived(Rank from, int lane, int half) {
    const Line* line = arrived_line(from, lane, half);
    return line == nullptr ? 0 : line->count.load(std::memory_order_seq_cst);
  }
  virtual uint64_t stamp(Rank from, int lane, int half) {  // of the last signal that arrived
    const Line* line = arrived_line(from, lane, half);
    return line == nullptr ? 0 : line->stamp.load(std::memory_order_relaxed);
  }

  // Reads from remote ranks and writes to them. Returns true when something came. A thread that
  // calls it often has a NetworkDuty.
  bool progress() { return network() != nullptr && network()->progress(); }
  // Lets the network thread read from now on, unless another thread drives.
  void hand_over() {
    if (network() == nullptr) return;
    network()->begin_driving();
    network()->end_driving(true);
  }
  Network* network() const { return remote_ranks_ ? remote_ranks_->network() : nullptr; }
  void need(Rank rank) {  // somebody waits for it
    if (rank >= 0 && is_remote(rank)) remote_ranks_->get(rank).wire().need();
  }
  Traffic traffic() const;
  uint64_t undelivered();  // frames that remote ranks may not have yet

  // Write and read a bounded byte stream to and from each peer, for send/recv; safe beside a
  // running operation, one thread at a time. They return how many bytes they took; 0: full, or
  // empty.
  size_t stream_write(Rank to, const std::byte* data, size_t bytes);
  // A read may go past the caches into `data`.
  size_t stream_read(Rank from, std::byte* data, size_t bytes, bool past_caches = false);
  size_t stream_space(Rank to);
  size_t stream_available(Rank from);

  // ---- the slow path: a waiting rank looks at its peers, and speaks of itself. Any thread may
  // call these.
  void announce(Board board, const Descriptor& descriptor);  // begins this operation
  // Tells whether that rank, one of this host, was last seen on the core of this thread.
  bool shares_core(Rank rank);
  // Notes that this operation is done.
  void finish(Board board, uint64_t sequence) {
    own_.header().of(board).finished.store(sequence,
                                           std::memory_order_release);  // partner: state()
  }
  PeerState state(Rank rank, Board board);
  bool has_spoken(Rank rank) const {
    return header_of(rank) != nullptr;
  }  // of other hosts, not all
  std::optional<Descriptor> descriptor(Rank rank, Board board, uint64_t sequence) {
    const Header* header = header_of(rank);
    return header == nullptr ? std::nullopt : read_board(*header, board, sequence);
  }
  std::string failure(Rank rank);
  // Tells the peers that this rank has failed, and wakes them; each tells others. Those of this
  // host can know it from mark_failed() on, which comes first and only writes memory.
  void mark_failed(const std::string& reason);
  void tell_failure();
  // A peer that called mark_failed(). With `have_read`, nobody had when this rank's reads of their
  // memory were over, or one is named.
  std::optional<Rank> first_failed(bool have_read = false);
  // Passes on to more ranks what others have told this one, for not all talk with one another.
  void pass_on();
  // Tells who keeps the operation up that `rank` is in, as far as that rank knows; blame() sets it
  // for this one.
  Blame blame_of(Rank rank) const;
  void blame(const Blame& blame);
  void ask_for_records();            // every rank is to write its flight records
  uint64_t times_asked();            // by any rank; tells others what is new
  bool connection_lost(Rank rank);   // it is gone, with or without goodbye
  std::string condition(Rank rank);  // "alive", "stopped by a signal"
  std::string loss(Rank rank);       // of a connection that is lost: why
  void leave();                      // goodbye
  // Closes, in a forked child, the sockets that would keep this rank looking alive. Touches no
  // shared memory.
  void forget();

  // Returns the choices of a rank of this host for all ranks: kChoices words that are 0 at first.
  std::atomic<uint8_t>* choices(Rank owner) const { return peer(owner).segment.header().choices; }

  // Returns the part of `owner`'s memory that is for devices (device/area.h), whole pages. Null for
  // ranks of other hosts.
  std::byte* device_area(Rank owner) {
    return is_remote(owner) ? nullptr : peer(owner).segment.device_area();
  }
  // Returns the memory for tensors of that rank's process, as mapped here. Empty: there is none.
  std::span<std::byte> arena(Rank owner) const {
    return is_remote(owner) ? std::span<std::byte>() : peer(owner).arena;
  }
  // Pass a descriptor of a device to a rank of this host, by a number that names it. send() returns
  // false if there is no room now, and take() an empty one if it has not come.
  bool send(Rank to, uint32_t number, const Fd& descriptor);
  Fd take(Rank from, uint32_t number);

  // Return the process of a rank of this host, and the wire to one of another; else null.
  std::shared_ptr<Neighbour> process(Rank rank) const {
    return is_remote(rank) ? nullptr : peer(rank).process;
  }
  Wire* wire(Rank rank) const {
    return is_remote(rank) ? &remote_ranks_->get(rank).wire() : nullptr;
  }

  const char* name() const;  // for people: "shared memory"
  const Doorbell& doorbell() const { return peer(rank_).doorbell; }

 protected:
  ShmPeer* here(Rank rank) const { return peers_[static_cast<size_t>(rank)]; }
  ShmPeer& peer(Rank rank) const { return *here(rank); }  // of this host
  int place(Rank rank) const { return peer(rank).place; }
  RemotePeer* remote(Rank rank) const {  // null: of this host, or neither has spoken
    return remote_ranks_ ? remote_ranks_->find(rank) : nullptr;
  }
  RemotePeer& use(RemotePeer& remote) {
    if (remote.first_use()) used_.push_back(&remote);
    return remote;
  }
  uint64_t& sent(Rank to, int lane) { return peer(to).sent[lane]; }  // to one of this host

 private:
  void tell_remotes(const std::function<void(RemotePeer&)>& tell);

  struct Part {
    const Segment& segment;
    int place;  // of the writer
  };
  Part part(Rank owner, Rank from) {
    const Rank other = owner == rank_ ? from : owner;
    if (is_remote(other)) {
      RemotePeer& remote = remote_ranks_->get(other);
      return {(owner == rank_ ? remote.received() : remote.shadow()).get(), 0};
    }
    return {peer(owner).segment, place(from)};
  }
  const Line* arrived_line(Rank from, int lane, int half) const {
    if (!is_remote(from)) return &own_.line(place(from), lane, half);
    RemotePeer* const peer = remote(from);
    const Segment* received = peer != nullptr ? peer->received().find() : nullptr;
    return received == nullptr ? nullptr : &received->line(0, lane, half);
  }
  // Returns null for a remote rank that has not spoken.
  Header* header_of(Rank rank) const {
    if (!is_remote(rank)) return &peer(rank).segment.header();
    RemotePeer* const peer = remote(rank);
    const Segment* shadow = peer != nullptr ? peer->shadow().find() : nullptr;
    return shadow == nullptr ? nullptr : &shadow->header();
  }
  void each_remote(auto&& act) const {
    if (remote_ranks_) remote_ranks_->for_each(act);
  }

  const Rank rank_;
  std::vector<ShmPeer> here_;    // the ranks of this host
  std::vector<ShmPeer*> peers_;  // by rank; null: of another host
  Segment own_;
  std::atomic<bool> passed_on_{false};  // the first failure; by the thread that finds it first
  std::unique_ptr<RemoteRanks> remote_ranks_;  // null: there are none
  std::vector<RemotePeer*> used_;              // by operations of the driving thread
};

// Makes this the thread that drives the network for the group, in a scope.
class NetworkDuty {
 public:
  explicit NetworkDuty(Transport& transport) : transport_(transport) { begin(); }
  ~NetworkDuty() { end(false); }
  NetworkDuty(const NetworkDuty&) = delete;

  // Sleeps on this process's doorbell. If a remote rank is awaited, it sleeps on the network as
  // well; else others drive meanwhile. Returns true when something came from the network.
  bool sleep(Rank awaited, uint32_t news, auto&& ready, Clock::duration most) {
    const Network* const network = transport_.network();
    if (awaited >= 0 && transport_.is_remote(awaited) && network != nullptr &&
        transport_.doorbell().sleep_with(network->descriptor(), news, ready, most)) {
      return transport_.progress();
    }
    end(true);
    transport_.doorbell().sleep(news, ready, most);
    begin();
    return false;
  }

 private:
  void begin() {
    if (transport_.network() != nullptr) transport_.network()->begin_driving();
  }
  void end(bool rest) {
    if (transport_.network() != nullptr) transport_.network()->end_driving(rest);
  }

  Transport& transport_;
};

}  // namespace ringcomm
