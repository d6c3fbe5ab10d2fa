// The parts of calls (collectives.cc): they check arguments, and fill in an Operation.
#pragma once

#include "torch/call.h"

namespace ringcomm {

// `which`: "input " or "output " where a call has both.
template <typename T>
const T& only_one(const Refusal& refuse, const std::vector<T>& list, const char* which = "") {
  if (list.size() == 1) return list[0];
  refuse(str("requires a single-element ", which, "tensor list, this one has ", list.size(),
             ": make a call for each, or a coalesced one"));
}
Rank checked_root(const Refusal& refuse, int64_t root, int size);
void check_all_served(const Refusal& refuse, at::TensorList tensors);
void check_same_type(const Refusal& refuse, const at::Tensor& model, at::TensorList tensors);
void check_same_shape(const Refusal& refuse, const at::Tensor& model, at::TensorList tensors);
// wholes[i] must have as many elements as all ranks' parts[i] together.
void check_wholes(const Refusal& refuse, const Tensors& wholes, const Tensors& parts, int size);

void set_reduction(Call& call, const c10d::ReduceOp& op, const at::Tensor& tensor);
// The type is that of the tensors if all agree, else bytes.
void set_moved_type(Call& call, at::TensorList tensors);

// This rank's own part, in which input and output may be the same memory, byte by byte.
struct Shared {
  uint64_t input, output, bytes;
};
// Refuses outputs that share memory, with one another or with an input elsewhere than in `own`.
void check_overlaps(const Refusal& refuse, const Operation& operation, const Shared& own);

// All lists one after the other, kept by the call.
at::TensorList flatten(Call& call, const TensorLists& lists);
void add_in_place(Call& call, const Tensors& tensors);
void add_inputs(Call& call, at::TensorList tensors);
void add_outputs(Call& call, at::TensorList tensors);

// The end of all calls with shards, once inputs and outputs are known, and the reduction if there
// is one; returns the call. `whole` is the side that holds all shards: in a tensor each, of its own
// size or all of one; or within one tensor, or several.
enum class Whole : uint8_t { kInput, kOutput };
enum class Shards : uint8_t { kOneEach, kEqual, kWithin };
Call&& fill_shards(Call& call, Whole whole, Shards shards, RankAndSize self);
std::vector<uint64_t> sizes_of(at::TensorList tensors);

}  // namespace ringcomm
