// A request to a group, which will be done, or fail, at some time.
#pragma once

#include <atomic>
#include <exception>

#include "base/deadline.h"
#include "base/log.h"

namespace ringcomm {

struct Message;

struct Request {
  explicit Request(Clock::duration timeout) : timeout(timeout) {}
  virtual ~Request() = default;
  virtual Message* as_message() { return nullptr; }

  Clock::duration timeout;
  // Called once, on the thread that completes the request, with no lock held.
  std::function<void(const std::exception_ptr&)> on_done;

  std::atomic<bool> done{false};  // partner: Progress::wait; error is set before
  std::exception_ptr error;

  // Marks it as done. Wake waiting threads before call_back(), because callbacks may be slow.
  void end(const std::exception_ptr& why) {
    error = why;
    done.store(true, std::memory_order_seq_cst);
  }
  void call_back() {
    if (!on_done) return;
    try {
      std::exchange(on_done, nullptr)(error);
    } catch (const std::exception& thrown) {  // nobody is there to catch it
      Logger(LogLevel::kWarning, "").warning("a completion callback threw: ", thrown.what());
    }
  }
};

}  // namespace ringcomm
