// Compiled for SSE4.2 or ARMv8's CRC instructions (CMakeLists.txt), which every x86 and ARM has
// that torch runs on; for other processors bit by bit.
#include "net/checksum.h"

#include <bit>
#include <cstring>

#if defined(__SSE4_2__) && !defined(RINGCOMM_PORTABLE_CHECKSUM)
#include <nmmintrin.h>
#elif defined(__ARM_FEATURE_CRC32) && !defined(RINGCOMM_PORTABLE_CHECKSUM)
#include <arm_acle.h>
#endif

static_assert(std::endian::native == std::endian::little,
              "ringcomm needs a little-endian processor: what ranks exchange is in its order");

namespace ringcomm {
namespace {

#if defined(__SSE4_2__) && !defined(RINGCOMM_PORTABLE_CHECKSUM)

uint32_t add_eight(uint32_t crc, uint64_t word) {
  return static_cast<uint32_t>(_mm_crc32_u64(crc, word));
}
uint32_t add_one(uint32_t crc, uint8_t byte) { return _mm_crc32_u8(crc, byte); }

#elif defined(__ARM_FEATURE_CRC32) && !defined(RINGCOMM_PORTABLE_CHECKSUM)

uint32_t add_eight(uint32_t crc, uint64_t word) { return __crc32cd(crc, word); }
uint32_t add_one(uint32_t crc, uint8_t byte) { return __crc32cb(crc, byte); }

#else

uint32_t add_one(uint32_t crc, uint8_t byte) {
  constexpr uint32_t kCastagnoli = 0x82f63b78;
  crc ^= byte;
  for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? kCastagnoli : 0);
  return crc;
}

uint32_t add_eight(uint32_t crc, uint64_t word) {
  for (int i = 0; i < 8; ++i) crc = add_one(crc, static_cast<uint8_t>(word >> 8 * i));
  return crc;
}

#endif

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
