// torch's handle on an operation in progress: c10d::Work over a Request.
#pragma once

#include <ATen/ThreadLocalState.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <map>

#include "group/per_process.h"
#include "torch/call.h"
#include "torch/hooks.h"

namespace ringcomm {

// The part of a backend that outlives it, or its reconfiguration, while operations run.
struct BackendState {
  std::shared_ptr<Communicator> group;
  std::shared_ptr<Hooks> hooks;   // the backend's
  std::atomic<int> pending{0};    // works whose hooks and callbacks have not returned
  std::atomic<bool> told{false};  // its failure, to the hooks; partner: tell_failure() elsewhere
  // The group was, or is about to be, ended on purpose: then hooks hear nothing. Partner:
  // tell_failure(), which may come too early only for a group that has failed before.
  std::atomic<bool> meant{false};

  // Calls the hooks for a failure, once, if this rank or another has failed.
  void tell_failure();

  void end_one() {
    if (--pending == 0) pending.notify_all();
  }
  void wait_for_all() {
    while (const int count = pending) pending.wait(count);
  }
};

// All of this process.
class BackendStates {
 public:
  static BackendStates& get() { return PerProcess<BackendStates>::get(); }

  void add(const std::shared_ptr<BackendState>& state) {
    const Lock lock(mutex_);
    std::erase_if(states_, [](const auto& other) { return other.expired(); });
    states_.push_back(state);
  }
  // Calls the hooks of each group that has failed. They may take seconds, so the program learns of
  // the failure meanwhile.
  void tell_failures();

  void before_fork() RINGCOMM_UNCHECKED_LOCKS { mutex_.lock(); }
  void after_fork() RINGCOMM_UNCHECKED_LOCKS { mutex_.unlock(); }
  void forked() {}

 private:
  Mutex mutex_;
  std::vector<std::weak_ptr<BackendState>> states_ RINGCOMM_GUARDED_BY(mutex_);
};

// Returns a key for the hooks, as no other Work of this process has.
uint64_t new_key();

class Work final : public c10d::Work {
 public:
  // Keeps the tensors of `call` until it is destroyed. `event_end` is called when it ends.
  Work(Call& call, const EventEnd& event_end);
  ~Work() override;

  // Sets the request for which wait() waits.
  void follow(std::shared_ptr<Request> request) { request_ = std::move(request); }
  // Ends the work. Called once, on the thread that ended the operation.
  void complete(const std::exception_ptr& error);

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  std::vector<at::Tensor> result() override;
  int sourceRank() const override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  float getDuration() const override;  // milliseconds
  uint64_t getSequencenumber() const override { return sequence_; }
  uint64_t getCompletionKey() const { return key_; }  // overrides from torch 2.15 on

 private:
  using Future = c10::ivalue::Future;
  void call_back();
  Message* message() const { return request_ ? request_->as_message() : nullptr; }
  void resolve(Future& future);

  std::shared_ptr<BackendState> backend_state_;
  std::vector<at::Tensor> inputs_, outputs_;
  Staging staging_;
  bool hooked_;
  at::ThreadLocalState caller_;
  uint64_t sequence_;
  const uint64_t key_ = new_key();
  Clock::time_point started_ = Clock::now(), ended_;

  std::shared_ptr<Request> request_;
  // Guarded by the base's mutex_.
  c10::intrusive_ptr<Future> future_;
  bool resolved_ = false;
};

// Several works as one; endCoalescing() returns it.
class Works final : public c10d::Work {
 public:
  explicit Works(std::vector<c10::intrusive_ptr<c10d::Work>> works);

  const std::vector<c10::intrusive_ptr<c10d::Work>>& parts() const { return works_; }
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
