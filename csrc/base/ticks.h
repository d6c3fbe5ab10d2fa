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

// Reads the processor's counter if the kernel takes its own time from that, for then it is steady,
// and the same on all cores. Else returns Clock's nanoseconds.
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

// Both clocks at one moment: two of these tell how long a tick is. A thread may lose its core
// between two readings, so the closest of some counts.
struct Moment {
  Moment() {
    for (int64_t turn = 0, least = INT64_MAX; turn < 3; ++turn) {
      const int64_t before = ringcomm::ticks(), between = nanoseconds(Clock::now());
      const int64_t apart = ringcomm::ticks() - before;
      if (apart >= least) continue;
      least = apart;
      ticks = before + apart / 2;
      steady = between;
    }
  }
  int64_t ticks = 0, steady = 0;
};

}  // namespace ringcomm
