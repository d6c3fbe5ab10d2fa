// A scalar model of the reductions, for reduce_test: one element after the other, no tricks, and
// the conversions of torch/headeronly.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Float8_e4m3fn.h>
#include <torch/headeronly/util/Float8_e5m2.h>
#include <torch/headeronly/util/Half.h>

#include <cmath>
#include <complex>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "reduce/reduce.h"

namespace ringcomm::model {

using Bytes = std::vector<std::byte>;

// Model of a type: its form in memory, its accumulator, and the way between.
template <class T>
struct Plain {
  using Stored = T;
  using Acc = T;
  static Acc decode(Stored stored) { return stored; }
  static Stored encode(Acc value) { return value; }
};

struct Bool : Plain<uint8_t> {
  static Acc decode(Stored stored) { return stored != 0; }
};

template <class Bits, float (*kDecode)(Bits), Bits (*kEncode)(float)>
struct Small {
  using Stored = Bits;
  using Acc = float;
  static Acc decode(Stored stored) { return kDecode(stored); }
  static Stored encode(Acc value) { return kEncode(value); }
};

namespace torchs = c10::detail;
using Float16 = Small<uint16_t, torchs::fp16_ieee_to_fp32_value, torchs::fp16_ieee_from_fp32_value>;
using BFloat16 = Small<uint16_t, torchs::f32_from_bits, torchs::round_to_nearest_even>;
using Float8E4M3 =
    Small<uint8_t, torchs::fp8e4m3fn_to_fp32_value, torchs::fp8e4m3fn_from_fp32_value>;
using Float8E5M2 = Small<uint8_t, torchs::fp8e5m2_to_fp32_value, torchs::fp8e5m2_from_fp32_value>;

template <class T>
T one_nan(T value) {
  if constexpr (std::is_floating_point_v<T>) {
    return std::isnan(value) ? std::numeric_limits<T>::quiet_NaN() : value;
  } else if constexpr (std::is_integral_v<T>) {
    return value;
  } else {
    return {one_nan(value.real()), one_nan(value.imag())};
  }
}

template <class T>
T extreme(ReduceOp op, T a, T b) {
  if (a != a || b != b) return a != a ? a : b;
  return (op == ReduceOp::kMin ? b < a : b > a) ? b : a;
}

inline float combine(ReduceOp op, float a, float b) {
  if (op == ReduceOp::kMin || op == ReduceOp::kMax) return extreme(op, a, b);
  return op == ReduceOp::kProduct ? a * b : a + b;
}

inline double combine(ReduceOp op, double a, double b) {
  if (op == ReduceOp::kMin || op == ReduceOp::kMax) return extreme(op, a, b);
  return op == ReduceOp::kProduct ? a * b : a + b;
}

template <class T>
std::complex<T> combine(ReduceOp op, std::complex<T> a, std::complex<T> b) {
  if (op != ReduceOp::kProduct) return {a.real() + b.real(), a.imag() + b.imag()};
  return {a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real()};
}

template <class T>
  requires std::is_integral_v<T>
T combine(ReduceOp op, T a, T b) {
  const uint64_t x = static_cast<uint64_t>(a), y = static_cast<uint64_t>(b);
  switch (op) {
    case ReduceOp::kProduct:
      return static_cast<T>(x * y);
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      return extreme(op, a, b);
    case ReduceOp::kBand:
      return static_cast<T>(x & y);
    case ReduceOp::kBor:
      return static_cast<T>(x | y);
    case ReduceOp::kBxor:
      return static_cast<T>(x ^ y);
    default:
      return static_cast<T>(x + y);
  }
}

template <class T>
T divided(T value, int ranks) {
  if constexpr (std::is_floating_point_v<T>)
    return value / static_cast<T>(ranks);
  else if constexpr (std::is_same_v<T, uint64_t>)
    return value / static_cast<uint64_t>(ranks);
  else if constexpr (std::is_integral_v<T>)
    return static_cast<T>(int64_t{value} / ranks);
  else
    return {divided(value.real(), ranks), divided(value.imag(), ranks)};
}

template <class Type>
Bytes reduced(const Reduction& what, bool final, const std::vector<Bytes>& srcs) {
  using Stored = typename Type::Stored;
  Bytes out(srcs[0].size());
  for (size_t at = 0; at < out.size(); at += sizeof(Stored)) {
    typename Type::Acc total{};
    for (size_t s = 0; s < srcs.size(); ++s) {
      Stored stored;
      std::memcpy(&stored, &srcs[s][at], sizeof(stored));
      const auto value = Type::decode(stored);
      total = s == 0 ? value : combine(what.op, total, value);
    }
    if (what.op == ReduceOp::kAvg && final) total = divided(total, what.ranks);
    const Stored stored = Type::encode(one_nan(total));
    std::memcpy(&out[at], &stored, sizeof(stored));
  }
  return out;
}

inline Bytes reduced_bool(Reduction what, const std::vector<Bytes>& srcs) {
  const ReduceOp op = what.op;
  if (op == ReduceOp::kSum || op == ReduceOp::kMax) what.op = ReduceOp::kBor;
  if (op == ReduceOp::kProduct || op == ReduceOp::kMin) what.op = ReduceOp::kBand;
  return reduced<Bool>(what, true, srcs);
}

inline Bytes reduced_any(const Reduction& what, bool final, const std::vector<Bytes>& srcs) {
  switch (what.dtype) {
    case DType::kBool:
      return reduced_bool(what, srcs);
    case DType::kUint8:
      return reduced<Plain<uint8_t>>(what, final, srcs);
    case DType::kInt8:
      return reduced<Plain<int8_t>>(what, final, srcs);
    case DType::kUint16:
      return reduced<Plain<uint16_t>>(what, final, srcs);
    case DType::kInt16:
      return reduced<Plain<int16_t>>(what, final, srcs);
    case DType::kUint32:
      return reduced<Plain<uint32_t>>(what, final, srcs);
    case DType::kInt32:
      return reduced<Plain<int32_t>>(what, final, srcs);
    case DType::kUint64:
      return reduced<Plain<uint64_t>>(what, final, srcs);
    case DType::kInt64:
      return reduced<Plain<int64_t>>(what, final, srcs);
    case DType::kFloat16:
      return reduced<Float16>(what, final, srcs);
    case DType::kBFloat16:
      return reduced<BFloat16>(what, final, srcs);
    case DType::kFloat32:
      return reduced<Plain<float>>(what, final, srcs);
    case DType::kFloat64:
      return reduced<Plain<double>>(what, final, srcs);
    case DType::kComplex64:
      return reduced<Plain<std::complex<float>>>(what, final, srcs);
    case DType::kComplex128:
      return reduced<Plain<std::complex<double>>>(what, final, srcs);
    case DType::kFloat8E4M3:
      return reduced<Float8E4M3>(what, final, srcs);
    case DType::kFloat8E5M2:
      return reduced<Float8E5M2>(what, final, srcs);
  }
  return {};
}

}  // namespace ringcomm::model
