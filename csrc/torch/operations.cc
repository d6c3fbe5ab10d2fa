#include "torch/operations.h"

#include <torch/csrc/distributed/c10d/Utils.hpp>

#include "comm/mailbox.h"
#include "torch/call_parts.h"

namespace ringcomm {
namespace {

using c10d::OpType;

std::vector<uint64_t> split_bytes(const Refusal& refuse, const std::vector<int64_t>& splits,
                                  const at::Tensor& tensor, Place place) {
  if (tensor.dim() == 0) refuse("a tensor without dimensions has no rows to split");
  for (const int64_t split : splits) {
    if (split < 0) refuse(str("split sizes must not be negative, one is ", split));
  }
  c10d::checkSplitSizes(splits, tensor, place.size);
  std::vector<uint64_t> bytes(static_cast<size_t>(place.size)), offsets(bytes.size());
  c10d::computeLengthsAndOffsets(splits, tensor, &bytes, &offsets);
  for (uint64_t& length : bytes) length *= tensor.element_size();
  return bytes;
}

void check_length(const Refusal& refuse, const Tensors& tensors, const char* which, Place place) {
  if (tensors.size() == static_cast<size_t>(place.size)) return;
  refuse(
      str(which, " tensor list size ", tensors.size(), " does not match world size ", place.size));
}

void check_own_block(const Refusal& refuse, const Operation& operation, Rank rank) {
  Shared own{0, 0, operation.send[static_cast<size_t>(rank)]};
  for (size_t other = 0; other < static_cast<size_t>(rank); ++other) {
    own.input += operation.send[other];
    own.output += operation.recv[other];
  }
  check_overlaps(refuse, operation, own);
}

// The root's side of gather and scatter.
void check_one_a_rank(const Refusal& refuse, const TensorLists& lists, const char* which,
                      Place place) {
  if (lists.size() != 1) {
    refuse(str("requires a single-element ", which, " list containing a list with ", place.size,
               " tensors."));
  }
  if (lists[0].size() == static_cast<size_t>(place.size)) return;
  refuse(str("Incorrect ", which, " list size ", lists[0].size(), ". ",
             which[0] == 'o' ? "Output" : "Input", " list size should be ", place.size,
             ", same as size of the process group."));
}

uint32_t checked_tag(const Refusal& refuse, int tag) {
  if (tag < 0) refuse("Tag must be nonnegative");
  return static_cast<uint32_t>(tag);
}

void fill_message(Call& call, const Refusal& refuse, const Tensors& tensors, Place place) {
  if (tensors.size() != 1) refuse("takes a single tensor");
  check_served(refuse, tensors[0]);
  if (*call.peer >= place.size) refuse(str("invalid rank: ", *call.peer));
  if (*call.peer == place.rank) refuse(str("rank ", place.rank, " cannot be its own peer"));
  set_moved_type(call, tensors);
}

}  // namespace

// ---- one tensor, or several as one

Call all_reduce_call(const Tensors& tensors, const c10d::ReduceOp& op) {
  constexpr Refusal refuse{"all_reduce"};
  Call call(OpType::ALLREDUCE, "ringcomm:all_reduce", Collective::kAllReduce);
  const at::Tensor& tensor = only_one(refuse, tensors);
  check_served(refuse, tensor);
  set_reduction(call, refuse, op, tensor);
  add_in_place(call, tensors);
  return call;
}

Call all_reduce_coalesced_call(const Tensors& tensors, const c10d::ReduceOp& op) {
  constexpr Refusal refuse{"all_reduce_coalesced"};
  Call call(OpType::ALLREDUCE_COALESCED, "ringcomm:all_reduce", Collective::kAllReduce);
  c10d::assertNonEmpty(refuse, tensors);
  check_all_served(refuse, tensors);
  check_same_type(refuse, tensors[0], tensors);
  set_reduction(call, refuse, op, tensors[0]);
  add_in_place(call, tensors);
  check_overlaps(refuse, call.operation, {0, 0, bytes_of(call.operation.input)});
  return call;
}

Call broadcast_call(const Tensors& tensors, int64_t root, Place place) {
  constexpr Refusal refuse{"broadcast"};
  Call call(OpType::BROADCAST, "ringcomm:broadcast", Collective::kBroadcast);
  call.operation.root = checked_root(refuse, root, place);
  const at::Tensor& tensor = only_one(refuse, tensors);
  check_served(refuse, tensor);
  set_moved_type(call, tensors);
  add_in_place(call, tensors);
  if (place.rank != call.operation.root) call.operation.input.clear();
  return call;
}

Call reduce_call(const Tensors& tensors, const c10d::ReduceOp& op, int64_t root, Place place) {
  constexpr Refusal refuse{"reduce"};
  Call call(OpType::REDUCE, "ringcomm:reduce", Collective::kReduce);
  call.operation.root = checked_root(refuse, root, place);
  const at::Tensor& tensor = only_one(refuse, tensors);
  check_served(refuse, tensor);
  set_reduction(call, refuse, op, tensor);
  add_in_place(call, tensors);
  if (place.rank != call.operation.root) call.operation.output.clear();
  return call;
}

// ---- gathering

Call all_gather_call(const TensorLists& outputs, const Tensors& inputs, Place place) {
  constexpr Refusal refuse{"all_gather"};
  Call call(OpType::ALLGATHER, "ringcomm:all_gather", Collective::kAllGather);
  const at::Tensor& input = only_one(refuse, inputs);
  if (outputs.size() != 1) refuse("requires a single-element output tensor list");
  if (outputs[0].size() != static_cast<size_t>(place.size)) {
    refuse(str("invalid output tensor list at index 0 (expected length ", place.size, ", got ",
               outputs[0].size(), ")"));
  }
  call.outputs = flatten(call, outputs);
  call.inputs = inputs;
  check_served(refuse, input);
  check_all_served(refuse, call.outputs);
  check_same_type(refuse, input, call.outputs);
  const at::Tensor& own = call.outputs[static_cast<size_t>(place.rank)];
  if (own.numel() != input.numel()) {
    c10d::assertSizesMatch(refuse, input.sizes(), call.outputs, static_cast<size_t>(place.rank));
  }
  set_moved_type(call, inputs);
  call.operation.shards = sizes_of(call.outputs);
  add_inputs(call, inputs);
  add_outputs(call, call.outputs);
  check_shard_overlaps(refuse, call.operation, Whole::kOutput, place.rank);
  return call;
}

Call all_gather_coalesced_call(const TensorLists& outputs, const Tensors& inputs, Place place) {
  constexpr Refusal refuse{"all_gather_coalesced"};
  Call call(OpType::ALLGATHER_COALESCED, "ringcomm:all_gather", Collective::kAllGather);
  c10d::assertNonEmpty(refuse, inputs);
  if (outputs.size() != static_cast<size_t>(place.size)) {
    refuse("output lists should be equal to world size");
  }
  check_all_served(refuse, inputs);
  for (const Tensors& list : outputs) {
    if (list.size() != inputs.size()) {
      refuse(
          str("invalid output size: (expected length ", inputs.size(), ", got ", list.size(), ")"));
    }
    check_all_served(refuse, list);
    for (size_t i = 0; i < inputs.size(); ++i) {
      c10d::assertTypeMatch(refuse, inputs[i].options(), list, i);
      c10d::assertSizesMatch(refuse, inputs[i].sizes(), list, i);
    }
  }
  call.outputs = flatten(call, outputs);
  call.inputs = inputs;
  set_moved_type(call, inputs);
  add_inputs(call, inputs);
  add_outputs(call, call.outputs);
  call.operation.shards.assign(static_cast<size_t>(place.size), bytes_of(call.operation.input));
  check_shard_overlaps(refuse, call.operation, Whole::kOutput, place.rank);
  return call;
}

Call all_gather_into_call(const Tensors& outputs, const Tensors& inputs, Place place) {
  constexpr Refusal refuse{"all_gather_into_tensor"};
  Call call(OpType::_ALLGATHER_BASE, "ringcomm:all_gather", Collective::kAllGather);
  check_wholes(refuse, outputs, inputs, place);
  call.outputs = outputs;
  call.inputs = inputs;
  set_moved_type(call, inputs);
  add_inputs(call, inputs);
  add_outputs(call, outputs);
  if (outputs.size() > 1) {
    call.operation.output = by_rank(call.operation.output, place.size);
  }
  call.operation.shards.assign(static_cast<size_t>(place.size), bytes_of(call.operation.input));
  check_shard_overlaps(refuse, call.operation, Whole::kOutput, place.rank);
  return call;
}

Call gather_call(const TensorLists& outputs, const Tensors& inputs, int64_t root, Place place) {
  constexpr Refusal refuse{"gather"};
  Call call(OpType::GATHER, "ringcomm:gather", Collective::kGather);
  call.operation.root = checked_root(refuse, root, place);
  const at::Tensor& input = only_one(refuse, inputs);
  check_served(refuse, input);
  if (place.rank == root) {
    check_one_a_rank(refuse, outputs, "output", place);
    call.outputs = flatten(call, outputs);
    check_all_served(refuse, call.outputs);
    check_same_shape(refuse, input, call.outputs);
  } else if (!outputs.empty()) {
    refuse("requires empty output on non-root");
  }
  call.inputs = inputs;
  set_moved_type(call, inputs);
  add_inputs(call, inputs);
  add_outputs(call, call.outputs);
  call.operation.shards.assign(static_cast<size_t>(place.size), bytes_of(input));
  check_shard_overlaps(refuse, call.operation, Whole::kOutput, place.rank);
  return call;
}

// ---- scattering

Call scatter_call(const Tensors& outputs, const TensorLists& inputs, int64_t root, Place place) {
  constexpr Refusal refuse{"scatter"};
  Call call(OpType::SCATTER, "ringcomm:scatter", Collective::kScatter);
  call.operation.root = checked_root(refuse, root, place);
  const at::Tensor& output = only_one(refuse, outputs);
  check_served(refuse, output);
  if (place.rank == root) {
    check_one_a_rank(refuse, inputs, "input", place);
    call.inputs = flatten(call, inputs);
    check_all_served(refuse, call.inputs);
    check_same_shape(refuse, output, call.inputs);
  } else if (!inputs.empty()) {
    refuse("requires empty input on non-root");
  }
  call.outputs = outputs;
  set_moved_type(call, outputs);
  add_inputs(call, call.inputs);
  add_outputs(call, outputs);
  call.operation.shards.assign(static_cast<size_t>(place.size), bytes_of(output));
  check_shard_overlaps(refuse, call.operation, Whole::kInput, place.rank);
  return call;
}

Call reduce_scatter_call(const Tensors& outputs, const TensorLists& inputs,
                         const c10d::ReduceOp& op, Place place) {
  constexpr Refusal refuse{"reduce_scatter"};
  Call call(OpType::REDUCE_SCATTER, "ringcomm:reduce_scatter", Collective::kReduceScatter);
  const at::Tensor& output = only_one(refuse, outputs);
  if (inputs.size() != 1) refuse("requires a single-element input tensor list");
  if (inputs[0].size() != static_cast<size_t>(place.size)) {
    refuse("invalid input tensor list size, must be world size");
  }
  call.inputs = flatten(call, inputs);
  call.outputs = outputs;
  check_served(refuse, output);
  check_all_served(refuse, call.inputs);
  check_same_type(refuse, output, call.inputs);
  const at::Tensor& own = call.inputs[static_cast<size_t>(place.rank)];
  if (own.numel() != output.numel()) {
    c10d::assertSizesMatch(refuse, output.sizes(), call.inputs, static_cast<size_t>(place.rank));
  }
  set_reduction(call, refuse, op, output);
  call.operation.shards = sizes_of(call.inputs);
  add_inputs(call, call.inputs);
  add_outputs(call, outputs);
  check_shard_overlaps(refuse, call.operation, Whole::kInput, place.rank);
  return call;
}

Call reduce_scatter_from_call(const Tensors& outputs, const Tensors& inputs,
                              const c10d::ReduceOp& op, Place place) {
  constexpr Refusal refuse{"reduce_scatter_tensor"};
  Call call(OpType::_REDUCE_SCATTER_BASE, "ringcomm:reduce_scatter", Collective::kReduceScatter);
  check_wholes(refuse, inputs, outputs, place);
  check_same_type(refuse, outputs[0], outputs);
  call.inputs = inputs;
  call.outputs = outputs;
  set_reduction(call, refuse, op, outputs[0]);
  add_inputs(call, inputs);
  add_outputs(call, outputs);
  if (inputs.size() > 1) call.operation.input = by_rank(call.operation.input, place.size);
  call.operation.shards.assign(static_cast<size_t>(place.size), bytes_of(call.operation.output));
  check_shard_overlaps(refuse, call.operation, Whole::kInput, place.rank);
  return call;
}

// ---- all to all

Call all_to_all_single_call(const at::Tensor& output, const at::Tensor& input, const Splits& splits,
                            Place place) {
  constexpr Refusal refuse{"all_to_all_single"};
  Call call(OpType::ALLTOALL_BASE, "ringcomm:all_to_all", Collective::kAllToAll);
  call.lists = {input, output};
  call.inputs = at::ArrayRef<at::Tensor>(call.lists).slice(0, 1);
  call.outputs = at::ArrayRef<at::Tensor>(call.lists).slice(1, 1);
  check_all_served(refuse, call.lists);
  if (input.scalar_type() != output.scalar_type()) {
    refuse("output tensor type must match input tensor type");
  }
  call.operation.send = split_bytes(refuse, splits.input, input, place);
  call.operation.recv = split_bytes(refuse, splits.output, output, place);
  set_moved_type(call, call.inputs);
  add_inputs(call, call.inputs);
  add_outputs(call, call.outputs);
  check_own_block(refuse, call.operation, place.rank);
  return call;
}

Call all_to_all_call(const Tensors& outputs, const Tensors& inputs, Place place) {
  constexpr Refusal refuse{"all_to_all"};
  Call call(OpType::ALLTOALL, "ringcomm:all_to_all", Collective::kAllToAll);
  check_length(refuse, inputs, "input", place);
  check_length(refuse, outputs, "output", place);
  check_all_served(refuse, inputs);
  check_all_served(refuse, outputs);
  check_same_type(refuse, inputs[0], inputs);
  check_same_type(refuse, inputs[0], outputs);
  call.inputs = inputs;
  call.outputs = outputs;
  call.operation.send = sizes_of(inputs);
  call.operation.recv = sizes_of(outputs);
  set_moved_type(call, inputs);
  add_inputs(call, inputs);
  add_outputs(call, outputs);
  check_own_block(refuse, call.operation, place.rank);
  return call;
}

Call barrier_call() { return Call(OpType::BARRIER, "ringcomm:barrier", Collective::kBarrier); }

// ---- one to one

Call send_call(const Tensors& tensors, Rank peer, int tag, Place place) {
  constexpr Refusal refuse{"send"};
  Call call(OpType::SEND, "ringcomm:send");
  if (peer < 0) refuse(str("invalid rank: ", peer));
  call.peer = peer;
  call.tag = checked_tag(refuse, tag);
  fill_message(call, refuse, tensors, place);
  call.inputs = tensors;
  add_inputs(call, tensors);
  return call;
}

Call recv_call(const Tensors& tensors, Rank peer, int tag, Place place) {
  constexpr Refusal refuse{"recv"};
  const bool any = peer == Message::kAnySource;
  Call call(any ? OpType::RECVANYSOURCE : OpType::RECV,
            any ? "ringcomm:recvAnySource" : "ringcomm:recv");
  call.peer = peer;
  call.tag = checked_tag(refuse, tag);
  fill_message(call, refuse, tensors, place);
  call.inputs = call.outputs = tensors;  // torch's profiles show what a receive gets as its input
  add_outputs(call, tensors);
  return call;
}

}  // namespace ringcomm
