// What has ended, and what it held. Tensors may belong to Python objects: who drops the last
// reference to one needs Python's lock, for which nobody who drives may wait. So they are left here
// for the next thread that calls or waits, or for a worker that has nothing to drive.
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
  void clear();  // of what is over
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
