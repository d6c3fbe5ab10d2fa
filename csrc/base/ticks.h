// A clock for what is measured all the time: a third of the price of Clock::now().
#pragma once

#include <fstream>

#include "base/deadline.h"

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace ringcomm {

inline int64_t nanoseconds(Clock::time_point time) {
  return std::chrono::nanoseconds(time.time_since_epoch()).count();
}

// The processor's counter, if the kernel takes its own time from that: then it is steady, and the
// same on all cores. Else Clock's nanoseconds.
inline int64_t ticks() {
#if defined(__x86_64__)
  static const bool steady = [] {
    std::ifstream file("/sys/devices/system/clocksource/clocksource0/current_clocksource");
    std::string source;
    return file >> source && source == "tsc";
  }();
  if (steady) return static_cast<int64_t>(__rdtsc());
#endif
  return nanoseconds(Clock::now());
}

// Both clocks at one moment: two of these tell how long a tick is.
struct Moment {
  int64_t ticks = ringcomm::ticks();
  int64_t steady = nanoseconds(Clock::now());
};

}  // namespace ringcomm
