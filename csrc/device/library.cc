// The one symbol of a library with a table of functions.
#include <cstring>

#include "device/api.h"

extern "C" [[gnu::visibility("default")]] ringcomm::cuda::Api* ringcomm_device_api(
    const char* interface) {
  static ringcomm::cuda::Api* const api = ringcomm::cuda::make_api().release();
  return std::strcmp(interface, RINGCOMM_INTERFACE) == 0 ? api : nullptr;
}

// For tests: if the ranks that share a device call it with different numbers, before they meet,
// they run the kernels for ranks that have a device each. So one GPU is enough to try those.
extern "C" [[gnu::visibility("default")]] void ringcomm_device_salt(uint8_t salt) {
  ringcomm_device_api(RINGCOMM_INTERFACE)->salt = salt;
}
