// All threads of a group wait by this. A thread polls, spins while it has the patience, and sleeps.
// However much moves meanwhile, it checks peers, deadlines and signals to the process: after 2 ms,
// because a peer may have died before, then less and less often, and at least every 20 ms.
#pragma once

#include <algorithm>
#include <thread>
#include <utility>

#include "base/doorbell.h"

namespace ringcomm {

template <typename Check>
class Waiter {
 public:
  // `check` throws to end the wait. It gets the time at which this wait first read the clock. The
  // wait reads it once there is time for that.
  Waiter(Patience& patience, Check check) : patience_(&patience), check_(std::move(check)) {}
  // Makes one that never spins.
  explicit Waiter(Check check) : patience_(nullptr), check_(std::move(check)) {}

  // Call it when the awaited thing has come, and another one is to come.
  void reset() {
    patience_->reset();
    count();
  }
  // Call it after each poll; `moved`: it moved something. Returns true to poll again, false to
  // sleep for until_check().
  bool again(bool moved) {
    if (!moved) {
      count();
      return patience_ != nullptr && patience_->again();
    }
    if (patience_ != nullptr) patience_->reset();
    check_when_due();
    return true;
  }
  Clock::duration until_check() {
    begin();
    return std::max(next_ - Clock::now(), Clock::duration::zero());
  }
  // Call it after a sleep on the doorbell. If a rank has failed, the check is due now.
  void woke(bool failure) {
    if (patience_ != nullptr) patience_->reset();  // time asleep was not taken by others
    failure ? check() : check_when_due();
  }
  void check_when_due() {
    begin();
    if (Clock::now() >= next_) check();
  }

 private:
  static constexpr Clock::duration kFirst = std::chrono::milliseconds(2);
  static constexpr Clock::duration kSlice = std::chrono::milliseconds(20);
  static constexpr uint32_t kPolls = 512;  // polls without a reading of the clock

  void begin() {
    if (began_ != Clock::time_point()) return;
    began_ = Clock::now();
    next_ = began_ + kFirst;
  }
  void count() {
    if (++polls_ % kPolls == 0) check_when_due();
  }
  void check() {
    begin();
    next_ = Clock::now() + std::clamp(Clock::now() - began_, kFirst, kSlice);
    check_(began_);
  }

  Patience* const patience_;
  Check check_;
  uint32_t polls_ = 0;
  Clock::time_point began_, next_;
};

// Polls for events that ring no doorbell.
void poll_until(auto&& over, Clock::duration interval, auto&& check) {
  Waiter waiter([&](Clock::time_point) { check(); });
  while (!over()) {
    std::this_thread::sleep_for(interval);
    waiter.check_when_due();
  }
}

}  // namespace ringcomm
