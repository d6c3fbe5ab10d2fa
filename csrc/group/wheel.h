// The right to drive a group's collectives. One thread has it at a time. A thread that is turned
// away sleeps on the doorbell, and let_go() rings it.
//
// No wake-up is lost. Everything is seq_cst. A thread is turned away only by writing kWanted over
// kTaken, so the next let_go() sees it and calls notify(). If the sleeper has announced itself by
// then, notify() wakes it. If not, its last poll comes later. That poll finds the wheel free, or
// writes kWanted again.
#pragma once

#include <utility>

#include "base/doorbell.h"

namespace ringcomm {

class Wheel {
 public:
  explicit Wheel(const Doorbell& bell) : bell_(bell) {}

  bool take() {
    State state = kFree;  // partner: let_go()
    while (!state_.compare_exchange_weak(state, state == kFree ? kTaken : kWanted,
                                         std::memory_order_seq_cst)) {
    }
    return state == kFree;
  }
  void let_go() {
    // Partner: take()
    if (state_.exchange(kFree, std::memory_order_seq_cst) == kWanted) bell_.notify(kLocalNews);
  }

 private:
  enum State : uint32_t { kFree, kTaken, kWanted };
  std::atomic<State> state_{kFree};
  const Doorbell bell_;
};

// A thread at the wheel, or one that would like to be.
class Driver {
 public:
  explicit Driver(Wheel& wheel) : wheel_(wheel) {}
  ~Driver() { let_go(); }
  Driver(const Driver&) = delete;

  bool drives() const { return drives_; }
  bool take() { return drives_ || (drives_ = wheel_.take()); }
  void let_go() {
    if (std::exchange(drives_, false)) wheel_.let_go();
  }

 private:
  Wheel& wheel_;
  bool drives_ = false;
};

}  // namespace ringcomm
