// Common parts of the tests of the device kernels.
#pragma once

#include <functional>

#include "cuda/launch.h"
#include "meetings_group.h"

namespace ringcomm::testing {

using model::Inputs;
using model::Placed;

inline Bytes reduced(const Reduction& what, const std::vector<Bytes>& inputs) {
  Bytes out(inputs[0].size());
  std::byte* const dst = out.data();
  std::vector<const std::byte*> srcs;
  for (const Bytes& input : inputs) srcs.push_back(input.data());
  reduce(what, true, {&dst, 1}, srcs, out.size() / size_of(what.dtype));
  return out;
}

inline void require_same(const Bytes& got, const Bytes& wanted, const std::string& what) {
  if (got == wanted) return;
  const auto at = std::mismatch(got.begin(), got.end(), wanted.begin()).first - got.begin();
  throw Failure(str(what, ": differs at byte ", at, " of ", got.size()));
}

struct Pair {
  DType dtype;
  ReduceOp op;
};

inline std::vector<Pair> possible_pairs() {
  std::vector<Pair> pairs;
  for (uint8_t dtype = 0; dtype < kDTypes; ++dtype) {
    for (uint8_t op = 0; op < kReduceOps; ++op) {
      if (why_not(DType{dtype}, ReduceOp{op}).empty())
        pairs.push_back({DType{dtype}, ReduceOp{op}});
    }
  }
  return pairs;
}

// Operands that lie as `variant` says: all aligned, all misaligned by the same, or each by another
// number of bytes that the type allows.
inline std::vector<Placed> place(const std::vector<Bytes>& contents, DType dtype, size_t variant) {
  const bool is_complex = dtype == DType::kComplex64 || dtype == DType::kComplex128;
  const size_t step = size_of(dtype) / (is_complex ? 2 : 1), shift = 1 + variant % 7;
  std::vector<Placed> placed;
  for (size_t i = 0; i < contents.size(); ++i) {
    placed.emplace_back(contents[i], variant % 3 == 0 ? 0 : step * (shift + variant % 3 / 2 * i));
  }
  return placed;
}

}  // namespace ringcomm::testing
