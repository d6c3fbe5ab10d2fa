// A thread sleeps on a doorbell until another thread or process rings it.
//
// Each process owns one doorbell: a page of shared memory that its peers map. A thread that makes
// something visible to a process (a counter, a mailbox record) stores it with seq_cst and then
// calls notify(). A thread that waits polls, spins a bounded time, then announces itself in
// `sleepers`, polls once more with seq_cst loads, and sleeps. Of the two, one always sees the other
// (Dekker).
// std::atomic::wait will not do: libstdc++ uses the process-private futex.
//
// A sleeper says what it wants to hear of, so that a thread which waits for a message sleeps on
// while others of its process exchange signals.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>

#include "base/deadline.h"

namespace ringcomm {

// The reasons to wake a sleeper.
enum News : uint32_t {
  kSignalNews = 1,   // signals of collectives, from peers
  kMessageNews = 2,  // byte streams to and from peers
  kLocalNews = 4,    // something of this process's to drive, or done
  kAllNews = 7,
};

struct DoorbellPage {
  alignas(64) std::atomic<uint32_t> rings;  // partner: Doorbell::sleep compares it
  // How many threads sleep, with 16 bits for each of News. Partner: Doorbell::notify reads it.
  alignas(64) std::atomic<uint64_t> sleepers;
  // The news for which the owner's thread in sleep_with() waits. Partner: ring() reads it;
  // `sleepers` orders the two.
  std::atomic<uint32_t> watched;
};

// A view of a page; copyable. Any thread may call anything.
class Doorbell {
 public:
  Doorbell() = default;
  // `event`: an eventfd that the owner's own threads ring as well, for sleep_with().
  explicit Doorbell(DoorbellPage* page, int event = -1) : page_(page), event_(event) {}

  // Wakes the owner's threads that sleep and want such news. The caller has stored the news with
  // seq_cst.
  void notify(uint32_t news) const {
    if ((page_->sleepers.load(std::memory_order_seq_cst) & count_of(news, 0xffff)) != 0) ring(news);
  }
  void ring(uint32_t news) const;

  // Sleeps until the bell rings for such news or `most` has passed, unless `ready()` holds. ready()
  // must read with seq_cst loads.
  void sleep(uint32_t news, auto&& ready, Clock::duration most) const {
    page_->sleepers.fetch_add(count_of(news, 1), std::memory_order_seq_cst);
    const uint32_t seen = page_->rings.load(std::memory_order_seq_cst);
    if (!ready()) block(news, seen, most);
    page_->sleepers.fetch_sub(count_of(news, 1), std::memory_order_seq_cst);
  }
  // Sleeps likewise, but wakes when `fd` is readable, and not for peers' rings: no futex can be
  // polled. Returns false at once if another thread does so.
  bool sleep_with(int fd, uint32_t news, auto&& ready, Clock::duration most) const {
    uint32_t nobody = 0;
    if (!page_->watched.compare_exchange_strong(nobody, news, std::memory_order_acquire)) {
      return false;
    }
    page_->sleepers.fetch_add(count_of(news, 1), std::memory_order_seq_cst);
    if (!ready()) poll(fd, most);
    page_->sleepers.fetch_sub(count_of(news, 1), std::memory_order_seq_cst);
    page_->watched.store(0, std::memory_order_release);
    return true;
  }

 private:
  // Returns `count` in the 16 bits of each of `news`.
  static constexpr uint64_t count_of(uint32_t news, uint64_t count) {
    return ((news & kSignalNews) != 0 ? count : 0) |
           ((news & kMessageNews) != 0 ? count << 16 : 0) |
           ((news & kLocalNews) != 0 ? count << 32 : 0);
  }
  void block(uint32_t news, uint32_t seen, Clock::duration most) const;
  void poll(int fd, Clock::duration most) const;
  DoorbellPage* page_ = nullptr;
  int event_ = -1;
};

// How long to spin before sleeping.
struct SpinPolicy {
  std::chrono::nanoseconds spin{0};
  int yields = 0;                              // then so many sched_yield
  int free_polls = 128;                        // before all that, without looking at the clock
  std::chrono::nanoseconds least_spin = spin;  // where it is in vain, as while a network carries a
                                               // long message, or while another process is busy
};

// Bounded spinning. Long spins win where every rank has a core of its own and lose a factor of ten
// where it has not. So this thread gives its core away at once if the awaited rank waits for it.
// And it keeps an account: a wait that ends without a sleep has saved what a sleep costs, and the
// time that others had this core meanwhile is lost. Once more is lost than saved, it goes straight
// to sleep for a while.
class Patience {
 public:
  // `shares_core` tells whether the awaited rank was last seen on the core of this thread.
  explicit Patience(const SpinPolicy& policy, std::function<bool()> shares_core = {})
      : policy_(policy),
        shares_core_(std::move(shares_core)),
        free_polls_(policy.free_polls),
        spin_(policy.spin) {}

  // Call it after a failed poll. Returns true to poll again now, and false to sleep.
  bool again() {
    if (++polls_ <= free_polls_) {
      pause_cpu();
      return true;
    }
    return spin_or_yield();
  }
  // Call it when a poll has succeeded: the next wait begins anew.
  void reset() {
    if (polls_ > free_polls_) end_spin();
    if (polls_ > 0 && !in_vain_) saved_ = std::min(saved_ + kSleepCost, kMostSaved);
    polls_ = 0;
    in_vain_ = false;
  }

 private:
  // The rough cost of a sleep and its wake-up, and as many of them as the account looks back on.
  static constexpr Clock::duration kSleepCost = std::chrono::microseconds(60);
  static constexpr Clock::duration kMostSaved = 400 * kSleepCost;

  static void pause_cpu() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
  bool spin_or_yield();
  void end_spin();
  void lost(Clock::duration time);

  const SpinPolicy policy_;
  const std::function<bool()> shares_core_;
  int free_polls_;                    // now: few while the awaited rank waits for this very core
  std::chrono::nanoseconds spin_{0};  // now
  bool in_vain_ = false;
  int polls_ = 0, yielded_ = 0;
  Clock::time_point started_, last_;
  Clock::duration saved_ = kMostSaved;
  Clock::time_point loaded_until_ = Clock::time_point::min();
};

// Counts the CPUs that this process may run on.
int usable_cpus();

}  // namespace ringcomm
