// The collectives of Backend: c10d's calls as Operations. All wrong arguments are refused here,
// before anything is sent, in the words that users of torch's own backends know.
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include "torch/backend.h"

namespace ringcomm {
namespace {

using c10d::OpType;
using enum Whole;
using enum Shards;

Call&& with(Call&& call, const auto& options) {
  call.async = options.asyncOp;
  call.operation.timeout = options.timeout;
  return std::move(call);
}

std::vector<uint64_t> split_bytes(const Refusal& refuse, const std::vector<int64_t>& splits,
                                  const at::Tensor& tensor, int size) {
  if (tensor.dim() == 0) refuse("a tensor without dimensions has no rows to split");
  for (const int64_t split : splits) {
    if (split < 0) refuse(str("split sizes must not be negative, one is ", split));
  }
  c10d::checkSplitSizes(splits, tensor, size);
  std::vector<uint64_t> bytes(static_cast<size_t>(size)), offsets(bytes.size());
  c10d::computeLengthsAndOffsets(splits, tensor, &bytes, &offsets);
  for (uint64_t& length : bytes) length *= tensor.element_size();
  return bytes;
}

void check_length(const Refusal& refuse, const Tensors& tensors, const char* which, int size) {
  if (tensors.size() == static_cast<size_t>(size)) return;
  refuse(str(which, "tensor list size ", tensors.size(), " does not match world size ", size));
}

// The rest of an all_to_all, whose splits are known.
Call&& exchange_all(Call& call, Rank rank) {
  set_moved_type(call, call.inputs);
  compare(call.operation, call.inputs.slice(0, 1), false);  // as splits, sizes are of two ranks
  add_inputs(call, call.inputs);
  add_outputs(call, call.outputs);
  const Operation& operation = call.operation;
  check_overlaps(call.refuse, operation,
                 {offset_of(operation.send, rank), offset_of(operation.recv, rank),
                  operation.send[static_cast<size_t>(rank)]});
  return std::move(call);
}

// The root's side of gather and scatter, where every rank has a tensor like `model`. Other ranks
// have none.
at::TensorList one_a_rank(Call& call, const TensorLists& lists, const at::Tensor& model,
                          RankAndSize self) {
  const Refusal& refuse = call.refuse;
  const char* const which = call.operation.collective == Collective::kGather ? "output " : "input ";
  if (self.rank != call.operation.root) {
    if (!lists.empty()) refuse(str("requires empty ", which, "on non-root"));
    return {};
  }
  check_length(refuse, only_one(refuse, lists, which), which, self.size);
  const auto all = flatten(call, lists);
  check_all_served(refuse, all);
  check_same_shape(refuse, model, all);
  return all;
}

// `shard` is this rank's own, and `all` has one of each rank, which may differ in size.
void check_shard(const Refusal& refuse, const at::Tensor& shard, at::TensorList all, Rank rank) {
  const auto own = static_cast<size_t>(rank);
  check_served(refuse, shard);
  check_all_served(refuse, all);
  check_same_type(refuse, shard, all);
  if (all[own].numel() != shard.numel()) c10d::assertSizesMatch(refuse, shard.sizes(), all, own);
}

}  // namespace

// ---- one tensor, or several as one

Backend::WorkPtr Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  if (!tensors.empty() && tensors[0].is_sparse()) {
    return issue(with(sparse_all_reduce_call(tensors, opts.reduceOp, rank_and_size()), opts));
  }
  Call call(OpType::ALLREDUCE, Collective::kAllReduce);
  const at::Tensor& tensor = only_one(call.refuse, tensors);
  check_served(call.refuse, tensor);
  set_reduction(call, opts.reduceOp, tensor);
  add_in_place(call, tensors);
  return issue(with(std::move(call), opts));
}

Backend::WorkPtr Backend::allreduce_coalesced(Tensors& tensors,
                                              const c10d::AllreduceCoalescedOptions& opts) {
  Call call(OpType::ALLREDUCE_COALESCED, Collective::kAllReduce, "all_reduce_coalesced");
  c10d::assertNonEmpty(call.refuse, tensors);
  c10d::assertLayoutMatch(call.refuse, tensors);
  check_all_served(call.refuse, tensors);
  for (const at::Tensor& tensor : tensors) {
    if (tensor.scalar_type() != tensors[0].scalar_type()) {
      call.refuse("tensors must all have the same type");
    }
  }
  set_reduction(call, opts.reduceOp, tensors[0]);
  add_in_place(call, tensors);
  check_overlaps(call.refuse, call.operation, {0, 0, call.operation.bytes});
  return issue(with(std::move(call), opts));
}

