// How a thread waits for other processes, and how they wake it.
//
// Each process owns one doorbell: a page of shared memory that its peers map. Whoever makes
// something visible to a process (a counter, a mailbox record) stores it with seq_cst and then
// calls notify(). Whoever waits polls, spins a bounded time, then announces itself in `sleepers`,
// polls once more with seq_cst loads, and sleeps. Of the two, one always sees the other (Dekker).
// std::atomic::wait will not do: libstdc++ uses the process-private futex.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "base/deadline.h"
#include "base/fd.h"

namespace ringcomm {

struct DoorbellPage {
  alignas(64) std::atomic<uint32_t> rings;     // partner: Doorbell::sleep compares it
  alignas(64) std::atomic<uint32_t> sleepers;  // partner: Doorbell::notify reads it
};

// A view of a page; copyable. Any thread may call anything.
class Doorbell {
 public:
  Doorbell() = default;
  explicit Doorbell(DoorbellPage* page) : page_(page) {}

  // Wakes the owner's threads if one sleeps. The caller's news is stored with seq_cst before.
  void notify() const {
    if (page_->sleepers.load(std::memory_order_seq_cst) != 0) ring();
  }
  void ring() const;

  // Sleeps until the bell rings or `most` has passed, unless `ready()` holds. ready() must read
  // with seq_cst loads.
  template <typename Ready>
  void sleep(Ready&& ready, Clock::duration most) const {
    page_->sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = page_->rings.load(std::memory_order_seq_cst);
    if (!ready()) block(seen, most);
    page_->sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }

 private:
  void block(uint32_t seen, Clock::duration most) const;
  DoorbellPage* page_ = nullptr;
};

// How long to spin before sleeping.
struct SpinPolicy {
  std::chrono::nanoseconds spin{0};
  int yields = 0;        // then so many sched_yield
  int free_polls = 128;  // before all that, without looking at the clock
};

// Bounded spinning. Long spins win where every rank has a core of its own and lose a factor of ten
// where it has not: so the time lost to others is measured, and while it is dear on average this
// thread goes straight to sleep.
class Patience {
 public:
  Patience() = default;
  explicit Patience(const SpinPolicy& policy) : policy_(policy) {}

  // After a failed poll: true = poll again now, false = sleep.
  bool again() {
    if (++polls_ <= policy_.free_polls) {
      pause_cpu();
      return true;
    }
    return spin_or_yield();
  }
  // A poll succeeded: the next wait begins anew.
  void reset() {
    polls_ = 0;
    if (yielded_ > 0) note_success();
  }

 private:
  static void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
  bool spin_or_yield();
  void note_success();
  void lost(Clock::duration time);

  SpinPolicy policy_;
  int polls_ = 0, yielded_ = 0;
  Clock::time_point started_, last_;
  Clock::duration mean_loss_{0};
  Clock::time_point loaded_until_ = Clock::time_point::min();
  Clock::time_point crowded_until_ = Clock::time_point::min();
};

// CPUs that this process may run on.
int usable_cpus();

}  // namespace ringcomm
