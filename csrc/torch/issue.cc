// Runs Backend's calls, or starts them.
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>

#include "torch/backend.h"
#include "torch/errors.h"

namespace ringcomm {
namespace {

int64_t total(at::TensorList tensors, auto size) {
  int64_t sum = 0;
  for (const at::Tensor& tensor : tensors) sum += static_cast<int64_t>((tensor.*size)());
  return sum;
}

}  // namespace

// torch shows what an event knows where it records shapes, too.
EventEnd open_event(const Call& call, const std::string& algorithm) {
  const auto event = std::make_shared<at::RecordFunction>(at::RecordScope::USER_SCOPE);
  if (!event->isActive()) return nullptr;
  // They can differ: an all_gather's output is as large as all inputs.
  const int64_t most =
      std::max(total(call.inputs, &at::Tensor::nbytes), total(call.outputs, &at::Tensor::nbytes));
  const std::unordered_map<std::string, c10::IValue> details = {{"algorithm", algorithm},
                                                                {"bytes", most}};
  const std::vector<c10::IValue> inputs(call.inputs.begin(), call.inputs.end());
  event->_setAsync();  // it may end on another thread
  event->before(str("ringcomm:", call.name), &inputs, &details);
  return [event] { event->end(); };
}

Backend::WorkPtr Backend::issue(Call&& call) {
  call.life = life();
  call.operation.timeout = timeout_of(call.operation.timeout, call.life->group->state());
  if (const uint64_t codes = codes_.load(std::memory_order_relaxed)) {
    call.operation.purpose = Purpose::kCodes;
    call.operation.layout = mix(call.operation.layout, codes);
  }
  find_device(call);
  if (options_->config.trace_lines == "1") call.operation.line = line_of_caller();
  for (const auto scope : {at::RecordScope::USER_SCOPE, at::RecordScope::FUNCTION}) {
    if (at::getStepCallbacksUnlessEmpty(scope)) return start_in_profile(call);
  }
  if (call.device) return start_on_device(call, nullptr);
  const bool here = !call.async && !call.continuation && !hasHooks();
  return here ? run(call) : start(call);
}

Backend::WorkPtr Backend::run(Call& call) {
  const auto work = wants_works() ? c10::make_intrusive<Work>(call, nullptr) : nullptr;
  with_torch_errors([&] { call.life->group->run(call.operation); });
  work ? work->complete(nullptr) : call.staging.finish();
  return work;
}

Backend::WorkPtr Backend::start(Call& call, const EventEnd& event_end) {
  Workers::get().deferred().clear();
  if (call.device) return start_on_device(call, event_end);
  auto work = c10::make_intrusive<Work>(call, event_end);
  with_torch_errors([&] { call.peer ? post(work, call) : submit(work, call); });
  if (call.async) {
    collect(work);
    return work;
  }
  work->wait();
  return wants_works() ? work : nullptr;
}

void Backend::submit(const c10::intrusive_ptr<Work>& work, Call& call) {
  const auto on_done = [work](const std::exception_ptr& error) { work->complete(error); };
  const auto task = call.life->group->host().submit(std::move(call.operation), on_done,
                                                    std::move(call.continuation));
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
  const auto sequence =
      std::make_tuple(static_cast<int64_t>(call.life->group->sequence()) + 1, false);
  const auto names = std::make_tuple(getGroupUid(), getGroupDesc());
  const Tensors inputs = call.inputs.vec(), outputs = call.outputs.vec();
  const int64_t given = total(inputs, &at::Tensor::numel), got = total(outputs, &at::Tensor::numel);
#ifdef RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP
  RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP(sequence, names, inputs, outputs, rank(), call.name, given,
                                        got, type, sent, received, first, stride, size(),
                                        call.async);
#else
  RECORD_PARAM_COMMS_DATA(sequence, names, inputs, outputs, rank(), call.name, given, got, type,
                          sent, received, first, stride, size());
#endif
  const std::string algorithm = with_torch_errors([&] { return algorithm_of(call); });
  return start(call, open_event(call, algorithm));
}

}  // namespace ringcomm
