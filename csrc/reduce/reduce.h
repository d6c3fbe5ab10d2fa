// Type x op kernels: dst[i] = op(src0[i], src1[i], ...), in the order given, for every i.
//
// Types below fp32 are accumulated in fp32 and rounded once, at the end. NaN propagates through MIN
// and MAX; every NaN that is stored is its type's positive quiet NaN, so that results are bitwise
// equal on all machines. Integers wrap. bool: SUM, MAX, BOR are or; PRODUCT, MIN, BAND are and;
// BXOR is xor.
// One kernel source is compiled per instruction set; the best one is chosen at run time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace ringcomm {

enum class DType : uint8_t {
  kBool,
  kUint8,
  kInt8,
  kUint16,
  kInt16,
  kUint32,
  kInt32,
  kUint64,
  kInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kComplex64,
  kComplex128,
  kFloat8E4M3,
  kFloat8E5M2,
};
inline constexpr int kDTypes = 17;

enum class ReduceOp : uint8_t {
  kSum,
  kAvg,
  kProduct,
  kMin,
  kMax,
  kBand,
  kBor,
  kBxor,
  kPremulSum,
};
inline constexpr int kReduceOps = 9;

inline constexpr uint8_t kSizes[kDTypes] = {1, 1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8, 8, 16, 1, 1};
constexpr uint64_t size_of(DType dtype) { return kSizes[static_cast<int>(dtype)]; }  // bytes
// Returns the unsigned type of so many bytes; uint8 where there is none.
constexpr DType unsigned_of(uint64_t bytes) {
  for (const DType dtype : {DType::kUint16, DType::kUint32, DType::kUint64}) {
    if (size_of(dtype) == bytes) return dtype;
  }
  return DType::kUint8;
}
const char* to_string(DType dtype);  // "float32", as torch prints it without "torch."
const char* to_string(ReduceOp op);  // "SUM"

// Returns "" when the pair is possible, else one sentence that says why not.
std::string why_not(DType dtype, ReduceOp op);

struct Reduction {
  DType dtype = DType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  int ranks = 1;      // kAvg divides by it in a final step
  double factor = 1;  // kPremulSum: see scale()
};

// Reduces `srcs` into all `dsts`: buffers of `count` elements. A destination may be one of the
// sources exactly, and may not otherwise overlap any. With `final`, kAvg divides by `ranks`: floats
// in the accumulator's precision before the one rounding, integers truncating after wrapping in the
// type. kPremulSum reduces as kSum: its factor was applied by scale(). Alignment is the type's.
void reduce(const Reduction& what, bool final, std::span<std::byte* const> dsts,
            std::span<const std::byte* const> srcs, uint64_t count);

// dst[i] = src[i] * factor, in the accumulator's type (fp64 for float64 and complex128, else fp32),
// rounded once. Under kPremulSum a rank does so to its own input. dst may be src.
void scale(DType dtype, double factor, std::byte* dst, const std::byte* src, uint64_t count);

}  // namespace ringcomm
