// One of c10d's calls as an Operation, and the parts that make it: they check arguments, and fill
// the Operation in.
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

struct BackendState;

// One call. `inputs` and `outputs` are the caller's own lists where there is one of them, else they
// are kept in `lists`. For a send or receive only the operation's spans, type and timeout count.
struct Call {
  // `refused_as`: its name in refusals, where that is not the operation's.
  Call(c10d::OpType type, Collective collective, const char* refused_as = nullptr)
      : type(type), name(to_string(collective)), refuse{refused_as ? refused_as : name} {
    operation.collective = collective;
  }
  Call(Call&&) = default;  // no copies: inputs and outputs may point into `lists`

  c10d::OpType type;
  const char* name;  // in profiles
  Refusal refuse;
  bool async = true;
  std::shared_ptr<BackendState> life;  // in which it begins and ends: see Backend::issue()
  Operation operation;
  std::optional<Rank> peer;          // the other side of a send or receive
  std::optional<at::Device> device;  // see find_device(); a barrier, without tensors, may name one
  uint32_t tag = 0;
  std::optional<uint64_t> into;  // a put: see Message
  Continuation continuation;
  Staging staging;
  at::TensorList inputs, outputs;
  Tensors lists;
};

// Ends the event of a call in profiles; so does the destruction of its last copy.
using EventEnd = std::function<void()>;
EventEnd open_event(const Call& call, const std::string& algorithm);

// Makes the all_reduce of a tensor in COO format: as many elements as each rank has (sparse.cc).
Call sparse_all_reduce_call(const Tensors& tensors, const c10d::ReduceOp& op, RankAndSize self);

// ---- parts (call_parts.cc)

// `which`: "input " or "output " where a call has both.
template <typename T>
const T& only_one(const Refusal& refuse, const std::vector<T>& list, const char* which = "") {
  if (list.size() == 1) return list[0];
  refuse(str("requires a single-element ", which, "tensor list, this one has ", list.size(),
             list.empty() ? "" : ": make a call for each, or a coalesced one"));
}
// `tensor`: which of the root's list, where the call has such a choice.
Rank checked_root(const Refusal& refuse, int64_t root, int size, int64_t tensor = 0);
void check_all_served(const Refusal& refuse, at::TensorList tensors);
void check_same_type(const Refusal& refuse, const at::Tensor& model, at::TensorList tensors);
void check_same_shape(const Refusal& refuse, const at::Tensor& model, at::TensorList tensors);
// Refuses wholes[i] unless it has as many elements as all ranks' parts[i] together.
void check_wholes(const Refusal& refuse, const Tensors& wholes, const Tensors& parts, int size);

void set_reduction(Call& call, const c10d::ReduceOp& op, const at::Tensor& tensor);
// Hashes all that every rank must pass alike and no other field of the operation tells: the sizes
// and types of several tensors, types that are only moved, and the layout of tensors that are used
// in place. So there is no call whose ranks can disagree without being told.
void compare(Operation& operation, at::TensorList tensors, bool in_place);
// Sets the type to that of the tensors if all agree, else to bytes.
void set_moved_type(Call& call, at::TensorList tensors);

// This rank's own part, in which input and output may be the same memory, byte by byte.
struct Shared {
  uint64_t input, output, bytes;
};
// Refuses outputs that share memory, with one another or with an input elsewhere than in `own`.
void check_overlaps(const Refusal& refuse, const Operation& operation, const Shared& own);

// Returns all lists one after the other, kept by the call.
at::TensorList flatten(Call& call, const TensorLists& lists);
void add_in_place(Call& call, const Tensors& tensors);
void add_inputs(Call& call, at::TensorList tensors);
void add_outputs(Call& call, at::TensorList tensors);

// Completes all calls with shards, once inputs and outputs are known, and the reduction if there is
// one. Returns the call. `whole` is the side that holds all shards. They lie in a tensor for each
// rank, of its own size or all of the same; or within one tensor, or several.
enum class Whole : uint8_t { kInput, kOutput };
enum class Shards : uint8_t { kOneEach, kEqual, kWithin };
Call&& fill_shards(Call& call, Whole whole, Shards shards, RankAndSize self);
std::vector<uint64_t> sizes_of(at::TensorList tensors);
// Returns the part of a send or receive that messages on the CPU and on a device have in common.
MessageKind kind_of(const Call& call);
Span memory_of(const Call& call);

}  // namespace ringcomm