Backend::WorkPtr Backend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  Call call(OpType::BROADCAST, Collective::kBroadcast);
  call.operation.root = checked_root(call.refuse, opts.rootRank, size(), opts.rootTensor);
  check_served(call.refuse, only_one(call.refuse, tensors));
  set_moved_type(call, tensors);
  add_in_place(call, tensors);
  if (rank() != call.operation.root) call.operation.input.clear();
  return issue(with(std::move(call), opts));
}

Backend::WorkPtr Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  Call call(OpType::REDUCE, Collective::kReduce);
  call.operation.root = checked_root(call.refuse, opts.rootRank, size(), opts.rootTensor);
  const at::Tensor& tensor = only_one(call.refuse, tensors);
  check_served(call.refuse, tensor);
  set_reduction(call, opts.reduceOp, tensor);
  add_in_place(call, tensors);
  if (rank() != call.operation.root) call.operation.output.clear();
  return issue(with(std::move(call), opts));
}

// ---- gathering

// Outputs may differ in size from rank to rank.
Backend::WorkPtr Backend::allgather(TensorLists& outputs, Tensors& inputs,
                                    const c10d::AllgatherOptions& opts) {
  Call call(OpType::ALLGATHER, Collective::kAllGather);
  const at::Tensor& input = only_one(call.refuse, inputs, "input ");
  check_length(call.refuse, only_one(call.refuse, outputs, "output "), "output ", size());
  call.outputs = flatten(call, outputs);
  call.inputs = inputs;
  check_shard(call.refuse, input, call.outputs, rank());
  return issue(with(fill_shards(call, kOutput, kOneEach, rank_and_size()), opts));
}

// outputs[rank][i] gets inputs[i] of that rank.
Backend::WorkPtr Backend::allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& opts) {
  Call call(OpType::ALLGATHER_COALESCED, Collective::kAllGather, "all_gather_coalesced");
  c10d::assertNonEmpty(call.refuse, inputs);
  if (outputs.size() != static_cast<size_t>(size())) {
    call.refuse("output lists should be equal to world size");
  }
  check_all_served(call.refuse, inputs);
  for (const Tensors& list : outputs) {
    if (list.size() != inputs.size()) {
      call.refuse(
          str("invalid output size: (expected length ", inputs.size(), ", got ", list.size(), ")"));
    }
    check_all_served(call.refuse, list);
    for (size_t i = 0; i < inputs.size(); ++i) {
      c10d::assertTypeMatch(call.refuse, inputs[i].options(), list, i);
      c10d::assertSizesMatch(call.refuse, inputs[i].sizes(), list, i);
    }
  }
  call.outputs = flatten(call, outputs);
  call.inputs = inputs;
  return issue(with(fill_shards(call, kOutput, kEqual, rank_and_size()), opts));
}

// outputs[i] holds inputs[i] of every rank, one after the other.
Backend::WorkPtr Backend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const c10d::AllgatherOptions& opts) {
  Call call(OpType::_ALLGATHER_BASE, Collective::kAllGather, "all_gather_into_tensor");
  check_wholes(call.refuse, outputs, inputs, size());
  call.outputs = outputs;
  call.inputs = inputs;
  return issue(with(fill_shards(call, kOutput, kWithin, rank_and_size()), opts));
}

Backend::WorkPtr Backend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::AllgatherOptions& opts) {
  Tensors outputs{output}, inputs{input};
  return allgather_into_tensor_coalesced(outputs, inputs, opts);
}

Backend::WorkPtr Backend::gather(TensorLists& outputs, Tensors& inputs,
                                 const c10d::GatherOptions& opts) {
  Call call(OpType::GATHER, Collective::kGather);
  call.operation.root = checked_root(call.refuse, opts.rootRank, size());
  const at::Tensor& input = only_one(call.refuse, inputs, "input ");
  check_served(call.refuse, input);
  call.outputs = one_a_rank(call, outputs, input, rank_and_size());
  call.inputs = inputs;
  return issue(with(fill_shards(call, kOutput, kEqual, rank_and_size()), opts));
}

