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

// Operations. apply(a, b) combines, in the order of the sources; finish() ends.
struct Combine {
  static constexpr bool kHot = false;  // worth a copy of the loop for 2, 3 and 4 sources
  template <class V>
  static V finish(V value, const Job&) {
    return value;
  }
};

struct Sum : Combine {
  static constexpr bool kHot = true;
  template <class V>
  static V apply(V a, V b) {
    return a + b;
  }
};

// Divides, rather than multiplying with 1 / ranks: the mean of equal numbers is that number.
struct FloatAvg : Sum {
  template <class V>
  static V finish(V value, const Job& job) {
    return value / splat<V>(static_cast<ElementOf<V>>(job.ranks));
  }
};

// `T` says whether the wrapped sum is read as signed. Narrow types divide as 32 bits: ranks may be
// more than the type holds.
template <class T>
struct IntegerAvg : Sum {
  static constexpr bool kHot = false;
  template <class V>
  static V finish(V value, const Job& job) {
    using Narrow = std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>;
    using Wide = std::conditional_t<sizeof(T) == 8, T, Narrow>;
    const Wide divisor = static_cast<Wide>(job.ranks);
    for (int lane = 0; lane < kLanesOf<V>; ++lane) {
      value[lane] = static_cast<ElementOf<V>>(static_cast<T>(value[lane]) / divisor);
    }
    return value;
  }
};

struct Scale : Combine {
  template <class V>
  static V apply(V a, V) {
    return a;
  }
  template <class V>
  static V finish(V value, const Job& job) {
    return value * splat<V>(static_cast<ElementOf<V>>(job.factor));
  }
};

struct Product : Combine {
  template <class V>
  static V apply(V a, V b) {
    return a * b;
  }
};

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

// Equal numbers (-0 and 0): the first. A NaN, of either, is the result.
struct Min : Combine {
  template <class V>
  static V apply(V a, V b) {
    const V least = b < a ? b : a;
    return std::is_floating_point_v<ElementOf<V>> ? (b == b ? least : b) : least;
  }
};

struct Max : Combine {
  template <class V>
  static V apply(V a, V b) {
    const V most = b > a ? b : a;
    return std::is_floating_point_v<ElementOf<V>> ? (b == b ? most : b) : most;
  }
};

struct Band : Combine {
  template <class V>
  static V apply(V a, V b) {
    return a & b;
  }
};

struct Bor : Combine {
  template <class V>
  static V apply(V a, V b) {
    return a | b;
  }
};

struct Bxor : Combine {
  template <class V>
  static V apply(V a, V b) {
    return a ^ b;
  }
};

// What one register of stored elements becomes: accumulators of kLanes lanes.
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
  Register finish(const Job& job) {
    for (int p = 0; p < Codec::kParts; ++p) parts[p] = Op::finish(parts[p], job);
    return Codec::encode(parts, job);
  }
};

// How a sweep walks: kUnroll registers a round, each of kElements elements, whose accumulators have
// kLanes lanes. kSources == 0: any number of them.
template <int kLanes_, int kElements_, int kUnroll_, int kSources_>
struct Stride {
  static constexpr int kLanes = kLanes_, kElements = kElements_, kUnroll = kUnroll_;
  static constexpr int kSources = kSources_;
};

// As many rounds as fit between element `at` and the end; returns the element it came to. All
// sources are read before a destination is written, so a destination may be a source.
template <class Codec, class Op, class S>
[[gnu::always_inline]] inline uint64_t sweep(const Job job, uint64_t at) {
  constexpr int kBytes = S::kElements * sizeof(typename Codec::Stored);
  const size_t n_srcs = S::kSources ? S::kSources : job.n_srcs;
  const std::byte* srcs[S::kSources + 1];  // in registers: a store cannot change them
  for (int s = 0; s < S::kSources; ++s) srcs[s] = job.srcs[s];
  const std::byte* const first_src = job.srcs[0];
  std::byte* const first_dst = job.dsts[0];

  for (; at + S::kElements * S::kUnroll <= job.numbers; at += S::kElements * S::kUnroll) {
    const uint64_t offset = at * sizeof(typename Codec::Stored);
    Block<Codec, S::kLanes> total[S::kUnroll], next;
    for (int u = 0; u < S::kUnroll; ++u) {
      total[u].template read<kBytes>(first_src + offset + u * kBytes);
    }
    for (size_t s = 1; s < n_srcs; ++s) {
      const std::byte* const src = S::kSources ? srcs[s] : job.srcs[s];
      for (int u = 0; u < S::kUnroll; ++u) {
        next.template read<kBytes>(src + offset + u * kBytes);
        total[u].template apply<Op>(next);
      }
    }
    typename Block<Codec, S::kLanes>::Register result[S::kUnroll];
    for (int u = 0; u < S::kUnroll; ++u) {
      result[u] = total[u].template finish<Op>(job);
      store<kBytes>(first_dst + offset + u * kBytes, result[u]);
    }
    for (size_t d = 1; d < job.n_dsts; ++d) {
      for (int u = 0; u < S::kUnroll; ++u) {
        store<kBytes>(job.dsts[d] + offset + u * kBytes, result[u]);
      }
    }
  }
  return at;
}

