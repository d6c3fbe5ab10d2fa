// The one symbol of a library with a table of functions.
#include <cstring>

#include "device/api.h"

extern "C" [[gnu::visibility("default")]] ringcomm::cuda::Api* ringcomm_device_api(
    const char* interface) {
  static ringcomm::cuda::Api* const api = ringcomm::cuda::make_api().release();
  return std::strcmp(interface, RINGCOMM_INTERFACE) == 0 ? api : nullptr;
}
