// How a thread of a group waits, wherever it does: it polls, spins while it has the patience, and
// sleeps. By the clock, and however much moves meanwhile, it looks around every 50 ms: at peers,
// deadlines and signals to the process.
#pragma once

#include <thread>
#include <utility>

#include "base/doorbell.h"

namespace ringcomm {

template <typename Look>
class Waiter {
 public:
  // look(began) throws what ends the wait. `began` is when this wait first read the clock, which it
  // does when there is time to.
  Waiter(Patience& patience, Look look) : patience_(&patience), look_(std::move(look)) {}
  // One that never spins.
  explicit Waiter(Look look) : patience_(nullptr), look_(std::move(look)) {}

  // What was waited for has come, and more is to come.
  void reset() {
    patience_->reset();
    count();
  }
  // After a poll that moved something, or nothing. True: poll again; false: sleep, for nap().
  bool again(bool moved) {
    if (!moved) {
      count();
      return patience_ != nullptr && patience_->again();
    }
    if (patience_ != nullptr) patience_->reset();
    look_when_due();
    return true;
  }
  Clock::duration nap() {
    begin();
    return std::max(next_ - Clock::now(), Clock::duration::zero());
  }
  // After a sleep on the doorbell. Where somebody has failed the look is now.
  void woke(bool failure) {
    if (patience_ != nullptr) patience_->reset();  // time asleep was not taken by others
    failure ? look() : look_when_due();
  }
  void look_when_due() {
    begin();
    if (Clock::now() >= next_) look();
  }

 private:
  static constexpr auto kSlice = std::chrono::milliseconds(50);
  static constexpr uint32_t kPolls = 512;  // polls without a reading of the clock

  void begin() {
    if (began_ != Clock::time_point()) return;
    began_ = Clock::now();
    next_ = began_ + kSlice;
  }
  void count() {
    if (++polls_ % kPolls == 0) look_when_due();
  }
  void look() {
    begin();
    next_ = Clock::now() + kSlice;
    look_(began_);
  }

  Patience* const patience_;
  Look look_;
  uint32_t polls_ = 0;
  Clock::time_point began_, next_;
};

// Waits for what rings no doorbell.
template <typename Over, typename Look>
void poll_until(Over&& over, Clock::duration interval, Look&& look) {
  Waiter waiter([&](Clock::time_point) { look(); });
  while (!over()) {
    std::this_thread::sleep_for(interval);
    waiter.look_when_due();
  }
}

}  // namespace ringcomm
