// torch's handle on an operation in progress: c10d::Work over a Request.
#pragma once

#include <ATen/ThreadLocalState.h>
#include <ATen/core/ivalue.h>

#include <deque>
#include <functional>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>

#include "comm/communicator.h"
#include "torch/call.h"

namespace ringcomm {

// Counts works that are not over yet.
class Pending {
 public:
  void begin() { ++count_; }
  void end() {
    if (--count_ == 0) count_.notify_all();
  }
  void wait() {  // until nothing is pending
    while (const int count = count_) count_.wait(count);
  }

 private:
  std::atomic<int> count_{0};
};

// A group's completion hook: called with one work after the other, in the order they have ended,
// whichever threads ended them.
class Hook {
 public:
  using Function = std::function<void(std::shared_ptr<c10d::WorkInfo>)>;

  void set(Function function) {  // once
    function_ = std::move(function);
    there_.store(true, std::memory_order_release);
  }
  bool there() const { return there_.load(std::memory_order_acquire); }
  // `work` has ended now; its call() may come after those of works that end later.
  void reserve(const void* work) {
    const Lock lock(mutex_);
    ended_.push_back({work, nullptr, nullptr});
  }
  // `over` is called once the hook has returned: maybe later, on another thread.
  void call(const void* work, std::shared_ptr<c10d::WorkInfo> info, std::function<void()> over);

 private:
  Function function_;
  std::atomic<bool> there_{false};  // partner: there()
  struct Ended {
    const void* work;
    std::shared_ptr<c10d::WorkInfo> info;  // none: its call() has not come
    std::function<void()> over;
  };
  Mutex mutex_;
  std::deque<Ended> ended_ RINGCOMM_GUARDED_BY(mutex_);
  // A thread calls with what is there, and with what comes meanwhile.
  bool called_ RINGCOMM_GUARDED_BY(mutex_) = false;
};

// The part of a backend that outlives it, or its reconfiguration, while operations run.
struct BackendState : std::enable_shared_from_this<BackendState> {
  std::shared_ptr<Communicator> group;
  Pending pending;  // works whose hooks and callbacks have not returned
  Hook hook;
};

class Work final : public c10d::Work {
 public:
  // Keeps the tensors of `call` until it is destroyed. `event_end` is called when it ends.
  Work(std::shared_ptr<BackendState> backend_state, Call& call, const EventEnd& event_end);
  ~Work() override;

  // Serves a hook. The driving thread calls it, in the order in which works end.
  void note_end() { backend_state_->hook.reserve(this); }
  // Sets the request for which wait() waits.
  void follow(std::shared_ptr<Request> request) { request_ = std::move(request); }
  // Called once, on the thread that ended the operation.
  void complete(const std::exception_ptr& error);

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  // Ends a message that has not been waited for.
  void give_up();
  std::vector<at::Tensor> result() override;
  int sourceRank() const override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFutureResult() override;
  float getDuration() const override;  // milliseconds
  uint64_t getSequencenumber() const override { return sequence_; }

 private:
  using Future = c10::ivalue::Future;
  // Makes a future at first use. It is resolved by complete(), or here where that has been.
  c10::intrusive_ptr<Future> promise(c10::intrusive_ptr<Future>& slot, c10::TypePtr type);
  void call_back(bool hooked);
  Message* message() const { return request_ ? request_->as_message() : nullptr; }
  c10::IValue value() const;
  void resolve(Future& future);
  void resolve_result(Future& future) const;

  std::shared_ptr<BackendState> backend_state_;
  std::vector<at::Tensor> inputs_, outputs_;
  size_t output_lists_;
  Staging staging_;
  at::ThreadLocalState caller_;
  uint64_t sequence_;
  Clock::time_point started_ = Clock::now(), ended_;

  std::shared_ptr<Request> request_;
  // Guarded by the base's mutex_.
  c10::intrusive_ptr<Future> future_, future_result_;
  bool resolved_ = false;
};

// Several works as one; endCoalescing() returns it.
class Works final : public c10d::Work {
 public:
  explicit Works(std::vector<c10::intrusive_ptr<c10d::Work>> works);

  bool isCompleted() override {
    return std::ranges::all_of(works_, [](const auto& work) { return work->isCompleted(); });
  }
  bool isSuccess() const override { return exception() == nullptr; }
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override {
    for (const auto& work : works_) work->synchronize();
  }
  void blockCurrentStream() override { synchronize(); }
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace ringcomm
