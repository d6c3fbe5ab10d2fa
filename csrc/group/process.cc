#include "group/process.h"

#include <unistd.h>

namespace ringcomm {

void Process::note_ranks_here(int ranks) {
  int most = ranks_here();
  while (most < ranks && !ranks_here_.compare_exchange_weak(most, ranks)) {
  }
}

// ringcomm/_flight/recorder.py reads it: FAILED.
void Process::tell_failure() const {
  if (const int pipe = failures_; pipe >= 0) (void)!::write(pipe, "\1", 1);  // full: it knows
}

}  // namespace ringcomm
