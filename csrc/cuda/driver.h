// The CUDA runtime, which is linked in, and the driver, which is looked up when it is needed.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "device/api.h"

namespace ringcomm::cuda {

inline void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // or the next call of somebody else's reports it
  throw DeviceError(str(call, ": ", cudaGetErrorString(error)));
}

// Calls a function of the runtime, and returns the value that it puts where its first argument
// points.
template <typename Result, typename... Arguments>
Result result_of(const char* name, cudaError_t (*function)(Result*, Arguments...),
                 std::type_identity_t<Arguments>... arguments) {
  Result result{};
  check(function(&result, arguments...), name);
  return result;
}

// A function of the driver, by the name and the version of its interface.
template <typename Function>
class Driver {
 public:
  Driver(const char* name, unsigned version) : name_(name) {
    cudaDriverEntryPointQueryResult status{};
    const auto error =
        cudaGetDriverEntryPointByVersion(name, &entry_point_, version, cudaEnableDefault, &status);
    if (error == cudaSuccess && status == cudaDriverEntryPointSuccess) return;
    cudaGetLastError();
    entry_point_ = nullptr;
  }

  template <typename... Arguments>
  void operator()(Arguments... arguments) const {
    if (entry_point_ == nullptr) throw DeviceError(str("this driver has no ", name_));
    const CUresult error = reinterpret_cast<Function*>(entry_point_)(arguments...);
    if (error == CUDA_SUCCESS) return;
    throw DeviceError(str(name_, ": driver error ", static_cast<int>(error)));
  }

 private:
  const char* name_;
  void* entry_point_ = nullptr;
};

struct DriverTable {
  Driver<decltype(cuStreamBatchMemOp)> batch{"cuStreamBatchMemOp", 12000};
  Driver<decltype(cuPointerGetAttribute)> attribute{"cuPointerGetAttribute", 12000};
  Driver<decltype(cuMemGetAddressRange)> range{"cuMemGetAddressRange", 12000};
  Driver<decltype(cuDevicePrimaryCtxGetState)> context{"cuDevicePrimaryCtxGetState", 7000};
  Driver<decltype(cuMemRetainAllocationHandle)> retain{"cuMemRetainAllocationHandle", 12000};
  Driver<decltype(cuMemRelease)> release{"cuMemRelease", 12000};
  Driver<decltype(cuMemExportToShareableHandle)> share{"cuMemExportToShareableHandle", 12000};
  Driver<decltype(cuMemImportFromShareableHandle)> import{"cuMemImportFromShareableHandle", 12000};
  Driver<decltype(cuMemAddressReserve)> reserve{"cuMemAddressReserve", 12000};
  Driver<decltype(cuMemAddressFree)> unreserve{"cuMemAddressFree", 12000};
  Driver<decltype(cuMemMap)> map{"cuMemMap", 12000};
  Driver<decltype(cuMemUnmap)> unmap{"cuMemUnmap", 12000};
  Driver<decltype(cuMemSetAccess)> allow{"cuMemSetAccess", 12000};
  Driver<decltype(cuMemCreate)> create{"cuMemCreate", 12000};
};

inline const DriverTable& driver() {
  static const DriverTable table;
  return table;
}

inline CUdeviceptr number_of(const std::byte* address) {
  return reinterpret_cast<CUdeviceptr>(address);
}

}  // namespace ringcomm::cuda
