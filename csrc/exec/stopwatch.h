// Measures an operation without the wait for late peers, because that wait does not depend on how
// bytes are moved.
#pragma once

#include <optional>

#include "base/deadline.h"

namespace ringcomm {

class Stopwatch {
 public:
  using Time = Clock::time_point;

  void start(Time now) {
    start_ = now;
    idle_ = {};
    blocked_.reset();
    meeting_.reset();
  }
  // Notes that a wait, step `step` of the plan, is not met. The first waits are for late ranks.
  void block(size_t step, Time now) {
    if (!blocked_ && (!meeting_ || step == *meeting_)) blocked_ = now;
  }
  // Notes that the wait is met. Waits that follow it at once are for other ranks.
  void meet(size_t step, Time now) {
    if (blocked_) idle_ += now - *blocked_;
    blocked_.reset();
    if (!meeting_ || step == *meeting_) meeting_ = step + 1;
  }
  double seconds(Time now) const {
    return std::chrono::duration<double>(now - start_ - idle_).count();
  }

 private:
  Time start_;
  Clock::duration idle_{};
  std::optional<Time> blocked_;
  std::optional<size_t> meeting_;  // the step that belongs to the first waits, if it is one
};

}  // namespace ringcomm
