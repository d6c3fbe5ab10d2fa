// Measures the speed of a connection by samples that are taken now and then.
#pragma once

#include <cstdint>

#include "base/deadline.h"

namespace ringcomm {

// Bytes that arrive while a connection always has more to send show how fast it is. At other times
// they only show how much there was.
class Meter {
 public:
  // Takes a sample. `arrived`: bytes since the connection began. `full`: it could not take all
  // there was.
  void sample(Clock::time_point now, uint64_t arrived, bool full) {
    if (full && full_) {
      bytes_ += arrived - arrived_;
      time_ += now - at_;
      age_ = {};
    } else if (at_ != Clock::time_point{}) {
      age_ += now - at_;
    }
    if (time_ > kMemory) {
      bytes_ /= 2;
      time_ /= 2;
    }
    at_ = now;
    arrived_ = arrived;
    full_ = full;
  }
  uint64_t bytes_per_second() const {  // 0: not known yet
    if (time_ < kEnough) return 0;
    const double seconds = std::chrono::duration<double>(time_).count();
    const double age = std::chrono::duration<double>(age_).count();
    const double rate = static_cast<double>(bytes_) / seconds * std::min(1 + kHope * age, 2.0);
    return std::max<uint64_t>(1, static_cast<uint64_t>(rate));
  }

 private:
  static constexpr Clock::duration kEnough = std::chrono::milliseconds(20);
  static constexpr Clock::duration kMemory = std::chrono::milliseconds(400);
  // A connection that looks slow is used less, and so is hardly measured. It may have become
  // faster.
  static constexpr double kHope = 0.25;  // faster by so much a second; twice as fast at most
  uint64_t bytes_ = 0, arrived_ = 0;
  Clock::duration time_{}, age_{};  // measured, and passed since then
  Clock::time_point at_;
  bool full_ = false;
};

}  // namespace ringcomm
