// A copy past the caches, for outputs that would not stay in them: a store that goes straight to
// memory need not read the line first, and leaves the caches to the inputs and the windows. The
// tuner (exec/tuner.h) finds out when that pays, because machines tell wrong cache sizes.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace ringcomm {

// Copies like memcpy, and is done before any later store of this thread is seen.
inline void stream_copy(std::byte* dst, const std::byte* src, uint64_t bytes) {
#if defined(__SSE2__)
  constexpr uint64_t kLine = 64;
  const uint64_t head = std::min(bytes, -reinterpret_cast<uintptr_t>(dst) % kLine);
  std::memcpy(dst, src, head);
  uint64_t done = head;
  for (; done + kLine <= bytes; done += kLine) {
    const auto* from = reinterpret_cast<const __m128i*>(src + done);
    auto* to = reinterpret_cast<__m128i*>(dst + done);
    const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
  std::memcpy(dst + done, src + done, bytes - done);
  _mm_sfence();  // such stores are ordered by nothing else, not by a release either
#else
  std::memcpy(dst, src, bytes);
#endif
}

inline void copy_bytes(std::byte* dst, const std::byte* src, uint64_t bytes, bool streams) {
  if (streams) {
    stream_copy(dst, src, bytes);
  } else {
    std::memcpy(dst, src, bytes);
  }
}

}  // namespace ringcomm