// The output, at the root, holds the input of every rank, one after the other. torch calls it from
// 2.14 on.
Backend::WorkPtr Backend::gather_single(at::Tensor& output, at::Tensor& input,
                                        const c10d::GatherOptions& opts) {
  Call call(OpType::GATHER, Collective::kGather, "gather_single");
  call.operation.root = checked_root(call.refuse, opts.rootRank, size());
  call.lists = {input, output};
  const at::TensorList both(call.lists);
  call.inputs = both.slice(0, 1);
  check_all_served(call.refuse, call.inputs);
  if (rank() == call.operation.root) {
    check_wholes(call.refuse, {output}, {input}, size());
    call.outputs = both.slice(1, 1);
  }
  return issue(with(fill_shards(call, kOutput, kWithin, rank_and_size()), opts));
}

// ---- scattering

Backend::WorkPtr Backend::scatter(Tensors& outputs, TensorLists& inputs,
                                  const c10d::ScatterOptions& opts) {
  Call call(OpType::SCATTER, Collective::kScatter);
  call.operation.root = checked_root(call.refuse, opts.rootRank, size());
  const at::Tensor& output = only_one(call.refuse, outputs, "output ");
  check_served(call.refuse, output);
  call.inputs = one_a_rank(call, inputs, output, rank_and_size());
  call.outputs = outputs;
  return issue(with(fill_shards(call, kInput, kEqual, rank_and_size()), opts));
}

Backend::WorkPtr Backend::reduce_scatter(Tensors& outputs, TensorLists& inputs,
                                         const c10d::ReduceScatterOptions& opts) {
  Call call(OpType::REDUCE_SCATTER, Collective::kReduceScatter);
  const at::Tensor& output = only_one(call.refuse, outputs, "output ");
  check_length(call.refuse, only_one(call.refuse, inputs, "input "), "input ", size());
  call.inputs = flatten(call, inputs);
  call.outputs = outputs;
  check_shard(call.refuse, output, call.inputs, rank());
  set_reduction(call, opts.reduceOp, output);
  return issue(with(fill_shards(call, kInput, kOneEach, rank_and_size()), opts));
}

// inputs[i] holds what every rank's outputs[i] gets, one after the other.
Backend::WorkPtr Backend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                          const c10d::ReduceScatterOptions& opts) {
  Call call(OpType::_REDUCE_SCATTER_BASE, Collective::kReduceScatter, "reduce_scatter_tensor");
  check_wholes(call.refuse, inputs, outputs, size());
  check_same_type(call.refuse, outputs[0], outputs);
  call.inputs = inputs;
  call.outputs = outputs;
  set_reduction(call, opts.reduceOp, outputs[0]);
  return issue(with(fill_shards(call, kInput, kWithin, rank_and_size()), opts));
}

Backend::WorkPtr Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                               const c10d::ReduceScatterOptions& opts) {
  Tensors outputs{output}, inputs{input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, opts);
}

// ---- all to all

// Split sizes are rows of dimension 0 a rank, in equal parts where a list is empty.
Backend::WorkPtr Backend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                        std::vector<int64_t>& outputSplitSizes,
                                        std::vector<int64_t>& inputSplitSizes,
                                        const c10d::AllToAllOptions& opts) {
  Call call(OpType::ALLTOALL_BASE, Collective::kAllToAll, "all_to_all_single");
  call.lists = {input, output};
  call.inputs = at::TensorList(call.lists).slice(0, 1);
  call.outputs = at::TensorList(call.lists).slice(1, 1);
  check_all_served(call.refuse, call.lists);
  if (input.scalar_type() != output.scalar_type()) {
    call.refuse("output tensor type must match input tensor type");
  }
  call.operation.send = split_bytes(call.refuse, inputSplitSizes, input, size());
  call.operation.recv = split_bytes(call.refuse, outputSplitSizes, output, size());
  return issue(with(exchange_all(call, rank()), opts));
}

Backend::WorkPtr Backend::alltoall(Tensors& outputs, Tensors& inputs,
                                   const c10d::AllToAllOptions& opts) {
  Call call(OpType::ALLTOALL, Collective::kAllToAll);
  check_length(call.refuse, inputs, "input ", size());
  check_length(call.refuse, outputs, "output ", size());
  check_all_served(call.refuse, inputs);
  check_all_served(call.refuse, outputs);
  check_same_type(call.refuse, inputs[0], inputs);
  check_same_type(call.refuse, inputs[0], outputs);
  call.inputs = inputs;
  call.outputs = outputs;
  call.operation.send = sizes_of(inputs);
  call.operation.recv = sizes_of(outputs);
  return issue(with(exchange_all(call, rank()), opts));
}

}  // namespace ringcomm
