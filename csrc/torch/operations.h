// c10d's calls as Operations: everything that can be wrong with the arguments is refused here,
// before anything is sent, in the words that users of torch's own backends know.
#pragma once

#include <optional>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <vector>

#include "comm/communicator.h"
#include "torch/tensors.h"

namespace ringcomm {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

// Who asks: builders need no more of a backend.
struct Place {
  Rank rank;
  int size;
};

// One call. `inputs` and `outputs` are the caller's own lists where there is one of them, else they
// are kept in `lists`. Of a send or receive's operation only spans, type and timeout count.
struct Call {
  Call(c10d::OpType type, const char* title, Collective collective = Collective::kBarrier)
      : type(type), title(title) {
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
  std::optional<Rank> peer;          // of a send or receive
  std::optional<at::Device> device;  // where there are no tensors: of a barrier
  uint32_t tag = 0;
  Sequel sequel;
  Staging staging;
  at::ArrayRef<at::Tensor> inputs, outputs;
  Tensors lists;
};

Call all_reduce_call(const Tensors& tensors, const c10d::ReduceOp& op);
// A tensor in COO format: as many elements as each rank has (sparse.cc).
Call sparse_all_reduce_call(const Tensors& tensors, const c10d::ReduceOp& op, Place place);
Call all_reduce_coalesced_call(const Tensors& tensors, const c10d::ReduceOp& op);
Call broadcast_call(const Tensors& tensors, int64_t root, Place place);
Call reduce_call(const Tensors& tensors, const c10d::ReduceOp& op, int64_t root, Place place);

// Outputs may differ in size from rank to rank.
Call all_gather_call(const TensorLists& outputs, const Tensors& inputs, Place place);
// outputs[rank][i] gets inputs[i] of that rank.
Call all_gather_coalesced_call(const TensorLists& outputs, const Tensors& inputs, Place place);
// outputs[i] holds inputs[i] of every rank, one after the other.
Call all_gather_into_call(const Tensors& outputs, const Tensors& inputs, Place place);
Call gather_call(const TensorLists& outputs, const Tensors& inputs, int64_t root, Place place);

Call scatter_call(const Tensors& outputs, const TensorLists& inputs, int64_t root, Place place);
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
Call all_to_all_single_call(const at::Tensor& output, const at::Tensor& input, const Splits& splits,
                            Place place);
Call all_to_all_call(const Tensors& outputs, const Tensors& inputs, Place place);

Call barrier_call();

// `peer` is Message::kAnySource for a receive from whoever sends first.
Call send_call(const Tensors& tensors, Rank peer, int tag, Place place);
Call recv_call(const Tensors& tensors, Rank peer, int tag, Place place);

}  // namespace ringcomm
