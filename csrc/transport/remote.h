// A peer on another host, made to look like one that shares memory. Each side has a *shadow* of
// the other's segment. This rank writes its part (inboxes, lines, mailbox) into the shadow, and a
// frame carries it to the same place of the real segment. The peer's words about itself go into the
// header of its shadow. So readers of a peer's header or arrived() need not know which kind it is.
//
// The shadow is also the buffer for sending again after a lost connection. The rules of plans (one
// writer a byte, credits, alternating halves) let no rank write a slot again before the peer has
// read it.
#pragma once

#include "net/session.h"
#include "net/wire.h"
#include "transport/segment.h"

namespace ringcomm {

// The part of a segment in which a peer's frames may land.
struct InboxLayout {
  uint64_t offset = 0;  // in each half
  uint64_t bytes = 0;
};

class RemotePeer final : public Receiver {
 public:
  struct Ends {
    Rank self, peer;
    Segment own;        // of this rank
    Segment shadow;     // of the peer: same layout, this process's memory
    InboxLayout inbox;  // the peer's, in own
  };
  // Opens the channel, and closes it at the end.
  RemotePeer(Wire& wire, uint64_t channel, const Ends& ends);
  ~RemotePeer() override {
    if (!forgotten_) wire_.close(channel_);
  }
  void forget() { forgotten_ = true; }  // in a forked child: the network is its parent's
  Wire& wire() const { return wire_; }

  // ---- the driving thread's. `target` lies in the shadow; `source`, if given, is lent until
  // reclaim_lent(), else the bytes are in the shadow already.
  void put(std::byte* target, uint64_t bytes, const std::byte* source);
  void signal(int lane, int half, uint64_t stamp);
  void reclaim_lent() { wire_.reclaim_lent(channel_); }

  uint64_t sent() const { return sent_; }  // bytes

  // ---- any thread's
  void stream_written(uint64_t begin, uint64_t end);  // cursors of the peer's mailbox
  void stream_read(uint64_t cursor);                  // of my mailbox
  void tell();                                        // what my header says
  void tell_now() {
    tell();
    wire_.flush();
  }
  void announce() { announced_.store(false, std::memory_order_relaxed); }
  bool left() const { return ends_.shadow.header().left.load(std::memory_order_acquire) != 0; }

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
  void heard(std::span<const std::byte> payload);
  std::vector<std::byte> state();
  bool allowed(const Frame& frame) const;

  Wire& wire_;
  const uint64_t channel_;
  const Ends ends_;
  bool forgotten_ = false;
  Pending pending_;
  uint64_t sent_ = 0;
  std::atomic<bool> announced_{false};  // the peer knows which operation this rank is in
  std::atomic<uint64_t> told_called_{0}, told_finished_{0};  // the peer knows of these operations
  std::atomic<uint64_t> credited_{0};  // what the peer knows of my reading its stream
  uint64_t arrived_[kLineLanes] = {};  // signals delivered
};

}  // namespace ringcomm
