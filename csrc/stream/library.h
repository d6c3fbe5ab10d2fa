// The library for devices (device/api.h), which is opened at run time.
#pragma once

#include "device/api.h"

namespace ringcomm {

// Returns the library, which the first call opens: that file, or if the name is empty the one
// beside this code. Throws UsageError, in one sentence, where this build has none, or this machine
// no device that it could use.
cuda::Api& open_devices(const std::string& file);

}  // namespace ringcomm
