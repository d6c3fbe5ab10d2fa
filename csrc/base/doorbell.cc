#include "base/doorbell.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

namespace ringcomm {
namespace {

constexpr auto kSlowYield = std::chrono::microseconds(400);
constexpr auto kLoadedFor = std::chrono::milliseconds(100);

}  // namespace

void Doorbell::ring() const {
  page_->rings.fetch_add(1, std::memory_order_seq_cst);
  ::syscall(SYS_futex, &page_->rings, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Doorbell::block(uint32_t seen, Clock::duration most) const {
  const auto whole = std::chrono::duration_cast<std::chrono::seconds>(most);
  const auto rest = std::chrono::duration_cast<std::chrono::nanoseconds>(most - whole);
  const timespec timeout{static_cast<time_t>(whole.count()), static_cast<long>(rest.count())};
  ::syscall(SYS_futex, &page_->rings, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

bool Patience::spin_or_yield() {
  const auto now = Clock::now();
  if (polls_ == policy_.free_polls + 1) {
    if (now < loaded_until_) return false;
    started_ = last_ = now;
    yielded_ = 0;
  }
  if (now - last_ > kSlowYield) {  // spinning was interrupted: the core is wanted
    loaded_until_ = now + kLoadedFor;
    return false;
  }
  last_ = now;
  if (now - started_ < policy_.spin) {
    for (int i = 0; i < 8; ++i) pause_cpu();
    return true;
  }
  return yield();
}

bool Patience::yield() {
  if (yielded_++ >= policy_.yields) return false;
  const auto before = Clock::now();
  ::sched_yield();
  last_ = Clock::now();
  if (last_ - before <= kSlowYield) return true;
  loaded_until_ = last_ + kLoadedFor;
  return true;  // much time went by: look once more before sleeping
}

int usable_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return 1;
  return CPU_COUNT(&set);
}

}  // namespace ringcomm
