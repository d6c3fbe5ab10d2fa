// A peer on another host, made to look like one that shares memory. For each way there is a segment
// with one writer, on both sides. This rank writes its inbox, lines and mailbox into the *shadow*
// of what it sends, and a frame carries them to the same place of what the peer has *received*. The
// peer's words about itself go into the shadow's header. So readers of a peer's header or arrived()
// need not know which kind it is.
//
// The shadow is also the buffer for sending again after a lost connection. The rules of plans (one
// writer a byte, credits, alternating halves) let no rank write a slot again before the peer has
// read it.
//
// Both are made when they are first used. So a rank pays for the peers that its plans talk to.
#pragma once

#include <mutex>

#include "net/session.h"
#include "net/wire.h"
#include "transport/segment.h"

namespace ringcomm {

// Memory of this process that is made when somebody first needs it. Any thread. A thread that reads
// from the network cannot fail the group: a lack of memory is noted, and check() tells who can.
class LateSegment {
 public:
  LateSegment(const SegmentLayout& layout, Rank peer) : layout_(layout), peer_(peer) {}
  const Segment& get();          // throws SystemError: there is no memory
  const Segment* try_get();      // null: there is no memory
  const Segment* find() const {  // null: it is not made yet
    return made_.load(std::memory_order_acquire) ? &segment_ : nullptr;
  }
  void check() const;  // throws SystemError: there was no memory

 private:
  const SegmentLayout layout_;
  const Rank peer_;  // for people
  std::once_flag once_;
  Mapping mapping_;
  Segment segment_;
  std::atomic<bool> made_{false};  // partner: find()
  std::atomic<int> lack_{0};       // errno; partner: check()
};

class RemoteRanks;

// A rank's words about itself, as in its header; or what another one says of it.
struct RankState {
  uint64_t called = 0, finished = 0;
  uint64_t left = 0, failed = 0, asked = 0;
  Blame blame;
  Descriptor current;
  char failure[kFailureBytes] = {};
};

class RemotePeer final : public Receiver {
 public:
  struct Ends {
    Rank peer;
    Header* own;                          // of this rank
    SegmentLayout layout;                 // of each way: one writer
    RemoteRanks* remote_ranks = nullptr;  // hears what a peer says of other ranks
    bool opened = false;                  // its channel is
  };
  // Opens the channel if need be, and closes it at the end.
  RemotePeer(Wire& wire, uint64_t channel, const Ends& ends);
  ~RemotePeer() override {
    if (!forgotten_) wire_.close(channel_);
  }
  void forget() { forgotten_ = true; }  // in a forked child: the network is its parent's
  Wire& wire() const { return wire_; }
  Rank rank() const { return ends_.peer; }
  bool first_use() { return !std::exchange(used_, true); }  // the driving thread's

  // ---- the driving thread's. `target` lies in the shadow; `source`, if given, is lent until
  // reclaim_lent(), else the bytes are in the shadow already.
  void put(std::byte* target, uint64_t bytes, const std::byte* source);
  LateSegment& shadow() { return shadow_; }
  LateSegment& received() { return received_; }
  void check_memory() const {
    shadow_.check();
    received_.check();
  }
  void signal(int lane, int half, uint64_t stamp);
  void reclaim_lent() { wire_.reclaim_lent(channel_); }

  uint64_t sent() const { return sent_; }  // bytes

  // ---- any thread's
  void stream_written(uint64_t begin, uint64_t end);  // cursors of the peer's mailbox
  void stream_read(uint64_t cursor);                  // of my mailbox
  void send_state();                                  // as my header has it
  void send_state_now() {
    send_state();
    wire_.flush();
  }
  void send_failure_of(Rank other, const RankState& state);  // that it has failed
  bool left() const {
    const Segment* shadow = shadow_.find();
    return shadow != nullptr && shadow->header().left.load(std::memory_order_acquire) != 0;
  }

  // ---- the session's
  std::byte* place(const Frame& frame) override;
  void deliver(const Frame& frame, std::span<const std::byte> payload) override;
  std::vector<std::byte> news() override;

 private:
  struct Pending {
    std::byte* target = nullptr;
    uint64_t bytes = 0;
    const std::byte* source = nullptr;
  };
  void flush_put(int lane, int half, uint64_t stamp);
  void heard(const RankState& state, Header& header);
  void heard_of(uint64_t other, const RankState& state);
  std::vector<std::byte> state();
  static bool allowed(const Segment& received, const Frame& frame);

  Wire& wire_;
  const uint64_t channel_;
  const Ends ends_;
  LateSegment shadow_, received_;
  bool forgotten_ = false, used_ = false;
  Pending pending_;
  uint64_t sent_ = 0;
  std::atomic<uint64_t> told_called_{0}, told_finished_{0};  // the peer knows of these operations
  std::atomic<uint64_t> told_blame_{0};                      // and of whom this rank waits for
  std::atomic<uint64_t> credited_{0};  // so far the peer knows that I have read its stream
  uint64_t arrived_[kLineLanes] = {};  // signals delivered
};

}  // namespace ringcomm
