// The kernels. Compiled by kernels_plain.cc, kernels_avx2.cc and kernels_avx512.cc, each with its
// own flags and its own RINGCOMM_ISA, the name of the namespace that holds the result.
//
// One definition rule: an inline function or template that is compiled in several of these files
// exists several times under one name, the linker keeps any one of them, and a machine without
// AVX-512 would execute the AVX-512 copy. So everything here is in an unnamed namespace, inside
// the ISA's; from the standard library come types and type traits only, which leave no code behind;
// from torch comes nothing; and the compiler's intrinsics are always inlined.
//
// Bitwise equal results on every instruction set also need -ffp-contract=off: AVX-512 and arm64
// have fused multiply-add, and a compiler uses it unless told not to.

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "reduce/kernels.h"

namespace ringcomm::RINGCOMM_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

#include "reduce/vectors.inc.h"
#include "reduce/half.inc.h"
#include "reduce/codecs.inc.h"
#include "reduce/operations.inc.h"

// (a + bi)(c + di) = (ac - bd) + (ad + bc)i, as torch's c10::complex, on pairs of lanes.
struct ComplexProduct : Combine {
  template <class V>
  static V apply(V a, V b) {
    return pairs(a, b, std::make_integer_sequence<int, kLanesOf<V>>());
  }
  template <class V, int... kLane>
  static V pairs(V a, V b, std::integer_sequence<int, kLane...>) {
    const V real = __builtin_shufflevector(a, a, (kLane & ~1)...);
    const V imag = __builtin_shufflevector(a, a, (kLane | 1)...);
    const V swapped = __builtin_shufflevector(b, b, (kLane ^ 1)...);
    const V minus_plus{(kLane & 1 ? ElementOf<V>{1} : ElementOf<V>{-1})...};
    return real * b + imag * swapped * minus_plus;
  }
};

// One register of stored elements becomes a block: accumulators of kLanes lanes.
template <class Codec, int kLanes>
struct Block {
  using Register = typename Codec::template Register<kLanes>;
  Vector<typename Codec::Acc, kLanes> parts[Codec::kParts];

  template <int kBytes>
  void read(const std::byte* at) {
    Codec::decode(load<Register, kBytes>(at), parts);
  }

  template <class Op>
  void apply(const Block& next) {
    for (int p = 0; p < Codec::kParts; ++p) parts[p] = Op::apply(parts[p], next.parts[p]);
  }

  template <class Op>
  Register finish(const ReduceArgs& args) {
    for (int p = 0; p < Codec::kParts; ++p) parts[p] = Op::finish(parts[p], args);
    return Codec::encode(parts);
  }
};

// Rounds of kUnroll registers, each of kElements elements, whose accumulators have kLanes lanes: as
// many as fit between element `at` and the end; returns the element it came to. All sources are
// read before a destination is written, so a destination may be a source. kSources == 0: any number
// of them.
template <class Codec, class Op, int kLanes, int kElements, int kUnroll, int kSources>
[[gnu::always_inline]] inline uint64_t sweep(const ReduceArgs args, uint64_t at) {
  constexpr int kBytes = kElements * sizeof(typename Codec::Stored);
  const size_t n_srcs = kSources ? kSources : args.n_srcs;
  const std::byte* srcs[kSources + 1];  // in registers: a store cannot change them
  for (int s = 0; s < kSources; ++s) srcs[s] = args.srcs[s];
  const std::byte* const first_src = args.srcs[0];
  std::byte* const first_dst = args.dsts[0];

  for (; at + kElements * kUnroll <= args.numbers; at += kElements * kUnroll) {
    const uint64_t offset = at * sizeof(typename Codec::Stored);
    Block<Codec, kLanes> total[kUnroll], next;
    for (int u = 0; u < kUnroll; ++u) {
      total[u].template read<kBytes>(first_src + offset + u * kBytes);
    }
    for (size_t s = 1; s < n_srcs; ++s) {
      const std::byte* const src = kSources ? srcs[s] : args.srcs[s];
      for (int u = 0; u < kUnroll; ++u) {
        next.template read<kBytes>(src + offset + u * kBytes);
        total[u].template apply<Op>(next);
      }
    }
    typename Block<Codec, kLanes>::Register result[kUnroll];
    for (int u = 0; u < kUnroll; ++u) {
      result[u] = total[u].template finish<Op>(args);
      store<kBytes>(first_dst + offset + u * kBytes, result[u]);
    }
    for (size_t d = 1; d < args.n_dsts; ++d) {
      for (int u = 0; u < kUnroll; ++u) {
        store<kBytes>(args.dsts[d] + offset + u * kBytes, result[u]);
      }
    }
  }
  return at;
}

// kUnit: how many numbers must stay together. The end of a buffer goes through the same code in
// narrower vectors, so a result does not depend on where in the buffer it stands.
template <class Codec, class Op, int kUnit, int kSources>
void run(const ReduceArgs& args) {
  constexpr int kParts = Codec::kParts;
  constexpr int kWide = kVectorBytes / sizeof(typename Codec::Acc);
  constexpr int kQuarter = kWide / 4;
  constexpr int kUnroll = kParts < 4 ? 4 / kParts : 1;
  uint64_t at = sweep<Codec, Op, kWide, kWide * kParts, kUnroll, kSources>(args, 0);
  at = sweep<Codec, Op, kWide, kWide * kParts, 1, kSources>(args, at);
  if constexpr (kQuarter > kUnit) {
    at = sweep<Codec, Op, kQuarter, kQuarter * kParts, 1, kSources>(args, at);
  }
  sweep<Codec, Op, kUnit, kUnit, 1, kSources>(args, at);
}

template <class Codec, class Op, int kUnit>
void kernel(const ReduceArgs& args) {
  if constexpr (Op::kHot) {
    if (args.n_srcs == 2) return run<Codec, Op, kUnit, 2>(args);
    if (args.n_srcs == 3) return run<Codec, Op, kUnit, 3>(args);
    if (args.n_srcs == 4) return run<Codec, Op, kUnit, 4>(args);
  }
  run<Codec, Op, kUnit, 0>(args);
}

template <class Codec, class Op, int kUnit = 1>
constexpr Kernel kKernel = kernel<Codec, Op, kUnit>;

#include "reduce/quantize.inc.h"
#include "reduce/table.inc.h"

}  // namespace

constinit const HostKernels kKernels = {all_kernels(), {kBlockKernels[0], kBlockKernels[1]}};

}  // namespace ringcomm::RINGCOMM_ISA
