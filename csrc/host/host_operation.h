// The collective that a group runs on memory of the host. There is one at a time, and the thread at
// the wheel runs it.
#pragma once

#include "exec/host_executor.h"
#include "group/group_state.h"
#include "host/tensor_places.h"
#include "plan/cache.h"
#include "report/operation.h"

namespace ringcomm {

class HostOperation {
 public:
  HostOperation(GroupState& state, const Geometry& geometry);

  // Returns the algorithm that begin() would choose. Any thread may ask. Throws UsageError.
  Algorithm algorithm_of(const Operation& operation) const {
    return algorithm_of(shape_of(operation));
  }
  // Begins the operation, or after end_piece() its next piece. Refuses a wrong operation before the
  // peers learn of it. `ticket`: the flight recorder's, if it has waited for its turn.
  void begin(const Operation& operation, std::optional<uint64_t> ticket = std::nullopt);
  // Moves the operation on. Returns true when it is done. Throws MismatchError.
  bool advance();
  // Call it after advance() was true. From then on nobody reads or writes the memory of this piece,
  // or of the whole.
  void end_piece();
  // Ends the operation in progress, if there is one.
  void end(bool good);
  // Tells whether advance() would move.
  bool ready() {
    if (executor_.ready()) return true;
    if (++polls_ % kPolls == 0) idle();
    return false;
  }
  // Counts the time from now on as a wait, for nothing moves. Short waits are not measured, as
  // reading the clock would take as long.
  void idle() {
    if (idle_since_ == Clock::time_point()) begin_wait();
  }
  Rank peer() const { return executor_.peer(); }  // the one that is waited for
  // Returns how many operations so far have read tensors where they lie. Any thread may ask.
  uint64_t readable_operations() const {
    return readable_operations_.load(std::memory_order_relaxed);
  }
  std::string text() const { return numbered(current_); }
  // Throws if the operation cannot end well because of a peer, a failure, or a given deadline.
  void check(const Deadline* deadline);

 private:
  static constexpr uint32_t kPolls = 512;
  Shape shape_of(const Operation& operation) const;
  Algorithm algorithm_of(const Shape& shape) const;
  // An operation that begins as soon as the ranks have told one another where their tensors lie.
  struct Asked {
    Shape shape;
    Algorithm algorithm;
    Reduction reduction;
    std::vector<Span> input, output;
  };
  void start(const Asked& asked);
  void check_reads();
  // Records that the operation begins, and tells the peers.
  void announce(const Operation& operation, const Descriptor& descriptor,
                std::optional<uint64_t> ticket, const Shape& shape, Algorithm algorithm);
  void begin_wait();
  void end_wait();

  GroupState& state_;
  const Geometry geometry_;
  const uint64_t terms_;  // hash_of_terms(), where each operation adds its segment
  HostExecutor executor_;
  Tuner tuner_;
  PlanCache plans_;
  TensorPlaces places_;
  std::optional<Asked> asked_;
  bool reads_ = false;  // tensors of others, where they lie
  std::atomic<uint64_t> readable_operations_{0};
  uint64_t sequence_ = 0;
  uint64_t plans_begun_ = 0;  // for operations, or for their pieces: the same on every rank
  uint64_t warned_ = 0;       // the operation of which the log says that it waits
  Descriptor current_;
  std::optional<uint64_t> ticket_;  // the flight recorder's, of the current operation
  Traffic before_;                  // at the end of the last operation
  uint32_t polls_ = 0;
  Clock::time_point idle_since_;
  Rank waits_for_ = -1;  // since then
};

}  // namespace ringcomm
