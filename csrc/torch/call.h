// One of c10d's calls as an Operation.
#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "comm/communicator.h"
#include "torch/tensors.h"

namespace ringcomm {

using Tensors = std::vector<at::Tensor>;
using TensorLists = std::vector<Tensors>;

// The rank that calls, and the size of its group.
struct RankAndSize {
  Rank rank;
  int size;
};

// One call. `inputs` and `outputs` are the caller's own lists where there is one of them, else they
// are kept in `lists`. For a send or receive only the operation's spans, type and timeout count.
struct Call {
  // `refused_as`: its name in refusals, where that is not the operation's.
  Call(c10d::OpType type, const char* title, Collective collective = Collective::kBarrier,
       const char* refused_as = nullptr)
      : type(type), title(title), refuse{refused_as != nullptr ? refused_as : name()} {
    operation.collective = collective;
  }
  Call(Call&&) = default;  // no copies: inputs and outputs may point into `lists`
  const char* name() const { return title + sizeof("ringcomm:") - 1; }  // "all_reduce"

  c10d::OpType type;
  const char* title;  // in profiles: "ringcomm:all_reduce"
  Refusal refuse;
  bool async = true;
  Operation operation;
  std::optional<Rank> peer;          // of a send or receive
  std::optional<at::Device> device;  // where there are no tensors: of a barrier
  uint32_t tag = 0;
  Continuation continuation;
  Staging staging;
  at::TensorList inputs, outputs;
  Tensors lists;
};

// What ends the event of a call in profiles; so does the destruction of its last copy.
using EventEnd = std::function<void()>;
EventEnd open_event(const Call& call, const std::string& algorithm);

// all_reduce of a tensor in COO format: as many elements as each rank has (sparse.cc).
Call sparse_all_reduce_call(const Tensors& tensors, const c10d::ReduceOp& op, RankAndSize self);

}  // namespace ringcomm
