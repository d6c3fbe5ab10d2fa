#include "group/process.h"

#include <unistd.h>

namespace ringcomm {

template class PerProcess<Process>;

void Process::raise(std::atomic<int>& most, int number) {
  int now = most.load(std::memory_order_relaxed);
  while (now < number && !most.compare_exchange_weak(now, number)) {
  }
}

// ringcomm/_flight/recorder.py reads it: FAILED.
void Process::tell_failure() const {
  if (const int pipe = failures_; pipe >= 0) (void)!::write(pipe, "\1", 1);  // full: it knows
}

}  // namespace ringcomm
