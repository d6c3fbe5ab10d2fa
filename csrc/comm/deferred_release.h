// Keeps finished operations and their tensors. Dropping the last reference to a tensor may need
// Python's lock, and a driving thread must not wait for that. So the next thread that calls or
// waits drops them, or a worker that has nothing to drive.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "base/mutex.h"

namespace ringcomm {

class DeferredRelease {
 public:
  using Over = std::function<bool()>;

  // Kept until it is `over`, if that is given. True when it was empty.
  bool put(std::shared_ptr<void> thing, Over over = nullptr);
  void clear();  // drops the things that are over
  bool filled() const { return filled_.load(std::memory_order_relaxed); }

 private:
  struct Kept {
    std::shared_ptr<void> thing;
    Over over;
  };
  std::atomic<bool> filled_{false};  // partner: clear(); a stale false only delays
  Mutex mutex_;
  std::vector<Kept> kept_ RINGCOMM_GUARDED_BY(mutex_);
};

}  // namespace ringcomm
