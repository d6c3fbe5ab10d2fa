// Threads of a simulation: each runs until it sleeps, and time is a number. All run on one thread,
// so a run with the same seed is the same run.
#pragma once

#include <cxxabi.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <memory>
#include <tuple>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"

namespace ringcomm::testing {

class Fibers {
 public:
  Clock::time_point now() const { return now_; }

  // Bodies throw nothing.
  void start(Clock::time_point when, std::function<void()> body) {
    fibers_.push_back(std::make_unique<Fiber>(std::move(body)));
    Fiber& fiber = *fibers_.back();
    ::getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = &main_;
    ::makecontext(&fiber.context, &Fibers::enter, 0);
    wake(fiber, when);
  }
  // Puts the calling fiber to sleep.
  void sleep_until(Clock::time_point when) {
    Fiber& self = *current_;
    wake(self, when);
    switch_to(self.context, main_);
  }
  // Until all have ended.
  void run() {
    while (!heap_.empty()) {
      std::ranges::pop_heap(heap_, Later());
      const Wake next = heap_.back();
      heap_.pop_back();
      now_ = next.when;
      current_ = next.fiber;
      running() = this;
      switch_to(main_, next.fiber->context);
    }
  }

 private:
  static constexpr size_t kStackBytes = 256 << 10;  // touched as far as it is used

  struct Fiber {
    explicit Fiber(std::function<void()> body) : body(std::move(body)) {}
    std::function<void()> body;
    ucontext_t context;
    Mapping stack{kStackBytes};
  };
  struct Wake {
    Clock::time_point when;
    uint64_t order;
    Fiber* fiber;
  };
  struct Later {
    bool operator()(const Wake& a, const Wake& b) const {
      return std::tie(a.when, a.order) > std::tie(b.when, b.order);
    }
  };

  static Fibers*& running() {
    static Fibers* it = nullptr;
    return it;
  }
  static void enter() { running()->current_->body(); }

  void wake(Fiber& fiber, Clock::time_point when) {
    heap_.push_back({std::max(when, now_), order_++, &fiber});
    std::ranges::push_heap(heap_, Later());
  }
  // The runtime keeps the exceptions that a thread handles; a fiber may sleep in a handler.
  static void switch_to(ucontext_t& from, ucontext_t& to) {
    std::array<std::byte, 16>
        caught;  // a pointer and a number: __cxa_eh_globals of the Itanium ABI
    std::memcpy(caught.data(), abi::__cxa_get_globals(), caught.size());
    std::memset(static_cast<void*>(abi::__cxa_get_globals()), 0, caught.size());
    ::swapcontext(&from, &to);
    std::memcpy(static_cast<void*>(abi::__cxa_get_globals()), caught.data(), caught.size());
  }

  Clock::time_point now_{std::chrono::hours(1)};
  uint64_t order_ = 0;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Wake> heap_;
  Fiber* current_ = nullptr;
  ucontext_t main_;
};

}  // namespace ringcomm::testing
