// What torch holds of an operation in progress: c10d::Work over a Request.
#pragma once

#include <ATen/ThreadLocalState.h>
#include <ATen/core/ivalue.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "comm/communicator.h"
#include "torch/operations.h"

namespace ringcomm {

// Works that have ended. Their tensors may belong to Python objects, and who drops the last
// reference to one needs the GIL: the worker, which must never wait for it, leaves them here for
// the next thread that calls or waits.
class Shelf {
 public:
  void put(c10::intrusive_ptr<c10d::Work> work);
  void clear();
  // The backend goes: nobody will clear it again.
  void close();

 private:
  std::atomic<bool> filled_{false};  // partner: clear(); a stale false only delays
  std::mutex mutex_;                 // guards what follows
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
  bool closed_ = false;
};

// Counts what is not over yet.
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

// What operations on a device use whose Work has gone: kept until they are over.
class InUse {
 public:
  void put(DeviceGroup::EndPtr end, std::vector<at::Tensor> tensors, std::vector<Staging> staging);
  void clear();  // of those that are over

 private:
  struct Kept {
    DeviceGroup::EndPtr end;
    std::vector<at::Tensor> tensors;
    std::vector<Staging> staging;
  };
  std::mutex mutex_;  // guards the next
  std::vector<Kept> kept_;
};

// The part of a backend that outlives it while operations run.
struct Surroundings {
  using Hook = std::function<void(std::shared_ptr<c10d::WorkInfo>)>;

  std::shared_ptr<Communicator> group;
  Shelf shelf;
  InUse in_use;
  Pending pending;  // works whose hooks and callbacks have not returned

  void set_hook(Hook hook) {  // once
    hook_ = std::move(hook);
    has_hook_.store(true, std::memory_order_release);
  }
  const Hook* hook() const { return has_hook_.load(std::memory_order_acquire) ? &hook_ : nullptr; }

 private:
  Hook hook_;
  std::atomic<bool> has_hook_{false};  // partner: hook()
};

class Work final : public c10d::Work {
 public:
  using Clock = std::chrono::steady_clock;

  // Keeps the tensors of `call` until it is destroyed. Opens the call's event in profiles where
  // `profiled`.
  Work(std::shared_ptr<Surroundings> surroundings, Call& call, bool profiled);
  ~Work() override;

  // What wait() waits for.
  void follow(std::shared_ptr<Request> request) { request_ = std::move(request); }
  void follow(MessagePtr message);
  // Called once, on the thread that ended the operation.
  void complete(const std::exception_ptr& error);

  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
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
  void call_back();
  void resolve(Future& future);
  void resolve_result(Future& future) const;

  std::shared_ptr<Surroundings> surroundings_;
  std::vector<at::Tensor> inputs_, outputs_;
  Staging staging_;
  at::ThreadLocalState caller_;
  uint64_t sequence_;
  Clock::time_point started_ = Clock::now(), ended_;

  std::shared_ptr<Request> request_;
  MessagePtr message_;
  // Guarded by the base's mutex_.
  c10::intrusive_ptr<Future> future_, future_result_;
  bool resolved_ = false;
};

// Several as one: what endCoalescing() returns.
class Works final : public c10d::Work {
 public:
  explicit Works(std::vector<c10::intrusive_ptr<c10d::Work>> works);

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override;
  void blockCurrentStream() override { synchronize(); }
  std::vector<at::Tensor> result() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
};

}  // namespace ringcomm
