// Memory as weak as that of GPUs may be: a store reaches others when its block releases a flag, or
// at any time before that, in any order; and a load may give what was there at any time since its
// block last acquired a flag. For meetings_test.
#pragma once

#include <map>
#include <mutex>
#include <unordered_map>

#include "meetings_group.h"

namespace ringcomm::testing {

// The contents of a group's memory over time, store by store.
class History {
 public:
  uint64_t now() const {
    const std::lock_guard lock(mutex_);
    return now_;
  }
  void store(std::byte* at, std::byte value) {
    const std::lock_guard lock(mutex_);
    before_[at].push_back({++now_, *at});
    *at = value;
  }
  // Returns what was there at that time.
  std::byte load(const std::byte* at, uint64_t time) const {
    const std::lock_guard lock(mutex_);
    const auto entry = before_.find(at);
    if (entry == before_.end()) return *at;
    const auto& changes = entry->second;
    const auto later = std::ranges::upper_bound(changes, time, {}, &Change::time);
    return later == changes.end() ? *at : later->before;
  }

 private:
  struct Change {
    uint64_t time;
    std::byte before;
  };
  mutable std::mutex mutex_;
  uint64_t now_ = 0;
  std::unordered_map<const std::byte*, std::vector<Change>> before_;
};

// A flag's fence that is left out.
struct Unfenced {
  bool releases = false, acquires = false;
  std::function<bool(const uint32_t* flag, uint32_t value)> at;
};

// That memory, as one block of a kernel sees it.
class Weak : public Jittery {
 public:
  Weak(uint64_t seed, History& history, const Unfenced& unfenced)
      : Jittery(seed, std::chrono::seconds(unfenced.releases ? 3 : 60)),
        history_(history),
        unfenced_(unfenced),
        random_(seed),
        since_(history.now()) {}
  ~Weak() override { let_go(1); }  // the end of a kernel releases all

  void load(const std::byte* at, void* value, size_t bytes) override {
    const uint64_t time = since_ + random_.below(history_.now() - since_ + 1);
    auto* const out = static_cast<std::byte*>(value);
    for (size_t i = 0; i < bytes; ++i) {
      const auto own = stored_.find(const_cast<std::byte*>(at) + i);
      out[i] = own == stored_.end() ? history_.load(at + i, time) : own->second;
    }
  }
  void store(std::byte* at, const void* value, size_t bytes) override {
    const auto* const in = static_cast<const std::byte*>(value);
    for (size_t i = 0; i < bytes; ++i) stored_[at + i] = in[i];
  }
  void store_release(uint32_t* flag, uint32_t value) override {
    if (!(unfenced_.releases && unfenced_.at(flag, value))) let_go(1);
    Jittery::store_release(flag, value);
  }
  uint32_t load_acquire(const uint32_t* flag) override {
    const uint32_t value = Jittery::load_acquire(flag);
    if (!(unfenced_.acquires && unfenced_.at(flag, value))) since_ = history_.now();
    return value;
  }
  void store_line(uint64_t* line, uint64_t value) override {
    lines_[line] = value;
    if (random_.below(4) == 0) let_lines_go(2);
  }
  void pause() override {
    let_lines_go(2);
    let_go(8);
    Jittery::pause();
  }

 private:
  // About one of so many, or all.
  void let_go(uint64_t one_of) {
    std::erase_if(stored_, [&](const auto& entry) {
      if (random_.below(one_of) != 0) return false;
      history_.store(entry.first, entry.second);
      return true;
    });
    if (one_of == 1) let_lines_go(1);
  }
  void let_lines_go(uint64_t one_of) {
    std::erase_if(lines_, [&](const auto& entry) {
      if (random_.below(one_of) != 0) return false;
      Jittery::store_line(entry.first, entry.second);
      return true;
    });
  }

  History& history_;
  const Unfenced& unfenced_;
  Random random_;
  uint64_t since_;
  std::map<std::byte*, std::byte> stored_;
  std::map<uint64_t*, uint64_t> lines_;
};

}  // namespace ringcomm::testing
