// Keeps finished operations and their tensors. Dropping the last reference to a tensor may need
// Python's lock, and a driving thread must not wait for that. So the next thread that calls or
// waits drops them, or a worker that has nothing to drive.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "base/mutex.h"

namespace ringcomm {

class DeferredRelease {
 public:
  using Over = std::function<bool()>;

  // Keeps the thing until it is `over`, if that is given. Returns true when nothing else was kept.
  bool put(std::shared_ptr<void> thing, Over over = nullptr) {
    const Lock lock(mutex_);
    kept_.push_back({std::move(thing), std::move(over)});
    return !filled_.exchange(true, std::memory_order_relaxed);
  }
  // Drops the things that are over.
  void clear() {
    if (!filled()) return;
    std::vector<Kept> over;  // goes after the lock
    const Lock lock(mutex_);
    const auto rest = std::stable_partition(
        kept_.begin(), kept_.end(), [](const Kept& kept) { return kept.over && !kept.over(); });
    over.assign(std::make_move_iterator(rest), std::make_move_iterator(kept_.end()));
    kept_.erase(rest, kept_.end());
    filled_.store(!kept_.empty(), std::memory_order_relaxed);
  }
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
