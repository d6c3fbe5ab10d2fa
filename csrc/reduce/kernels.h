// Private to reduce/: the common part of reduce.cc and the kernels, which are compiled once per
// instruction set.
#pragma once

#include <torch/headeronly/version.h>  // macros, and no code

#include <atomic>

#include "reduce/quantize.h"
#include "reduce/reduce.h"

namespace ringcomm {

// The code of a number that is too large for torch's float8_e4m3fn: NaN, and from 2.13 on the
// largest number.
inline constexpr uint8_t kE4M3Overflow = TORCH_VERSION_MINOR < 13 ? 0x7f : 0x7e;

// The arguments of one reduction, for a kernel.
struct ReduceArgs {
  std::byte* const* dsts;
  const std::byte* const* srcs;
  size_t n_dsts;
  size_t n_srcs;     // at least one
  uint64_t numbers;  // a complex element is two
  int ranks;         // AVG: the divisor
  double factor;     // scale
};

using Kernel = void (*)(const ReduceArgs&);

// Null where the pair is impossible. The entry of AVG divides, that of PREMUL_SUM is SUM's.
template <class Entry>
struct TableOf {
  Entry reduce[kDTypes][kReduceOps];
  Entry scale[kDTypes];
};
using KernelTable = TableOf<Kernel>;

struct HostKernels : KernelTable {
  BlockKernels blocks[kCodings];
};

// One table per instruction set: constants, so that nothing of a file compiled for AVX-512 runs
// before a machine is known to have it.
namespace kernels_plain {
extern const HostKernels kKernels;
}
namespace kernels_avx2 {
extern const HostKernels kKernels;
}
namespace kernels_avx512 {
extern const HostKernels kKernels;
}

struct InstructionSet {
  const char* name;
  const HostKernels& kernels;
  bool (*available)();
};
std::span<const InstructionSet> known_instruction_sets();  // the best last
// Returns the set in use. Access it relaxed: it points to constants, and only tests change it.
std::atomic<const InstructionSet*>& current_instruction_set();

}  // namespace ringcomm
