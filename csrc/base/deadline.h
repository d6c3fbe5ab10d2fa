// A point on the monotonic clock after which waiting is over.
#pragma once

#include <algorithm>
#include <chrono>
#include <cmath>

namespace ringcomm {

using Clock = std::chrono::steady_clock;

// Rounds to hundredths of a second, for people.
inline double to_seconds(Clock::duration time) {
  return std::round(std::chrono::duration<double>(time).count() * 100) / 100;
}

class Deadline {
 public:
  explicit Deadline(Clock::duration timeout, Clock::time_point start = Clock::now())
      : start_(start), at_(add(start_, timeout)) {}

  bool passed() const { return Clock::now() >= at_; }
  Clock::time_point start() const { return start_; }
  Clock::time_point at() const { return at_; }
  Clock::duration left() const { return std::max(at_ - Clock::now(), Clock::duration::zero()); }
  Clock::duration elapsed() const { return Clock::now() - start_; }
  double elapsed_seconds() const { return std::chrono::duration<double>(elapsed()).count(); }

 private:
  // A timeout of years must not wrap around.
  static Clock::time_point add(Clock::time_point start, Clock::duration timeout) {
    const auto most = Clock::time_point::max() - start;
    return start + std::min<Clock::duration>(timeout, most);
  }
  Clock::time_point start_, at_;
};

}  // namespace ringcomm
