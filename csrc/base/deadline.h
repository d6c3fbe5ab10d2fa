// A point on the monotonic clock after which waiting is over.
#pragma once

#include <algorithm>
#include <chrono>

namespace ringcomm {

using Clock = std::chrono::steady_clock;

class Deadline {
 public:
  explicit Deadline(Clock::duration timeout) : start_(Clock::now()), at_(add(start_, timeout)) {}

  bool passed() const { return Clock::now() >= at_; }
  Clock::time_point start() const { return start_; }
  Clock::duration left() const { return std::max(at_ - Clock::now(), Clock::duration::zero()); }
  double elapsed_seconds() const {
    return std::chrono::duration<double>(Clock::now() - start_).count();
  }

 private:
  // A timeout of years must not wrap around.
  static Clock::time_point add(Clock::time_point start, Clock::duration timeout) {
    const auto most = Clock::time_point::max() - start;
    return start + std::min<Clock::duration>(timeout, most);
  }
  Clock::time_point start_, at_;
};

}  // namespace ringcomm
