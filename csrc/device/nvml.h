// NVIDIA's management library, which comes with the driver. It knows all GPUs of the machine, also
// those that CUDA_VISIBLE_DEVICES hides from this process.
#pragma once

#include <dlfcn.h>

#include <cstdio>

#include "device/api.h"

namespace ringcomm::cuda {

class Nvml {
 public:
  // `file`: null for this program itself.
  explicit Nvml(const char* file = "libnvidia-ml.so.1") : library_(::dlopen(file, RTLD_LAZY)) {
    const auto initialize = function<int()>("nvmlInit_v2");
    if (initialize == nullptr || initialize() != 0) return;
    handle_ = function<int(const char*, Device*)>("nvmlDeviceGetHandleByUUID");
    status_ = function<int(Device, Device, int, int*)>("nvmlDeviceGetP2PStatus");
  }

  // Tells whether NVLink joins two GPUs. False if that cannot be told, as of slices of one (MIG).
  bool nvlink(const Uuid& one, const Uuid& other) const {
    constexpr int kOverNvlink = 2;  // NVML_P2P_CAPS_INDEX_NVLINK
    Device first = nullptr, second = nullptr;
    int status = -1;  // 0: NVML_P2P_STATUS_OK
    return handle_ != nullptr && status_ != nullptr && handle_(text(one).data(), &first) == 0 &&
           handle_(text(other).data(), &second) == 0 &&
           status_(first, second, kOverNvlink, &status) == 0 && status == 0;
  }

 private:
  using Device = void*;

  template <typename Type>
  Type* function(const char* name) const {
    return library_ == nullptr ? nullptr : reinterpret_cast<Type*>(::dlsym(library_, name));
  }

  static std::string text(const Uuid& uuid) {
    std::string text = "GPU";
    for (size_t i = 0; i < uuid.size(); ++i) {
      std::array<char, 3> byte;
      std::snprintf(byte.data(), byte.size(), "%02x", uuid[i]);
      const bool begins = i == 0 || i == 4 || i == 6 || i == 8 || i == 10;
      text.append(begins ? "-" : "").append(byte.data());
    }
    return text;
  }

  void* library_;  // stays, as CUDA's own use of it does
  int (*handle_)(const char*, Device*) = nullptr;
  int (*status_)(Device, Device, int, int*) = nullptr;
};

}  // namespace ringcomm::cuda
