// Ranks with windows and flags in one process, and what can go wrong between them: for
// cuda_kernel_test.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <memory>
#include <vector>

#include "base/deadline.h"
#include "cpp/harness.h"
#include "cpp/reduce/reduce_inputs.h"
#include "sim/kernels_host.h"

namespace ringcomm::testing {

using model::Bytes;

// What windows and flags are to all ranks of a group.
class TwoShotGroup {
 public:
  TwoShotGroup(int size, uint64_t window_bytes) : size_(size), aborts_(static_cast<size_t>(size)) {
    for (Rank rank = 0; rank < size; ++rank) {
      windows_.push_back(std::make_unique<Window>(Bytes(window_bytes), 0));
      flags_.push_back(std::make_unique<cuda::TwoShotFlags>());
    }
  }
  int size() const { return size_; }
  cuda::TwoShotFlags& flags(Rank rank) { return *flags_[static_cast<size_t>(rank)]; }

  cuda::TwoShotArgs args(Rank rank) {
    cuda::TwoShotArgs args{};
    args.rank = rank;
    args.n_ranks = size_;
    for (size_t peer = 0; peer < windows_.size(); ++peer) {
      args.window[peer] = windows_[peer]->data();
      args.flags[peer] = flags_[peer].get();
    }
    args.abort = &aborts_[static_cast<size_t>(rank)];
    return args;
  }
  // Kernels that wait end.
  void abort() {
    for (uint32_t& word : aborts_) std::atomic_ref(word).store(1, std::memory_order_release);
  }

 private:
  using Window = model::Placed;
  const int size_;
  std::vector<std::unique_ptr<Window>> windows_;
  std::vector<std::unique_ptr<cuda::TwoShotFlags>> flags_;
  std::vector<uint32_t> aborts_;
};

// Yields now and then where it matters; ends a wait that lasts too long.
class Jittery : public sim::Memory {
 public:
  explicit Jittery(uint64_t seed, std::chrono::seconds patience = std::chrono::seconds(60))
      : seed_(seed), patience_(patience) {}
  void store_release(uint32_t* flag, uint32_t value) override {
    jitter();
    sim::Memory::store_release(flag, value);
  }
  uint32_t load_acquire(const uint32_t* flag) override {
    jitter();
    return sim::Memory::load_acquire(flag);
  }
  void pause() override {
    require(!patience_.passed(), "somebody is missing at a meeting");
    std::this_thread::yield();
  }

 private:
  void jitter() {
    Random random(seed_++);
    if (random.below(8) != 0) return;
    for (uint64_t yields = random.below(20); yields > 0; --yields) std::this_thread::yield();
  }
  std::atomic<uint64_t> seed_;  // threads of a block share this
  const Deadline patience_;
};

// Flags that order nothing. Right on x86; ThreadSanitizer sees it.
class Relaxed : public Jittery {
 public:
  using Jittery::Jittery;
  void store_release(uint32_t* flag, uint32_t value) override {
    std::atomic_ref(*flag).store(value, std::memory_order_relaxed);
  }
  uint32_t load_acquire(const uint32_t* flag) override {
    return std::atomic_ref(*const_cast<uint32_t*>(flag)).load(std::memory_order_relaxed);
  }
};

// All meetings use the flags of the even ones.
class OneParity : public Jittery {
 public:
  explicit OneParity(uint64_t seed) : Jittery(seed, std::chrono::seconds(3)) {}
  std::vector<cuda::TwoShotFlags*> all;  // of the group
  void store_release(uint32_t* flag, uint32_t value) override {
    Jittery::store_release(even(flag), value);
  }
  uint32_t load_acquire(const uint32_t* flag) override {
    return Jittery::load_acquire(even(const_cast<uint32_t*>(flag)));
  }

 private:
  uint32_t* even(uint32_t* flag) const {
    for (cuda::TwoShotFlags* flags : all) {
      uint32_t* const odd = &flags->flag[1][0][0];
      constexpr size_t kFlags = sizeof(flags->flag[0]) / sizeof(uint32_t);
      if (flag >= odd && flag < odd + kFlags) return flag - kFlags;
    }
    return flag;
  }
};

// Does not wait at odd meetings (the first of an operation), or at even ones.
class Skipping : public Jittery {
 public:
  Skipping(uint64_t seed, uint32_t parity) : Jittery(seed), parity_(parity) {}
  void store_release(uint32_t* flag, uint32_t value) override {
    epoch_ = value;
    Jittery::store_release(flag, value);
  }
  uint32_t load_acquire(const uint32_t* flag) override {
    return epoch_ % 2 == parity_ ? epoch_ : Jittery::load_acquire(flag);
  }

 private:
  const uint32_t parity_;
  uint32_t epoch_ = 0;
};

// The threads of a block do not wait for each other before they tell others that they are done.
class OutOfStep : public Jittery {
 public:
  using Jittery::Jittery;
  bool in_step(int sync) const override { return sync != 2; }
};

struct Died {};

// Of a rank that dies at its `last`-th access of memory, by whichever block.
class Dying : public sim::Memory {
 public:
  Dying(std::atomic<int>& accesses, int last) : accesses_(accesses), last_(last) {}
  void touch() override {
    if (accesses_++ >= last_) throw Died();
  }
  void store_release(uint32_t* flag, uint32_t value) override {
    touch();
    sim::Memory::store_release(flag, value);
  }
  uint32_t load_acquire(const uint32_t* flag) override {
    touch();
    return sim::Memory::load_acquire(flag);
  }

 private:
  std::atomic<int>& accesses_;
  const int last_;
};

// Of a block that must touch nothing after it saw that it is aborted; its other threads look at
// their flags until they saw it, too.
class Watching : public sim::Memory {
 public:
  explicit Watching(const uint32_t* abort) : abort_(abort) {}
  bool aborted = false;
  int later = 0;  // accesses after that

  void touch() override { later += aborted; }
  void store_release(uint32_t* flag, uint32_t value) override {
    touch();
    sim::Memory::store_release(flag, value);
  }
  uint32_t load_acquire(const uint32_t* flag) override {
    const uint32_t value = sim::Memory::load_acquire(flag);
    aborted |= flag == abort_ && value != 0;
    return value;
  }

 private:
  const uint32_t* const abort_;
};

}  // namespace ringcomm::testing
