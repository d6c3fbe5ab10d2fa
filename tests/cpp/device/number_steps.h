// Every number of 8 and of 16 bits, and special ones of longer types, for kernels: gpu_kernels.
// gpu_kernels.
#pragma once

#include "meetings_steps.h"

namespace ringcomm::testing {

// Returns the number that even ranks, or odd ones, have at `i`. T is the type, or that of a complex
// number's parts.
template <class T>
T special_number(uint64_t i, bool odd) {
  using Limits = std::numeric_limits<T>;
  static const std::array numbers{T{0},
                                  Limits::denorm_min(),
                                  std::nextafter(Limits::min(), T{0}),
                                  Limits::min(),
                                  T{1},
                                  T{1} + Limits::epsilon(),
                                  T{3},
                                  Limits::max() / 2,
                                  std::nextafter(Limits::max(), T{0}),
                                  Limits::max(),
                                  Limits::infinity(),
                                  Limits::quiet_NaN(),
                                  Limits::signaling_NaN()};
  const uint64_t count = 2 * numbers.size(), at = (odd ? i / count : i) % count;
  return std::copysign(numbers[at / 2], at % 2 == 0 ? T{1} : T{-1});
}

// Zeros, subnormals, the largest, infinities and NaNs of float16 and bfloat16.
inline uint16_t special_half(uint64_t i) {
  static constexpr std::array<uint16_t, 11> kCodes{0,      1,      0x007f, 0x0080, 0x03ff, 0x0400,
                                                   0x7bff, 0x7c00, 0x7e01, 0x7f7f, 0x7f80};
  const auto sign = static_cast<uint16_t>(i / kCodes.size() % 2 * 0x8000);
  return static_cast<uint16_t>(kCodes[i % kCodes.size()] | sign);
}

// 8 bits: each number beside each. 16 bits: each beside another, and then beside special ones.
inline void set_number(std::byte* at, uint64_t bytes, uint64_t i, bool odd) {
  const auto put = [&](auto value) { std::memcpy(at, &value, sizeof value); };
  if (bytes == 1) put(static_cast<uint8_t>(odd ? i >> 8 : i));
  const bool special = odd && i >= 1 << 16;
  if (bytes == 2) put(special ? special_half(i) : static_cast<uint16_t>(odd ? i * 40'503 + 7 : i));
  if (bytes == 4) put(special_number<float>(i, odd));
  if (bytes == 8) put(special_number<double>(i, odd));
}

// An all_reduce of them.
inline Step number_step(Pair pair, int size, Algorithm kernel) {
  const bool two = pair.dtype == DType::kComplex64 || pair.dtype == DType::kComplex128;
  const uint64_t element = size_of(pair.dtype), part = element / (two ? 2 : 1);
  const uint64_t all = part == 1 ? 1 << 16 : part == 2 ? 4 << 16 : 26 * 26 * 4;
  Step step{kernel, {}, {pair.dtype, pair.op, size, 1}, 1, 64 << 10, {}, {}, {}};
  step.shape.collective = kAllReduce;
  step.shape.size = size;
  step.shape.element = element;
  step.shape.bytes = std::min(all * part, room_of(kernel, size, 1 << 20)) / element * element;
  const auto ranks = static_cast<size_t>(size);
  step.lengths.assign(ranks, std::vector<uint64_t>(ranks));
  step.blocks = blocks_of(kernel, 4);
  for (Rank rank = 0; rank < size; ++rank) {
    Bytes& input = step.inputs.emplace_back(step.shape.bytes);
    for (uint64_t i = 0; i < input.size() / part; ++i) {
      set_number(&input[i * part], part, i, rank % 2 == 1);
    }
  }
  set_wanted(step);
  return step;
}

}  // namespace ringcomm::testing
