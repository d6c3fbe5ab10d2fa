// Codecs and operations of the device kernels: those of reduce/ on vectors of one lane, so that
// results are the same bit by bit if nothing is fused (-fmad=false, -ffp-contract=off); and others
// where devices have better ways. Included in an unnamed namespace inside ringcomm::cuda, after
// <type_traits>, device/api.h and reduce/kernels.h.

template <class T, int>
using Vector = T;
template <class V>
using ElementOf = V;
template <class V>
inline constexpr int kLanesOf = 1;
inline constexpr bool kHasHardwareHalf = false;

template <class V>
constexpr V splat(V value) {
  return value;
}

template <class To, class From>
constexpr To bits_as(From value) {
  return __builtin_bit_cast(To, value);
}

constexpr bool below(uint32_t value, uint32_t limit) { return value < limit; }

template <class V>
constexpr V canonical_nan(V value) {
  return value == value ? value : static_cast<V>(__builtin_nanf(""));
}

#include "reduce/codecs.inc.h"
#include "reduce/operations.inc.h"

// Accumulated as they come from a register.
template <class StoredT, class AccT, class RegisterT>
struct Direct {
  using Stored = StoredT;
  using Acc = AccT;
  static constexpr int kParts = 1;
  template <int>
  using Register = RegisterT;

  static constexpr void decode(RegisterT value, AccT (&parts)[1]) { parts[0] = AccT{value}; }
  static constexpr RegisterT encode(const AccT (&parts)[1]) {
    return static_cast<RegisterT>(parts[0]);
  }
};

// Integers of 8 and 16 bits.
template <class T>
using Widened = Direct<T, std::conditional_t<std::is_signed_v<T>, int32_t, uint32_t>, T>;

// Bits of whatever type, 32 at once.
template <class T>
using Bits = Direct<T, uint32_t, uint32_t>;

// Every byte that is not 0 becomes 1.
struct Truths : Bits<uint8_t> {
  static constexpr void decode(uint32_t word, uint32_t (&parts)[1]) {
    parts[0] = ((word | ((word & 0x7f7f7f7fu) + 0x7f7f7f7fu)) >> 7) & 0x01010101u;
  }
};

template <class T>
struct Complex {
  T real, imag;
};

template <class T>
struct ComplexFloat : Direct<Complex<T>, Complex<T>, Complex<T>> {
  static constexpr Complex<T> encode(const Complex<T> (&parts)[1]) {
    return {canonical_nan(parts[0].real), canonical_nan(parts[0].imag)};
  }
};

struct ComplexProduct : Combine {
  template <class V>
  static constexpr V apply(V a, V b) {
    return {a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real};
  }
};

// SUM and AVG of floats in one: where there is nothing to divide by, `args` has 1. PREMUL_SUM's
// factor is torch's affair (torch/device.cc), so the table's Scale is of no use.
struct SumThen : Sum {
  static constexpr auto finish(auto value, const ReduceArgs& args) {
    return args.ranks != 1 ? FloatAvg::finish(value, args) : value;
  }
};

template <class Codec, class Op>
constexpr auto choose_codec() {
  using Stored = typename Codec::Stored;
  if constexpr (std::is_same_v<Codec, Bool>) {
    return Truths();
  } else if constexpr (std::is_same_v<Op, Band> || std::is_same_v<Op, Bor> ||
                       std::is_same_v<Op, Bxor>) {
    return Bits<std::conditional_t<sizeof(Stored) < 4, uint8_t, uint32_t>>();
  } else if constexpr (std::is_same_v<Op, ComplexProduct>) {
    return ComplexFloat<Stored>();
  } else if constexpr (std::is_same_v<Codec, Integer<Stored>> && sizeof(Stored) < 4) {
    return Widened<Stored>();
  } else {
    return Codec();
  }
}

template <class Codec, class Op>
constexpr auto choose_op() {
  constexpr bool kFloats = std::is_floating_point_v<typename Codec::Acc>;
  if constexpr (kFloats && (std::is_base_of_v<Sum, Op> || std::is_same_v<Op, Scale>)) {
    return SumThen();
  } else {
    return Op();
  }
}

// The codec and the operation that compute a pair of the table (reduce/table.inc.h).
template <class Codec, class Op>
using CodecFor = decltype(choose_codec<Codec, Op>());
template <class Codec, class Op>
using OpFor = decltype(choose_op<Codec, Op>());
