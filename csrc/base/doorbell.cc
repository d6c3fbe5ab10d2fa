#include "base/doorbell.h"

#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

namespace ringcomm {
namespace {

constexpr auto kLoadedFor = std::chrono::milliseconds(100);
constexpr auto kSlice = std::chrono::milliseconds(2);  // what the scheduler gives, about
constexpr int kCrowdedYields = 100, kCrowdedPolls = 4;

timespec timespec_of(Clock::duration time) {
  const auto whole = std::chrono::duration_cast<std::chrono::seconds>(time);
  const auto rest = std::chrono::duration_cast<std::chrono::nanoseconds>(time - whole);
  return {static_cast<time_t>(whole.count()), static_cast<long>(rest.count())};
}

}  // namespace

void Doorbell::ring(uint32_t news) const {
  page_->rings.fetch_add(1, std::memory_order_seq_cst);
  ::syscall(SYS_futex, &page_->rings, FUTEX_WAKE_BITSET, INT_MAX, nullptr, nullptr, news);
  const uint64_t increment = 1;
  // A full eventfd has been rung often enough.
  if (event_ >= 0 && (page_->watched.load(std::memory_order_relaxed) & news) != 0 &&
      ::write(event_, &increment, sizeof increment) < 0) {
    return;
  }
}

void Doorbell::block(uint32_t news, uint32_t seen, Clock::duration most) const {
  // This one of the futex calls takes a point in time, on the clock that steady_clock is.
  const timespec end = timespec_of(Deadline(most).at().time_since_epoch());
  ::syscall(SYS_futex, &page_->rings, FUTEX_WAIT_BITSET, seen, &end, nullptr, news);
}

void Doorbell::poll(int fd, Clock::duration most) const {
  pollfd both[] = {{fd, POLLIN, 0}, {event_, POLLIN, 0}};
  const timespec timeout = timespec_of(most);
  if (::ppoll(both, 2, &timeout, nullptr) <= 0 || both[1].revents == 0) return;
  uint64_t rings = 0;
  if (::read(event_, &rings, sizeof rings) < 0) return;  // it never blocks
}

bool Patience::spin_or_yield() {
  const auto now = Clock::now();
  if (polls_ == free_polls_ + 1) {
    started_ = last_ = now;
    yielded_ = 0;
    in_vain_ = now < loaded_until_;
    if (in_vain_) return false;
  }
  const bool crowded = shares_core_ && shares_core_();
  // The awaited rank may have had the core, and then nothing is lost.
  if (!crowded || now - last_ > kSlice) lost(now - last_);
  last_ = now;
  in_vain_ = now < loaded_until_;  // spinning was interrupted: the core is wanted
  if (in_vain_) return false;
  free_polls_ = crowded ? std::min(policy_.free_polls, kCrowdedPolls) : policy_.free_polls;
  polls_ = free_polls_ + 1;  // more than free ones, and not the first of these
  if (!crowded && now - started_ < spin_) {
    for (int i = 0; i < 8; ++i) pause_cpu();
    return true;
  }
  in_vain_ = yielded_++ >= (crowded ? kCrowdedYields : policy_.yields);
  if (in_vain_) return false;
  ::sched_yield();
  return true;
}

// Spins less where that was in vain, and more where a longer spin would have seen the news.
void Patience::end_spin() {
  if (started_ < loaded_until_) return;
  if (in_vain_ && Clock::now() - started_ - kSleepCost > policy_.spin) {
    spin_ = std::max(spin_ / 2, policy_.least_spin);
  } else if (in_vain_ || last_ - started_ > spin_ / 2) {
    spin_ = std::min(2 * spin_, policy_.spin);
  }
}

// Another thread had the core for so long. Once the account is empty, one more such time is enough.
void Patience::lost(Clock::duration time) {
  if (time < kSleepCost / 4) return;  // nobody had it
  saved_ -= time;
  if (saved_ >= Clock::duration::zero()) return;
  saved_ = Clock::duration::zero();
  loaded_until_ = last_ + time + kLoadedFor;
}

int usable_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return CPU_COUNT(&set);
}

}  // namespace ringcomm
