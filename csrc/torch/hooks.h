// torch's hooks: functions that are told of a group's operations, as its flight recorder is from
// 2.15 on.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <ranges>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "base/mutex.h"

namespace ringcomm {

// Warns that a hook has thrown.
void warn_of_hook(const std::exception& error);

// Functions, by ids that their owners chose. They are called with no lock held, so one may take
// Python's, or remove itself. One that is removed meanwhile may be called once more.
template <typename... Arguments>
class HookTable {
 public:
  using Hook = std::function<void(Arguments...)>;

  bool empty() const { return count_.load(std::memory_order_relaxed) == 0; }
  void add(int64_t id, Hook hook) {
    Kept kept = std::make_shared<const Hook>(std::move(hook));
    const Lock lock(mutex_);
    hooks_[id].swap(kept);  // one that it replaces goes after the lock: it may be Python's
    count_ = hooks_.size();
  }
  void remove(int64_t id) {
    Kept kept;
    const Lock lock(mutex_);
    if (auto node = hooks_.extract(id)) kept = std::move(node.mapped());
    count_ = hooks_.size();
  }
  // Warns of those that throw.
  void call(Arguments... arguments) {
    std::vector<Kept> hooks;
    {
      const Lock lock(mutex_);
      std::ranges::copy(std::views::values(hooks_), std::back_inserter(hooks));
    }
    for (const Kept& hook : hooks) {
      try {
        (*hook)(arguments...);
      } catch (const std::exception& error) {
        warn_of_hook(error);
      }
    }
  }

 private:
  using Kept = std::shared_ptr<const Hook>;

  Mutex mutex_;
  std::map<int64_t, Kept> hooks_ RINGCOMM_GUARDED_BY(mutex_);
  std::atomic<size_t> count_{0};  // partner: empty(), which may see a new hook a call later
};

struct Hooks {
  // With each Work that has ended. Set once, for those that begin from then on.
  std::function<void(std::shared_ptr<c10d::WorkInfo>)> ended;
  // The group has failed. The flight recorder writes its file then, which can take seconds.
  HookTable<> failed;
  // The operation of the Work with this key has ended well, after so many milliseconds, if that is
  // known. It runs on the thread that ended it: it must be short, and call nothing of ours.
  HookTable<uint64_t, std::optional<float>> succeeded;
};

}  // namespace ringcomm
