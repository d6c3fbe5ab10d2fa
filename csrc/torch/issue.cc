// Runs Backend's calls, or starts them.
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>

#include "torch/backend.h"
#include "torch/errors.h"

namespace ringcomm {
namespace {

// Is a profiler at work on this thread?
bool is_profiled() {
  return at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE).has_value() ||
         at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value();
}

int64_t elements(at::TensorList tensors) {
  int64_t count = 0;
  for (const at::Tensor& tensor : tensors) count += tensor.numel();
  return count;
}

}  // namespace

Backend::WorkPtr Backend::issue(Call&& call) {
  call.operation.timeout = timeout_of(call.operation.timeout);
  find_device(call);
  if (is_profiled()) return start_in_profile(call);
  if (call.device) return start_on_device(call, false);
  const bool here = !call.async && !call.continuation.next && !hasHooks();
  return here ? run(call) : start(call, false);
}

Backend::WorkPtr Backend::run(Call& call) {
  with_torch_errors([&] { group().run(call.operation); });
  call.staging.finish();
  return nullptr;
}

Backend::WorkPtr Backend::start(Call& call, bool profiled) {
  Runtime::get().deferred().clear();
  if (call.device) return start_on_device(call, profiled);
  auto work = c10::make_intrusive<Work>(life(), call, profiled);
  with_torch_errors([&] { call.peer ? post(work, call) : submit(work, call); });
  if (call.async) {
    collect(work);
    return work;
  }
  work->wait();
  return nullptr;
}

void Backend::submit(const c10::intrusive_ptr<Work>& work, Call& call) {
  const auto on_done = [work](const std::exception_ptr& error) { work->complete(error); };
  std::function<void()> on_end;
  if (hasHooks()) on_end = [work] { work->note_end(); };
  const auto task = group().submit(std::move(call.operation), on_done, std::move(call.continuation),
                                   nullptr, std::move(on_end));
  task->blocking = !call.async;
  work->follow(task);
}

// The "record_param_comms" event is the frame that traces are read by; the Work opens one named
// after the operation within it.
Backend::WorkPtr Backend::start_in_profile(Call& call) {
  const auto& ranks = options_->global_ranks_in_group;
  int first = 0, stride = 1;
  if (!ranks.empty()) c10d::getGlobalRankStartAndStride(ranks, first, stride);
  const at::ScalarType type = !call.inputs.empty()    ? call.inputs[0].scalar_type()
                              : !call.outputs.empty() ? call.outputs[0].scalar_type()
                                                      : at::kByte;
  const std::vector<int64_t> sent(call.operation.send.begin(), call.operation.send.end());
  const std::vector<int64_t> received(call.operation.recv.begin(), call.operation.recv.end());
  const char* name = call.title + sizeof("ringcomm:") - 1;
  const auto sequence = std::make_tuple(static_cast<int64_t>(group().sequence()) + 1, false);
  const auto names = std::make_tuple(getGroupUid(), getGroupDesc());
  const Tensors inputs = call.inputs.vec(), outputs = call.outputs.vec();
#ifdef RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP
  RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP(sequence, names, inputs, outputs, rank(), name,
                                        elements(inputs), elements(outputs), type, sent, received,
                                        first, stride, size(), call.async);
#else
  RECORD_PARAM_COMMS_DATA(sequence, names, inputs, outputs, rank(), name, elements(inputs),
                          elements(outputs), type, sent, received, first, stride, size());
#endif
  return start(call, true);
}

}  // namespace ringcomm
