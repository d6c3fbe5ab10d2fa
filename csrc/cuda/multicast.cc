// Memory that NVLink's switches reach on several devices at once.
#include <algorithm>

#include "cuda/driver.h"

namespace ringcomm::cuda {
namespace {

using Handle = CUmemGenericAllocationHandle;

// A range of addresses for one allocation, which this device may read and write.
CUdeviceptr map_all(Handle memory, uint64_t bytes, int device) {
  CUdeviceptr at = 0;
  driver().reserve(&at, bytes, 0ul, CUdeviceptr{0}, 0ull);
  bool mapped = false;
  try {
    driver().map(at, bytes, 0ul, memory, 0ull);
    mapped = true;
    CUmemAccessDesc access{};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = device;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    driver().allow(at, bytes, &access, 1ul);
  } catch (const DeviceError&) {
    if (mapped) driver().unmap(at, bytes);
    driver().unreserve(at, bytes);
    throw;
  }
  return at;
}

class CudaMulticast final : public Multicast {
 public:
  CudaMulticast(Handle handle, uint64_t bytes, int device)
      : handle_(handle), bytes_(bytes), device_(device) {}
  ~CudaMulticast() override {
    try {
      unmap(all);
      if (bound_) driver().unbind(handle_, device_, 0ul, bytes_);
      unmap(own);
      if (memory_ != 0) driver().release(memory_);
      driver().release(handle_);
    } catch (const DeviceError&) {  // the driver may be shutting down
      return;
    }
  }

  void join() { driver().add_device(handle_, device_); }

  Fd descriptor() override {
    int descriptor = -1;
    driver().share(&descriptor, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0ull);
    return Fd(descriptor);
  }

  void bind() override {
    CUmemAllocationProp kind{};
    kind.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    kind.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    kind.location.id = device_;
    kind.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    driver().create(&memory_, bytes_, &kind, 0ull);
    own = address(map_all(memory_, bytes_, device_));
    driver().bind(handle_, 0ul, memory_, 0ul, bytes_, 0ull);
    bound_ = true;
    all = address(map_all(handle_, bytes_, device_));
  }

 private:
  static std::byte* address(CUdeviceptr at) {
    return reinterpret_cast<std::byte*>(at);  // NOLINT: so the driver gives it
  }
  void unmap(std::byte* at) const {
    if (at == nullptr) return;
    driver().unmap(number_of(at), bytes_);
    driver().unreserve(number_of(at), bytes_);
  }

  const Handle handle_;
  const uint64_t bytes_;
  const int device_;
  Handle memory_ = 0;
  bool bound_ = false;
};

std::unique_ptr<Multicast> joined(Handle handle, uint64_t bytes, int device) {
  auto multicast = std::make_unique<CudaMulticast>(handle, bytes, device);
  multicast->join();
  return multicast;
}

}  // namespace

std::unique_ptr<Multicast> make_multicast(uint64_t bytes, int devices, int device) {
  CUmulticastObjectProp kind{};
  kind.numDevices = static_cast<unsigned>(devices);
  kind.size = bytes;
  kind.handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  Handle handle = 0;
  driver().make_multicast(&handle, &kind);
  return joined(handle, bytes, device);
}

std::unique_ptr<Multicast> join_multicast(const Fd& descriptor, uint64_t bytes, int device) {
  Handle handle = 0;
  const auto number = static_cast<uintptr_t>(descriptor.get());
  driver().import(&handle, reinterpret_cast<void*>(number),  // NOLINT: so the driver wants it
                  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  return joined(handle, bytes, device);
}

}  // namespace ringcomm::cuda
