#include "comm/deferred_release.h"

#include <algorithm>

namespace ringcomm {

bool DeferredRelease::put(std::shared_ptr<void> thing, Over over) {
  const Lock lock(mutex_);
  kept_.push_back({std::move(thing), std::move(over)});
  return !filled_.exchange(true, std::memory_order_relaxed);
}

void DeferredRelease::clear() {
  if (!filled()) return;
  std::vector<Kept> over;  // goes after the lock
  const Lock lock(mutex_);
  const auto rest = std::stable_partition(
      kept_.begin(), kept_.end(), [](const Kept& kept) { return kept.over && !kept.over(); });
  over.assign(std::make_move_iterator(rest), std::make_move_iterator(kept_.end()));
  kept_.erase(rest, kept_.end());
  filled_.store(!kept_.empty(), std::memory_order_relaxed);
}

}  // namespace ringcomm
