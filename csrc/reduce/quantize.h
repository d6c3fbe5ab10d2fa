// Numbers of 8 bits in blocks that have a scale each: ringcomm.compression sends them between
// hosts.
//
// A block is 256 numbers in 260 bytes: the scale, fp32, then the codes. Byte 4 w + p of the codes
// is number 64 p + w, so that words are made and taken apart by shifts alone. A number is its code
// times the scale. The scale is the block's largest magnitude over the largest code, and not below
// 2^-117: no product is an fp32 denormal, which some modes flush to zero. A block with an inf or a
// NaN has a NaN as its scale, and all of it is NaN.
//
// The codes are the same bits on every instruction set. So are the sums, in the order of the
// sources.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringcomm {

enum class Coding : uint8_t { kInt8, kFloat8 };  // -127 to 127; float8_e4m3fn
inline constexpr int kCodings = 2;

inline constexpr uint64_t kBlock = 256;  // numbers
inline constexpr uint64_t kBlockBytes = sizeof(float) + kBlock;
constexpr uint64_t blocks_of(uint64_t count) { return (count + kBlock - 1) / kBlock; }

struct Quantization {
  const float* src = nullptr;
  float* residual = nullptr;  // added to src, and gets the rest beside the codes; null: none
  std::byte* blocks = nullptr;
  uint64_t count = 0;
  // By chance: up or down, such that the mean of many roundings is the number. A seed and a
  // number's index, which counts from `first`, decide. Else to the nearest.
  bool by_chance = false;
  uint64_t seed = 0;
  uint32_t first = 0;
};
void quantize(Coding coding, const Quantization& args);

// dst[i] = (source 0's number i + source 1's + ...) / divisor, in fp32. Sources are one after
// another, of whole blocks each.
struct Dequantization {
  const std::byte* blocks = nullptr;
  uint64_t source_bytes = 0;  // from one source to the next
  size_t sources = 1;
  float divisor = 1;
  float* dst = nullptr;
  uint64_t count = 0;
};
void dequantize(Coding coding, const Dequantization& args);

// The kernels of an instruction set.
struct BlockKernels {
  void (*quantize)(const Quantization&);
  void (*dequantize)(const Dequantization&);
};

}  // namespace ringcomm
