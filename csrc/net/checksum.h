// The checksum of frames. TCP's own is 16 bits wide and is not looked at on virtual links.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ringcomm {

// Three CRC32C (Castagnoli) of the thirds of the data, and one of the three: a single CRC waits
// for itself, three at once keep the processor's unit busy.
uint32_t checksum(const std::byte* data, size_t bytes);

}  // namespace ringcomm
