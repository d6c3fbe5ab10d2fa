// Ranks of one host over shared memory: windows are memfds, signals are counters, sleeping is a
// futex on the receiver's doorbell, and the Unix socket to each peer tells when it is gone. Peers
// on other hosts are reached through their shadows (transport/remote.h).
#pragma once

#include <vector>

#include "transport/remote.h"

namespace ringcomm {

// One rank as seen from another: its segment, its doorbell, the socket to it (empty in one
// process).
struct ShmPeer {
  Segment segment;
  Doorbell doorbell;
  Fd socket;
  std::unique_ptr<RemotePeer> remote;  // on another host; the segment is its shadow
};

// How signal() publishes. Tests weaken it on purpose (tests/cpp/stress.cc) and must fail.
struct ProperSignals {
  static constexpr std::memory_order kStore = std::memory_order_seq_cst;
  static constexpr bool kWake = true;
};

template <typename Signals = ProperSignals>
class BasicShmTransport final : public Transport {
 public:
  // peers[rank] is this rank itself. The mappings outlive the transport.
  BasicShmTransport(Rank rank, std::vector<ShmPeer> peers);

  std::byte* memory(Rank owner, int half) override { return peer(owner).segment.half(half); }
  std::byte* line(Rank owner, Rank from, int half) override {
    return peer(owner).segment.line(from, 0, half).payload;
  }
  bool is_remote(Rank rank) const override { return peer(rank).remote != nullptr; }
  void put(Rank to, std::byte* target, uint64_t bytes, const std::byte* source) override {
    peer(to).remote->put(target, bytes, source);
  }
  void settle() override {
    for (RemotePeer* remote : remotes_) remote->settle();
  }
  bool progress() override { return !remotes_.empty() && remotes_[0]->wire().progress(); }
  void begin_driving() override {
    if (!remotes_.empty()) remotes_[0]->wire().begin_driving();
  }
  void end_driving(bool rest) override {
    if (!remotes_.empty()) remotes_[0]->wire().end_driving(rest);
  }
  int descriptor_to_poll() const override { return remotes_[0]->wire().descriptor(); }
  void need(Rank rank) override {
    if (rank >= 0 && is_remote(rank)) peer(rank).remote->wire().need();
  }
  uint64_t undelivered() override;
  void signal(Rank to, int lane, int half, uint64_t stamp) override {
    if (RemotePeer* remote = peer(to).remote.get()) return remote->signal(lane, half, stamp);
    Line& line = peer(to).segment.line(rank(), lane, half);
    line.stamp.store(stamp, std::memory_order_relaxed);  // ordered by the store of count
    const uint64_t count = ++sent_[static_cast<size_t>(to * kLineLanes + lane)];
    line.count.store(count, Signals::kStore);  // partner: arrived(), and Doorbell::sleep
    if constexpr (Signals::kWake) peer(to).doorbell.notify();
  }
  uint64_t arrived(Rank from, int lane, int half) override {
    return own().line(from, lane, half).count.load(std::memory_order_seq_cst);
  }
  uint64_t stamp(Rank from, int lane, int half) override {
    return own().line(from, lane, half).stamp.load(std::memory_order_relaxed);
  }

  size_t stream_write(Rank to, const std::byte* data, size_t bytes) override;
  size_t stream_read(Rank from, std::byte* data, size_t bytes) override;
  size_t stream_space(Rank to) override;
  size_t stream_available(Rank from) override;

  void announce(Board board, const Descriptor& descriptor) override;
  void finish(Board board, uint64_t sequence) override;
  PeerState state(Rank peer, Board board) override;
  std::optional<Descriptor> descriptor(Rank peer, Board board, uint64_t sequence) override;
  std::string failure(Rank peer) override;
  void fail(const std::string& reason) override;
  std::optional<Rank> first_failed() override;
  bool connection_lost(Rank peer) override;
  std::string condition(Rank peer) override;
  std::string loss(Rank peer) override;
  std::byte* device_area(Rank owner) override {
    return is_remote(owner) ? nullptr : peer(owner).segment.device_area();
  }
  const Fd* socket(Rank rank) const override {
    return is_remote(rank) ? nullptr : &peer(rank).socket;
  }
  const char* name() const override {
    if (remotes_.empty()) return "shared memory";
    return remotes_.size() + 1 < peers_.size() ? "shared memory and TCP" : "TCP";
  }
  void leave() override;
  void forget() override {
    for (ShmPeer& other : peers_) {
      other.socket.reset();
      if (other.remote) other.remote->forget();
    }
    remotes_.clear();
  }

 private:
  const ShmPeer& peer(Rank rank) const { return peers_[static_cast<size_t>(rank)]; }
  const Segment& own() const { return own_; }

  std::vector<ShmPeer> peers_;
  Segment own_;
  std::vector<RemotePeer*> remotes_;
  std::vector<uint64_t> sent_;  // signals sent, per (peer, lane)
};

using ShmTransport = BasicShmTransport<>;

}  // namespace ringcomm

#include "transport/shm.inl.h"
