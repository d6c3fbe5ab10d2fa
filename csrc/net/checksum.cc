// Compiled for SSE4.2 or ARMv8's CRC instructions (CMakeLists.txt): every processor has one that
// torch runs on.
#include "net/checksum.h"

#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#else
#include <arm_acle.h>
#endif

namespace ringcomm {
namespace {

uint32_t add_eight(uint32_t crc, uint64_t word) {
#if defined(__x86_64__)
  return static_cast<uint32_t>(_mm_crc32_u64(crc, word));
#else
  return __crc32cd(crc, word);
#endif
}

uint32_t add_one(uint32_t crc, uint8_t byte) {
#if defined(__x86_64__)
  return _mm_crc32_u8(crc, byte);
#else
  return __crc32cb(crc, byte);
#endif
}

uint64_t word_at(const std::byte* data) {
  uint64_t word;
  std::memcpy(&word, data, sizeof word);
  return word;
}

}  // namespace

uint32_t checksum(const std::byte* data, size_t bytes) {
  const size_t third = bytes / 24 * 8;
  uint32_t a = ~0u, b = ~0u, c = ~0u;
  for (size_t i = 0; i < third; i += 8) {
    a = add_eight(a, word_at(data + i));
    b = add_eight(b, word_at(data + third + i));
    c = add_eight(c, word_at(data + 2 * third + i));
  }
  for (size_t i = 3 * third; i < bytes; ++i) c = add_one(c, static_cast<uint8_t>(data[i]));
  const uint32_t of_two = add_eight(~0u, static_cast<uint64_t>(a) << 32 | b);
  return ~add_eight(of_two, static_cast<uint64_t>(c) << 32 | static_cast<uint32_t>(bytes));
}

}  // namespace ringcomm