// kUnit: how many numbers must stay together. The end of a buffer goes through the same code in
// narrower vectors, so a result does not depend on where in the buffer it stands.
template <class Codec, class Op, int kUnit, int kSources>
void run(const Job& job) {
  constexpr int kParts = Codec::kParts;
  constexpr int kWide = kVectorBytes / sizeof(typename Codec::Acc);
  constexpr int kQuarter = kWide / 4;
  constexpr int kUnroll = kParts < 4 ? 4 / kParts : 1;
  uint64_t at = sweep<Codec, Op, Stride<kWide, kWide * kParts, kUnroll, kSources>>(job, 0);
  at = sweep<Codec, Op, Stride<kWide, kWide * kParts, 1, kSources>>(job, at);
  if constexpr (kQuarter > kUnit) {
    at = sweep<Codec, Op, Stride<kQuarter, kQuarter * kParts, 1, kSources>>(job, at);
  }
  sweep<Codec, Op, Stride<kUnit, kUnit, 1, kSources>>(job, at);
}

template <class Codec, class Op, int kUnit = 1>
void kernel(const Job& job) {
  if constexpr (Op::kHot) {
    if (job.n_srcs == 2) return run<Codec, Op, kUnit, 2>(job);
    if (job.n_srcs == 3) return run<Codec, Op, kUnit, 3>(job);
    if (job.n_srcs == 4) return run<Codec, Op, kUnit, 4>(job);
  }
  run<Codec, Op, kUnit, 0>(job);
}

constexpr Kernel& entry(KernelTable& table, DType dtype, ReduceOp op) {
  return table.reduce[static_cast<int>(dtype)][static_cast<int>(op)];
}

// Sums, products and bits do not know signs: signed types share the unsigned ones' kernels.
template <class T>
constexpr void add_integer(KernelTable& table, DType dtype) {
  using Wrapping = Integer<std::make_unsigned_t<T>>;
  entry(table, dtype, ReduceOp::kSum) = kernel<Wrapping, Sum>;
  entry(table, dtype, ReduceOp::kAvg) = kernel<Wrapping, IntegerAvg<T>>;
  entry(table, dtype, ReduceOp::kProduct) = kernel<Wrapping, Product>;
  entry(table, dtype, ReduceOp::kMin) = kernel<Integer<T>, Min>;
  entry(table, dtype, ReduceOp::kMax) = kernel<Integer<T>, Max>;
  entry(table, dtype, ReduceOp::kBand) = kernel<Wrapping, Band>;
  entry(table, dtype, ReduceOp::kBor) = kernel<Wrapping, Bor>;
  entry(table, dtype, ReduceOp::kBxor) = kernel<Wrapping, Bxor>;
}

// What real and complex numbers share: to a sum, a complex number is two numbers.
template <class Codec>
constexpr void add_sums(KernelTable& table, DType dtype) {
  entry(table, dtype, ReduceOp::kSum) = kernel<Codec, Sum>;
  entry(table, dtype, ReduceOp::kPremulSum) = kernel<Codec, Sum>;
  entry(table, dtype, ReduceOp::kAvg) = kernel<Codec, FloatAvg>;
  table.scale[static_cast<int>(dtype)] = kernel<Codec, Scale>;
}

template <class Codec>
constexpr void add_real(KernelTable& table, DType dtype) {
  add_sums<Codec>(table, dtype);
  entry(table, dtype, ReduceOp::kProduct) = kernel<Codec, Product>;
  entry(table, dtype, ReduceOp::kMin) = kernel<Codec, Min>;
  entry(table, dtype, ReduceOp::kMax) = kernel<Codec, Max>;
}

template <class Codec>
constexpr void add_complex(KernelTable& table, DType dtype) {
  add_sums<Codec>(table, dtype);
  entry(table, dtype, ReduceOp::kProduct) = kernel<Codec, ComplexProduct, 2>;
}

constexpr void add_bool(KernelTable& table) {
  for (ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kBor}) {
    entry(table, DType::kBool, op) = kernel<Bool, Bor>;
  }
  for (ReduceOp op : {ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kBand}) {
    entry(table, DType::kBool, op) = kernel<Bool, Band>;
  }
  entry(table, DType::kBool, ReduceOp::kBxor) = kernel<Bool, Bxor>;
}

constexpr KernelTable all_kernels() {
  KernelTable table{};
  add_bool(table);
  add_integer<uint8_t>(table, DType::kUint8);
  add_integer<int8_t>(table, DType::kInt8);
  add_integer<uint16_t>(table, DType::kUint16);
  add_integer<int16_t>(table, DType::kInt16);
  add_integer<uint32_t>(table, DType::kUint32);
  add_integer<int32_t>(table, DType::kInt32);
  add_integer<uint64_t>(table, DType::kUint64);
  add_integer<int64_t>(table, DType::kInt64);
  add_real<Float16>(table, DType::kFloat16);
  add_real<BFloat16>(table, DType::kBFloat16);
  add_real<Float<float>>(table, DType::kFloat32);
  add_real<Float<double>>(table, DType::kFloat64);
  add_complex<Float<float>>(table, DType::kComplex64);
  add_complex<Float<double>>(table, DType::kComplex128);
  add_real<Float8E4M3>(table, DType::kFloat8E4M3);
  add_real<Float8E5M2>(table, DType::kFloat8E5M2);
  return table;
}

}  // namespace

constinit const KernelTable kKernels = all_kernels();

}  // namespace ringcomm::RINGCOMM_ISA
