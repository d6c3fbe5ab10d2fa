// Numbers of 16 and 8 bits by the device's instructions, for which the portable codecs' twenty
// operations a number are too many at the speed of its memory. Rounding is the same; NaNs, and
// numbers too large for 8 bits, are not, so those are set right. Included after
// cuda/codecs.inc.h, by kernels_device.inc.h only.

// Two numbers, of which the first is in the lower half.
template <class Format>
__device__ float2 decode_pair(uint32_t word) {
  if constexpr (std::is_same_v<Format, BFloat16Format>) {
    return {bits_as<float>(word << 16), bits_as<float>(word & 0xffff0000u)};
  }
  uint32_t halves = word;
  if constexpr (std::is_same_v<Format, Float8E4M3Format>) {
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(word)));
  } else if constexpr (std::is_same_v<Format, Float8E5M2Format>) {
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(word)));
  }
  float2 pair;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }"
      : "=f"(pair.x), "=f"(pair.y)
      : "r"(halves));
  return pair;
}

template <class Format>
__device__ uint32_t encode_pair(float first, float second) {
  uint32_t word = 0;
  uint16_t half = 0;
  if constexpr (std::is_same_v<Format, BFloat16Format>) {
    asm("cvt.rn.bf16x2.f32 %0, %2, %1;" : "=r"(word) : "f"(first), "f"(second));
  } else if constexpr (std::is_same_v<Format, Float16Format>) {
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.f16x2.f32 %0, %2, %1;" : "=r"(word) : "f"(first), "f"(second));
#else
    asm("{ .reg .b16 l, h; cvt.rn.f16.f32 l, %1; cvt.rn.f16.f32 h, %2; mov.b32 %0, {l, h}; }"
        : "=r"(word)
        : "f"(first), "f"(second));
#endif
  } else if constexpr (std::is_same_v<Format, Float8E4M3Format>) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %2, %1;" : "=h"(half) : "f"(first), "f"(second));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %2, %1;" : "=h"(half) : "f"(first), "f"(second));
  }
  return word | half;
}

// The largest number that the instruction encodes as we do.
template <class Format>
inline constexpr float kLargest = __builtin_inff();
template <>
inline constexpr float kLargest<Float8E4M3Format> = 464;  // rounds to 448
template <>
inline constexpr float kLargest<Float8E5M2Format> = 0x1.dffffep15f;  // rounds to 57344

template <class Format>
struct Converted : Direct<typename Format::Stored, float, uint32_t> {
  static constexpr int kBits = 8 * sizeof(typename Format::Stored), kParts = 32 / kBits;

  __device__ static void decode(uint32_t word, float (&parts)[kParts]) {
    for (int p = 0; p < kParts; p += 2) {
      const float2 pair = decode_pair<Format>(word >> (kBits * p));
      parts[p] = pair.x;
      parts[p + 1] = pair.y;
    }
  }
  __device__ static uint32_t encode(const float (&parts)[kParts]) {
    uint32_t word = 0;
    for (int p = 0; p < kParts; p += 2) {
      word |= encode_pair<Format>(parts[p], parts[p + 1]) << (kBits * p);
    }
    const uint32_t large = std::is_same_v<Format, Float8E4M3Format> ? kE4M3Overflow : 0x7c;
    for (int p = 0; p < kParts; ++p) {
      if (fabsf(parts[p]) <= kLargest<Format>) continue;
      const uint32_t sign = bits_as<uint32_t>(parts[p]) >> 31 << (kBits - 1);
      const uint32_t code = parts[p] == parts[p] ? sign | large : Format::kNan;
      word = (word & ~(((1u << kBits) - 1) << (kBits * p))) | code << (kBits * p);
    }
    return word;
  }
};

template <>
struct Packed<Float16Format> : Converted<Float16Format> {};
// Older devices have no such instructions. Theirs are the portable codecs.
#if __CUDA_ARCH__ >= 800
template <>
struct Packed<BFloat16Format> : Converted<BFloat16Format> {};
#endif
#if __CUDA_ARCH__ >= 890
template <>
struct Packed<Float8E4M3Format> : Converted<Float8E4M3Format> {};
template <>
struct Packed<Float8E5M2Format> : Converted<Float8E5M2Format> {};
#endif
