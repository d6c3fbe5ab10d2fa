// The library for devices (device/api.h), which is opened at run time.
#pragma once

#include "device/api.h"

namespace ringcomm {

// Returns the library, which the first call opens: the file of RINGCOMM_CUDA_LIBRARY, or the one
// beside this code. Throws UsageError, in one sentence, where this build has none, or this machine
// no device that it could use.
cuda::Api& device_api();
// Tells whether tensors of the CPU stand in for those of a device. In tests:
// RINGCOMM_CUDA_LIBRARY.
bool device_is_simulated();

}  // namespace ringcomm
