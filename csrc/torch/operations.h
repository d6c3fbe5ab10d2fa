// c10d's calls as Operations: everything that can be wrong with the arguments is refused here, before
// anything is sent, in the words that users of torch's own backends know.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <vector>

#include "comm/operation.h"
#include "torch/tensors.h"

namespace ringcomm {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

// Who asks: builders need no more of a backend.
struct Place {
  Rank rank;
  int size;
};

// One call of a collective. `inputs` and `outputs` are the caller's own lists where there is one
// of them, else they are kept in `lists`.
struct Call {
  Call(c10d::OpType type, const char* title, Collective collective) : type(type), title(title) {
    operation.collective = collective;
  }
  Call(Call&&) = default;
  Call& operator=(Call&&) = delete;
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  ~Call() = default;

  c10d::OpType type;
  const char* title;  // in profiles: "ringcomm:all_reduce"
  bool async = true;
  Operation operation;
  Staging staging;
  at::ArrayRef<at::Tensor> inputs, outputs;
  Tensors lists;
};

Call all_reduce_call(const Tensors& tensors, const c10d::AllreduceOptions& options);
Call all_reduce_coalesced_call(const Tensors& tensors,
                               const c10d::AllreduceCoalescedOptions& options);
Call broadcast_call(const Tensors& tensors, const c10d::BroadcastOptions& options, Place place);
Call reduce_call(const Tensors& tensors, const c10d::ReduceOptions& options, Place place);

// Outputs may differ in size from rank to rank.
Call all_gather_call(const TensorLists& outputs, const Tensors& inputs, Place place);
// outputs[rank][i] gets inputs[i] of that rank.
Call all_gather_coalesced_call(const TensorLists& outputs, const Tensors& inputs, Place place);
// outputs[i] holds inputs[i] of every rank, one after the other.
Call all_gather_into_call(const Tensors& outputs, const Tensors& inputs, Place place);
Call gather_call(const TensorLists& outputs, const Tensors& inputs, Rank root, Place place);

Call scatter_call(const Tensors& outputs, const TensorLists& inputs, Rank root, Place place);
Call reduce_scatter_call(const Tensors& outputs, const TensorLists& inputs,
                         const c10d::ReduceOp& op, Place place);
// inputs[i] holds what every rank's outputs[i] gets, one after the other.
Call reduce_scatter_from_call(const Tensors& outputs, const Tensors& inputs,
                              const c10d::ReduceOp& op, Place place);

// Rows of dimension 0 a rank, in equal parts where a list is empty.
struct Splits {
  const std::vector<int64_t>& output;
  const std::vector<int64_t>& input;
};
Call all_to_all_single_call(const at::Tensor& output, const at::Tensor& input,
                            const Splits& splits, Place place);
Call all_to_all_call(const Tensors& outputs, const Tensors& inputs, Place place);

Call barrier_call();

}  // namespace ringcomm
