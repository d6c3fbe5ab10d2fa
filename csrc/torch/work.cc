#include "torch/work.h"

#include <ATen/ATen.h>
#include <ATen/core/jit_type.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "torch/errors.h"
#include "torch/options.h"

namespace ringcomm {

// ---- hooks

void BackendState::tell_failure() {
  GroupState& state = group->state();
  if (meant || hooks->failed.empty() || state.forked()) return;  // a child has no transport
  if (!state.failed() && !state.transport().first_failed()) return;
  if (!told.exchange(true)) hooks->failed.call();
}

void BackendStates::tell_failures() {
  std::vector<std::shared_ptr<BackendState>> all;
  {
    const Lock lock(mutex_);
    for (const auto& state : states_) all.push_back(state.lock());
  }
  for (const auto& state : all) {
    if (state) state->tell_failure();
  }
}

// ---- Work

uint64_t new_key() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

Work::Work(Call& call, const EventEnd& event_end)
    : c10d::Work(call.life->group->rank(), call.type),
      backend_state_(call.life),
      inputs_(call.inputs.vec()),
      outputs_(call.outputs.vec()),
      staging_(std::move(call.staging)),
      hooked_(backend_state_->hooks->ended != nullptr),
      sequence_(backend_state_->group->sequence() + (call.peer ? 0 : 1)) {  // messages have none
  recordFunctionEndCallback_ = event_end;
  ++backend_state_->pending;
}

Work::~Work() {
  if (!resolved_) backend_state_->end_one();  // it never began
}

void Work::complete(const std::exception_ptr& why) {
  std::exception_ptr error = why ? as_torch(why) : nullptr;
  std::optional<at::ThreadLocalStateGuard> as_caller;
  if (!staging_.empty() && !error) {
    as_caller.emplace(caller_);
    try {
      staging_.finish();
    } catch (const std::exception&) {
      error = std::current_exception();
    }
  }
  ended_ = Clock::now();
  finish(error);
  if (!error && !backend_state_->hooks->succeeded.empty())
    backend_state_->hooks->succeeded.call(key_, getDuration());
  const Finally over{[&] {
    backend_state_->end_one();
    const auto self = c10::intrusive_ptr<c10d::Work>::reclaim_copy(this);
    Workers::get().release_later(std::make_shared<c10::intrusive_ptr<c10d::Work>>(self));
  }};
  call_back();
}

// Futures and hook: code of the user's, which may wait for other operations.
void Work::call_back() {
  c10::intrusive_ptr<Future> future;
  {
    const std::lock_guard lock(mutex_);
    resolved_ = true;
    future = future_;
  }
  if (!future && !hooked_) return;
  Progress::call_out([&] {
    const at::ThreadLocalStateGuard as_caller(caller_);
    if (future) resolve(*future);
    if (!hooked_) return;
    backend_state_->hooks->ended(
        std::make_shared<c10d::WorkInfo>(retrieveOpType(), sequence_, started_, ended_,
                                         std::chrono::duration<float>(ended_ - started_)));
  });
}

bool Work::wait(std::chrono::milliseconds timeout) {
  const bool limited = timeout != kNoTimeout;
  if (limited) timeout = checked_timeout(timeout);
  if (request_ && !isCompleted()) {
    Communicator& group = *backend_state_->group;
    const bool done = limited ? group.wait(*request_, timeout) : group.wait(*request_);
    // Late: the base says so. Done: on another thread complete() may be about to end.
    timeout = done ? kNoTimeout : std::chrono::milliseconds(1);
  }
  const bool result = c10d::Work::wait(timeout);
  Workers::get().deferred().clear();
  return result;
}

std::vector<at::Tensor> Work::result() {
  TORCH_CHECK(isCompleted(),
              "Work needs to be completed before calling result(): call wait() first");
  return outputs_;
}

int Work::sourceRank() const {
  const Message* const moved = message();
  if (moved == nullptr) return c10d::Work::sourceRank();
  return moved->sending ? rank_ : moved->source;
}

float Work::getDuration() const {
  TORCH_CHECK(const_cast<Work*>(this)->isCompleted(), "getDuration(): the work has not ended");
  return std::chrono::duration<float, std::milli>(ended_ - started_).count();
}

// It is resolved by call_back(), or here where that has been.
c10::intrusive_ptr<c10::ivalue::Future> Work::getFuture() {
  {
    const std::lock_guard lock(mutex_);
    if (future_) return future_;
    future_ = c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()));
    if (!resolved_) return future_;
  }
  resolve(*future_);
  return future_;
}

void Work::resolve(Future& future) {
  if (exception_) {
    future.setError(exception_);
  } else {
    future.markCompleted(c10::IValue(outputs_));
  }
}

// ---- Works

Works::Works(std::vector<c10::intrusive_ptr<c10d::Work>> works)
    : c10d::Work(-1, c10d::OpType::COALESCED), works_(std::move(works)) {}

std::exception_ptr Works::exception() const {
  for (const auto& work : works_) {
    if (auto error = work->exception()) return error;
  }
  return nullptr;
}

bool Works::wait(std::chrono::milliseconds timeout) {
  for (const auto& work : works_) work->wait(timeout);
  return true;
}

std::vector<at::Tensor> Works::result() {
  std::vector<at::Tensor> results;
  for (const auto& work : works_) {
    const auto some = work->result();
    results.insert(results.end(), some.begin(), some.end());
  }
  return results;
}

c10::intrusive_ptr<c10::ivalue::Future> Works::getFuture() {
  using Future = c10::ivalue::Future;
  const auto type = c10::ListType::create(c10::TensorType::get());
  c10::List<c10::intrusive_ptr<Future>> parts{c10::FutureType::create(type)};
  std::vector<c10::Device> devices;
  for (const auto& work : works_) {
    const auto part = work->getFuture();
    parts.push_back(part);
    if (devices.empty()) devices = part->devices();
  }
  if (!devices.empty()) {  // complete from the start: one stream waits for all, and no caller's
    const c10::impl::VirtualGuardImpl guard(devices[0].type());
    const c10::StreamGuard beside(guard.getStreamFromGlobalPool(devices[0]));
    for (size_t i = 0; i < parts.size(); ++i) parts.get(i)->wait();
    auto future = c10::make_intrusive<Future>(type, devices);
    future->markCompleted(c10::IValue(result()));
    return future;
  }
  const auto all_results = [works = works_](Future& all) {
    all.value();  // throws the error of one of them
    return c10::IValue(Works(works).result());
  };
  return c10::collectAll(parts)->then(all_results, type);
}

}  // namespace ringcomm
