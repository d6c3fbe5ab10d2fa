// The collective that a group runs on memory of the host. There is one at a time, and the thread at
// the wheel runs it.
#pragma once

#include "comm/group_state.h"
#include "comm/operation.h"
#include "exec/host_executor.h"
#include "plan/cache.h"

namespace ringcomm {

class HostOperation {
 public:
  HostOperation(GroupState& state, const Geometry& geometry, const Costs& costs);

  // Refuses a wrong operation before the peers learn of it.
  void begin(const Operation& operation);
  // True when it is done. Throws MismatchError.
  bool advance();
  // Ends the operation in progress, if there is one.
  void end(bool good);
  bool ready() { return executor_.ready(); }      // would advance() move?
  Rank peer() const { return executor_.peer(); }  // the one that is waited for
  std::string text() const { return numbered(current_); }
  // Throws if the operation cannot end well: because of a peer, a failure, or a given deadline.
  void check(const Deadline* deadline);

 private:
  bool scale_input(const Operation& operation);

  GroupState& state_;
  const Geometry geometry_;
  const Costs costs_;
  const uint64_t terms_;  // hash_of_terms(), where each operation adds its segment
  HostExecutor executor_;
  Tuner tuner_;
  PlanCache plans_;
  uint64_t sequence_ = 0;
  uint64_t warned_ = 0;  // the operation of which the log says that it waits
  Descriptor current_;
  std::optional<uint64_t> ticket_;  // the flight recorder's, of the current operation
  std::vector<std::byte> scratch_;
};

}  // namespace ringcomm
