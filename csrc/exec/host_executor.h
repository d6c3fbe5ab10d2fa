// Runs a plan over a transport, on the calling thread. advance() returns at an unmet wait, and is
// called again later: so one thread can advance many operations.
#pragma once

#include "exec/stopwatch.h"
#include "exec/thread_pool.h"
#include "exec/tuner.h"
#include "plan/cursor.h"
#include "plan/shape.h"
#include "plan/spans.h"
#include "reduce/reduce.h"
#include "transport/transport.h"

namespace ringcomm {

// The words by which signals name their operation. All pairs of ranks have the same word, except in
// all_to_all: there each pair agrees on its own byte counts, and the vectors are not empty.
struct Stamps {
  uint64_t common = 0;
  std::vector<uint64_t> sent, received;  // to, and expected from, each rank on the data lane

  uint64_t outgoing(Rank peer, int lane) const {
    if (sent.empty()) return common;
    return lane == kData ? sent[static_cast<size_t>(peer)] : received[static_cast<size_t>(peer)];
  }
  uint64_t incoming(Rank peer, int lane) const {
    return outgoing(peer, lane == kData ? kCredit : kData);
  }
};

// The other ranks' inputs and outputs, by rank, where a plan for a readable shape loads from them.
struct Theirs {
  std::vector<std::byte*> inputs, outputs;
};

// Pieces of the caller's memory from this size on are sent from where they lie. They are copied
// only if the operation ends first.
inline constexpr uint64_t kLentBytes = 4096;

// The pool that helps with long steps, and how much of it may.
struct Help {
  ThreadPool* pool = nullptr;
  Threads threads;
};

class HostExecutor {
 public:
  explicit HostExecutor(Transport& transport, const Help& help = {},
                        uint64_t lent_bytes = kLentBytes);

  enum class Status { kDone, kBlocked, kMismatch };

  // Starts a plan. It must live until advance() returns kDone, and so must the memory behind the
  // spans. `number` counts plans, the same on every rank. The input is multiplied by PREMUL_SUM's
  // factor where it is read, because no plan reads its own output there.
  void start(std::shared_ptr<const Plan> plan, uint64_t number, const Reduction& reduction,
             Manner manner = {});
  Spans& input() { return input_; }
  Spans& output() { return output_; }
  Theirs& theirs() { return theirs_; }
  Stamps& stamps() { return stamps_; }

  // Runs until the end, an unmet wait, or a signal of another operation (a mismatch). Long
  // operations return at a wait that is met, too. Throws SystemError when there is no memory for a
  // peer on another host.
  Status advance();
  // Tells whether advance() can move: it has not begun, or the awaited signal has come. Cheap
  // enough to spin on.
  bool ready() {
    return peer_ < 0 || transport_.arrived(peer_, lane_, half_) > taken(peer_, lane_);
  }
  // Returns how long the plan took without the wait for late ranks, after kDone if it was timed.
  double seconds() const { return watch_.seconds(Clock::now()); }
  bool timed() const { return manner_.timed; }
  // Returns the peer concerned, after kBlocked or kMismatch.
  Rank peer() const { return peer_; }

 private:
  bool is_shared(uint64_t bytes) const {
    return bytes >= ThreadPool::kLeastBytes && help_.threads.all > 1;
  }
  void copy_local(std::byte* dst, const std::byte* src, uint64_t bytes, bool streams);
  void reduce_local(const Step& step, uint64_t bytes);
  void copy(const Step& step, uint64_t total);
  void reduce(const Step& step, uint64_t total);
  Span locate(const Ref& ref, uint64_t done) const;
  Span locate(const Ref& ref, const Spans& mine, const std::vector<std::byte*>& theirs,
              uint64_t offset) const {
    if (ref.rank == transport_.rank()) return mine.at(offset);
    return {theirs[static_cast<size_t>(ref.rank)] + offset, UINT64_MAX};
  }
  bool scaled(const Ref& ref) const {
    return reduction_.op == ReduceOp::kPremulSum && ref.space == Space::kInput;
  }
  bool sums_stream(const Step& step) const;
  void reduce_all(const Step& step, std::span<std::byte* const> all, uint64_t bytes) const;
  uint64_t scale_operands(std::span<const Ref> refs, std::byte** at, uint64_t bytes);
  const Ref* refs(const Step& step) const { return plan_->refs.data() + step.first_ref; }
  uint64_t& taken(Rank peer, int lane) { return taken_[static_cast<size_t>(peer * kLanes + lane)]; }
  bool is_remote(const Ref& ref) const { return ref.rank >= 0 && transport_.is_remote(ref.rank); }

  Transport& transport_;
  const Help help_;
  const uint64_t lent_bytes_;
  std::vector<uint64_t> taken_;         // signals consumed, per (peer, lane), over the group's life
  std::vector<std::byte*> windows_[2];  // by rank; null: on another host

  std::shared_ptr<const Plan> plan_;
  Reduction reduction_;
  Spans input_, output_;
  Theirs theirs_;
  Stamps stamps_;
  Manner manner_;
  Stopwatch watch_;
  std::vector<std::byte*> operands_;  // a reduce step's
  std::vector<std::byte> scratch_;    // a piece of each operand that is scaled
  int half_ = 0;
  PlanCursor cursor_;
  Rank peer_ = -1;
  int lane_ = 0;
};

}  // namespace ringcomm
