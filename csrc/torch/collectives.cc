// The collectives of Backend: c10d's calls to Operations (operations.h), and those run or started.
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>

#include "torch/backend.h"
#include "torch/errors.h"

namespace ringcomm {
namespace {

// Does anybody want to know of the calls of this thread?
bool is_profiled() {
  return at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE).has_value() ||
         at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value();
}

template <typename Options>
Call&& with(Call&& call, const Options& options) {
  call.async = options.asyncOp;
  if (options.timeout.count() > 0) call.operation.timeout = options.timeout;
  return std::move(call);
}

int64_t elements(at::ArrayRef<at::Tensor> tensors) {
  int64_t count = 0;
  for (const at::Tensor& tensor : tensors) count += tensor.numel();
  return count;
}

}  // namespace

// ---- running

Backend::WorkPtr Backend::issue(Call&& call) {
  surroundings_->shelf.clear();
  call.operation.timeout = timeout_of(call.operation.timeout);
  find_device(call);
  if (is_profiled()) return start_in_profile(call);
  if (call.device) return start_on_device(call, false);
  const bool here = !call.async && !call.sequel.next && !hasHooks();
  return here ? run(call) : start(call, false);
}

Backend::WorkPtr Backend::run(Call& call) {
  with_torch_errors([&] { group().run(call.operation); });
  call.staging.finish();
  return nullptr;
}

Backend::WorkPtr Backend::start(Call& call, bool profiled) {
  if (call.device) return start_on_device(call, profiled);
  auto work = c10::make_intrusive<Work>(surroundings_, call, profiled);
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
  work->follow(group().submit(std::move(call.operation), on_done, std::move(call.sequel)));
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
  RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP(sequence, names, inputs, outputs, rank_, name,
                                        elements(inputs), elements(outputs), type, sent, received,
                                        first, stride, size_, call.async);
#else
  RECORD_PARAM_COMMS_DATA(sequence, names, inputs, outputs, rank_, name, elements(inputs),
                          elements(outputs), type, sent, received, first, stride, size_);
#endif
  return start(call, true);
}

// ---- the calls

Backend::WorkPtr Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  if (!tensors.empty() && tensors[0].is_sparse()) {
    return issue(with(sparse_all_reduce_call(tensors, opts.reduceOp, place()), opts));
  }
  return issue(with(all_reduce_call(tensors, opts.reduceOp), opts));
}

Backend::WorkPtr Backend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return allreduce(tensors, opts);
}

Backend::WorkPtr Backend::allreduce_coalesced(Tensors& tensors,
                                              const c10d::AllreduceCoalescedOptions& opts) {
  return issue(with(all_reduce_coalesced_call(tensors, opts.reduceOp), opts));
}

Backend::WorkPtr Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  return issue(with(broadcast_call(tensors, opts.rootRank, place()), opts));
}

Backend::WorkPtr Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  return issue(with(reduce_call(tensors, opts.reduceOp, opts.rootRank, place()), opts));
}

Backend::WorkPtr Backend::allgather(TensorLists& outputTensors, Tensors& inputTensors,
                                    const c10d::AllgatherOptions& opts) {
  return issue(with(all_gather_call(outputTensors, inputTensors, place()), opts));
}

Backend::WorkPtr Backend::_allgather_base(at::Tensor& outputBuffer, at::Tensor& inputBuffer,
                                          const c10d::AllgatherOptions& opts) {
  const Tensors outputs{outputBuffer}, inputs{inputBuffer};
  return issue(with(all_gather_into_call(outputs, inputs, place()), opts));
}

Backend::WorkPtr Backend::allgather_coalesced(TensorLists& outputTensorLists, Tensors& inputTensors,
                                              const c10d::AllgatherOptions& opts) {
  return issue(with(all_gather_coalesced_call(outputTensorLists, inputTensors, place()), opts));
}

Backend::WorkPtr Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const c10d::AllgatherOptions& opts) {
  return issue(with(all_gather_into_call(outputs, inputs, place()), opts));
}

Backend::WorkPtr Backend::gather(TensorLists& outputTensors, Tensors& inputTensors,
                                 const c10d::GatherOptions& opts) {
  return issue(with(gather_call(outputTensors, inputTensors, opts.rootRank, place()), opts));
}

Backend::WorkPtr Backend::scatter(Tensors& outputTensors, TensorLists& inputTensors,
                                  const c10d::ScatterOptions& opts) {
  return issue(with(scatter_call(outputTensors, inputTensors, opts.rootRank, place()), opts));
}

Backend::WorkPtr Backend::reduce_scatter(Tensors& outputTensors, TensorLists& inputTensors,
                                         const c10d::ReduceScatterOptions& opts) {
  return issue(
      with(reduce_scatter_call(outputTensors, inputTensors, opts.reduceOp, place()), opts));
}

Backend::WorkPtr Backend::_reduce_scatter_base(at::Tensor& outputBuffer, at::Tensor& inputBuffer,
                                               const c10d::ReduceScatterOptions& opts) {
  const Tensors outputs{outputBuffer}, inputs{inputBuffer};
  return issue(with(reduce_scatter_from_call(outputs, inputs, opts.reduceOp, place()), opts));
}

Backend::WorkPtr Backend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const c10d::ReduceScatterOptions& opts) {
  return issue(with(reduce_scatter_from_call(outputs, inputs, opts.reduceOp, place()), opts));
}

Backend::WorkPtr Backend::alltoall_base(at::Tensor& outputBuffer, at::Tensor& inputBuffer,
                                        std::vector<int64_t>& outputSplitSizes,
                                        std::vector<int64_t>& inputSplitSizes,
                                        const c10d::AllToAllOptions& opts) {
  const Splits splits{outputSplitSizes, inputSplitSizes};
  return issue(with(all_to_all_single_call(outputBuffer, inputBuffer, splits, place()), opts));
}

Backend::WorkPtr Backend::alltoall(Tensors& outputTensors, Tensors& inputTensors,
                                   const c10d::AllToAllOptions& opts) {
  return issue(with(all_to_all_call(outputTensors, inputTensors, place()), opts));
}

Backend::WorkPtr Backend::barrier(const c10d::BarrierOptions& opts) {
  Call call = barrier_call();
  if (opts.device && opts.device->is_cuda()) call.device = opts.device;
  if (!call.device && !opts.device_ids.empty()) {  // what torch makes of the former
    call.device = at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(opts.device_ids[0]));
  }
  if (!call.device && !opts.asyncOp) await_device();
  return issue(with(std::move(call), opts));
}

}  // namespace ringcomm
