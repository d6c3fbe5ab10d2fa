// A group's collectives on memory of the host, in the order of the calls. One thread drives them at
// a time: the caller of run() or wait(), or the process's worker when nobody waits.
#pragma once

#include <deque>
#include <memory>

#include "group/request.h"
#include "group/waiter.h"
#include "host/host_operation.h"

namespace ringcomm {

// Makes a second operation that belongs together with the one that has just ended. It is asked
// again after the second one, and then returns false.
using Continuation = std::function<bool(Operation&)>;

// Supplies the pieces of one operation, after the first.
struct PieceSource {
  const std::atomic<uint32_t>* gate = nullptr;  // counts the pieces that may begin
  std::function<bool(Operation&)> next;         // makes the next piece; false: there is none
};

// A collective in the queue, with its continuation: nothing else of the queue comes between them.
struct Task final : Request {
  Task(Operation what, Clock::duration limit)
      : Request(limit),
        asked(make_descriptor(what, 0)),
        operation(std::move(what)),
        deadline(limit) {}
  const Descriptor asked;
  Operation operation;  // now: of a continuation, maybe
  Deadline deadline;
  Continuation continuation;
  PieceSource pieces;
  uint32_t piece = 0;     // the number of this one
  uint64_t ticket = 0;    // the flight recorder's
  bool blocking = false;  // it ends with the wait for it: then the memory is the caller's again
};
using TaskPtr = std::shared_ptr<Task>;

class HostEngine final : public Engine {
 public:
  HostEngine(GroupState& state, const Geometry& geometry);

  Algorithm algorithm_of(const Operation& operation) const {
    return operation_.algorithm_of(operation);
  }
  // Runs a collective on the caller's thread, which does the work and the waiting: no hand-over, no
  // wake-up. Returns false where others are first: then nothing has happened.
  bool run(const Operation& operation);
  // Queues a collective. The memory lives until the task is done; `on_done` is called on the thread
  // that ends it. Throws UsageError (nothing has happened), or the reason why the group takes no
  // calls.
  TaskPtr submit(Operation operation, decltype(Request::on_done) on_done = nullptr,
                 Continuation continuation = nullptr, PieceSource pieces = {});

  Wheel& wheel() { return wheel_; }
  // Returns the rank from which a driver has to hear next, or -1.
  Rank awaited(const Driver& driver) const {
    return driver.drives() && task_ ? operation_.peer() : -1;
  }
  // Leaves the wheel to callers where no operation is in progress.
  void rest(Driver& driver) {
    if (!driver.drives()) return;
    task_ ? operation_.idle() : driver.let_go();
  }
  // Returns how many collectives have been asked for so far.
  uint64_t sequence() const { return asked_.load(std::memory_order_relaxed); }

  uint64_t readable_operations() const { return operation_.readable_operations(); }

  bool pending() override { return queued_.load(std::memory_order_seq_cst) > 0; }
  bool ready(Driver& driver) override;
  bool progress(Driver& driver) override;
  // Does the same, but leaves a task that ends to progress(), which calls back.
  bool advance(Driver& driver);
  // Tells whether there is such a task.
  bool over(const Driver& driver) const { return driver.drives() && over_; }
  void check() override;
  Clock::duration poll_interval() override;

 private:
  void run_to_end(const Operation& operation);
  TaskPtr front() const;
  bool next_task();
  bool next_piece();
  void end_task(Driver& driver, const std::exception_ptr& error);

  GroupState& state_;
  Wheel wheel_;  // the driving thread has it; guards the next four
  HostOperation operation_;
  Patience patience_;
  TaskPtr task_;                            // whose operation is in progress; null in run()
  std::optional<std::exception_ptr> over_;  // it has ended, with that error

  mutable Mutex queue_mutex_;
  std::deque<TaskPtr> queue_ RINGCOMM_GUARDED_BY(queue_mutex_);
  std::atomic<uint64_t> asked_{0};
  std::atomic<int> queued_{0};  // tasks not yet ended; partner: HostEngine::run()
};

}  // namespace ringcomm
