// The checksum of frames. TCP's own is 16 bits wide and is not looked at on virtual links.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringcomm {

// Returns the CRC32C (Castagnoli) of three CRCs, each of a third of the data: a single CRC waits
// for itself, three at once keep the processor's unit busy.
uint32_t checksum(const std::byte* data, size_t bytes);

}  // namespace ringcomm
