// The collective that a group is in on memory of the host: one at a time, by the thread at the
// wheel.
#pragma once

#include <optional>
#include <vector>

#include "comm/group_state.h"
#include "comm/operation.h"
#include "exec/host_executor.h"
#include "plan/cache.h"

namespace ringcomm {

class HostOperation {
 public:
  HostOperation(GroupState& state, const Geometry& geometry, const Costs& costs);

  // Everything that can be refused is refused before the peers learn of it.
  void begin(const Operation& operation);
  // True when it is done. Throws MismatchError.
  bool advance();
  // The operation in progress, if there is one, is over.
  void end(bool good);
  bool ready() { return executor_.ready(); }      // would advance() move?
  Rank peer() const { return executor_.peer(); }  // the one that is waited for
  std::string text() const { return numbered(current_); }
  // Throws when it cannot end well: because of a peer, a failure, or a deadline, if one is given.
  void check(const Deadline* deadline);

 private:
  std::string choice_text(const Shape& shape, const Plan& plan) const;
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
