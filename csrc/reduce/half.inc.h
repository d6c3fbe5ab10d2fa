// fp16 to and from fp32 by the hardware, where it can: kHalfLanes and, for AVX-512, 16; fewer use a
// part of the register. Included by kernels.inc.h only, inside its namespaces.

#if defined(__F16C__)
constexpr bool kHasHardwareHalf = true;
constexpr int kHalfLanes = 8;

[[gnu::always_inline]] inline Vector<float, 8> hardware_decode(Vector<uint16_t, 8> half) {
  return bits_as<Vector<float, 8>>(_mm256_cvtph_ps(bits_as<__m128i>(half)));
}

[[gnu::always_inline]] inline Vector<uint16_t, 8> hardware_encode(Vector<float, 8> value) {
  return bits_as<Vector<uint16_t, 8>>(
      _mm256_cvtps_ph(bits_as<__m256>(value), _MM_FROUND_TO_NEAREST_INT));
}

#if defined(__AVX512F__)
// The masked forms, with every lane chosen, are the same instructions: GCC 12's headers warn of an
// uninitialized operand in the others.
[[gnu::always_inline]] inline Vector<float, 16> hardware_decode(Vector<uint16_t, 16> half) {
  return bits_as<Vector<float, 16>>(_mm512_maskz_cvtph_ps(0xffff, bits_as<__m256i>(half)));
}

[[gnu::always_inline]] inline Vector<uint16_t, 16> hardware_encode(Vector<float, 16> value) {
  return bits_as<Vector<uint16_t, 16>>(
      _mm512_maskz_cvtps_ph(0xffff, bits_as<__m512>(value), _MM_FROUND_TO_NEAREST_INT));
}
#endif

#elif defined(__aarch64__)
constexpr bool kHasHardwareHalf = true;
constexpr int kHalfLanes = 4;

[[gnu::always_inline]] inline Vector<float, 4> hardware_decode(Vector<uint16_t, 4> half) {
  return bits_as<Vector<float, 4>>(vcvt_f32_f16(bits_as<float16x4_t>(half)));
}

[[gnu::always_inline]] inline Vector<uint16_t, 4> hardware_encode(Vector<float, 4> value) {
  return bits_as<Vector<uint16_t, 4>>(vcvt_f16_f32(bits_as<float32x4_t>(value)));
}

#else
constexpr bool kHasHardwareHalf = false;
#endif

#if defined(__F16C__) || defined(__aarch64__)
template <class H>
  requires(kLanesOf<H> < kHalfLanes)
[[gnu::always_inline]] inline Vector<float, kLanesOf<H>> hardware_decode(H half) {
  const auto decoded = hardware_decode(load<Vector<uint16_t, kHalfLanes>, sizeof(H)>(&half));
  return load<Vector<float, kLanesOf<H>>>(&decoded);
}

template <class F>
  requires(kLanesOf<F> < kHalfLanes)
[[gnu::always_inline]] inline Vector<uint16_t, kLanesOf<F>> hardware_encode(F value) {
  const auto encoded = hardware_encode(load<Vector<float, kHalfLanes>, sizeof(F)>(&value));
  return load<Vector<uint16_t, kLanesOf<F>>>(&encoded);
}
#endif
