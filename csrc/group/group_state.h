// The engines of a group share its state: whether it works, has failed, was destroyed, or belongs
// to another process. The state lies below every engine, and tells them when the group fails.
#pragma once

#include <thread>

#include "base/mutex.h"
#include "group/engine.h"
#include "group/group_facts.h"

namespace ringcomm {

class GroupState : public GroupFacts {
 public:
  using GroupFacts::GroupFacts;

  Engines& engines() { return engines_; }
  const Engines& engines() const { return engines_; }
  // Has a worker look at this group.
  std::function<void()> kick;

  bool failed() const { return (marks_.load() & (kFailed | kForked)) == kFailed; }
  bool left() const { return (marks_.load() & (kLeft | kForked)) == kLeft; }
  bool forked() const { return (marks_.load(std::memory_order_acquire) & kForked) != 0; }
  // Throws where the group takes no calls: it has failed, was destroyed, or a handler calls.
  void check_usable() const {
    if (marks_.load(std::memory_order_acquire) == 0 &&
        in_handler_.load(std::memory_order_relaxed) == std::thread::id()) {
      return;
    }
    refuse();
  }
  // Fails the group: tells the peers and the engines. Only the first failure counts. Returns
  // `error`.
  std::exception_ptr fail(const std::exception_ptr& error);
  std::exception_ptr fail(const std::string& why);  // this rank's own
  // Marks it as destroyed. Returns true for the first call.
  bool leave() { return (marks_.fetch_or(kLeft) & (kLeft | kForked)) == 0; }
  void fork();
  // Returns why it failed; empty while it works.
  std::string failure() const;
  std::exception_ptr error() const;
  // Returns the error; a peer's failure that this rank has not yet seen fails the group now.
  std::exception_ptr why_failed();
  // Throws the failure that ends `during`, if there is one.
  void check_failure(const std::string& during) const;
  // Calls the caller's interrupt, which fails the group if it throws.
  void check_interrupt(const std::string& during);
  // Calls it alone: the caller handles its exception.
  void call_interrupt() const {
    if (options().interrupt) options().interrupt();
  }
  // Throws UsageError in a signal handler that interrupts a call of this group.
  void check_no_handler() const;

  // Runs the slow path of all engines.
  void check();
  // Ends what is pending after a failure. Call it with no lock held: callbacks may ask for more.
  void end_failed();

 private:
  // Marks say what has become of the group. A mark is set once, and stays. A group without any
  // takes calls.
  enum Mark : uint8_t {
    kFailed = 1,  // refuses them with its error; the peers know
    kLeft = 2,    // was destroyed; pending operations may still end
    kForked = 4,  // belongs to the process that forked this one: then no other mark counts
  };
  void refuse() const;

  std::atomic<uint8_t> marks_{0};
  mutable Mutex mutex_;
  std::exception_ptr error_ RINGCOMM_GUARDED_BY(mutex_);

  std::atomic<std::thread::id> in_handler_;  // runs a signal handler in the middle of a call
  Engines engines_;
};

}  // namespace ringcomm
