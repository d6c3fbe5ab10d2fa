// The table of functions over the CUDA runtime, which is linked in, and the driver, which is looked
// up when it is needed: so this library loads where there is no driver.
#include <algorithm>
#include <bit>
#include <cstring>

#include "cuda/driver.h"
#include "cuda/launch.h"
#include "device/nvml.h"

namespace ringcomm::cuda {
namespace {

cudaStream_t native(Stream stream) { return static_cast<cudaStream_t>(stream); }
cudaEvent_t native_event(Event event) { return static_cast<cudaEvent_t>(event); }

// Maps one chunk of memory after the other at an address, as torch's expandable segments do.
bool try_ids(int device) try {
  constexpr uint64_t kChunk = 32 << 20;  // a multiple of what any device wants
  CUmemAllocationProp kind{};
  kind.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  kind.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  kind.location.id = device;
  CUdeviceptr base = 0;
  driver().reserve(&base, kChunk, 0ul, CUdeviceptr{0}, 0ull);
  const auto quietly = [](const auto& function,
                          auto... arguments) {  // the reason is thrown already
    try {
      function(arguments...);
    } catch (const DeviceError&) {
      return;
    }
  };
  const Finally unreserve{[&] { quietly(driver().unreserve, base, kChunk); }};
  unsigned long long ids[2]{};
  for (auto& id : ids) {
    CUmemGenericAllocationHandle handle = 0;
    driver().create(&handle, kChunk, &kind, 0ull);
    const Finally release{[&] { quietly(driver().release, handle); }};
    driver().map(base, kChunk, 0ul, handle, 0ull);
    const Finally unmap{[&] { quietly(driver().unmap, base, kChunk); }};
    driver().attribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, base);
  }
  return ids[0] != ids[1];
} catch (const DeviceError&) {
  return false;  // a driver without virtual addresses
}

class CudaApi final : public Api {
 public:
  bool simulated() const override { return false; }
  std::string unusable() override {
    int runtime = 0, driver = 0, devices = 0;
    cudaRuntimeGetVersion(&runtime);
    if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) {
      return "there is no NVIDIA driver on this machine";
    }
    const auto error = cudaGetDeviceCount(&devices);
    if (error == cudaErrorInsufficientDriver) {
      return str("the NVIDIA driver is for CUDA ", driver / 1000, ".", driver % 1000 / 10,
                 " and ringcomm needs one for CUDA ", runtime / 1000, ".", runtime % 1000 / 10,
                 " or later: update it");
    }
    if (error != cudaSuccess) return str("cudaGetDeviceCount: ", cudaGetErrorString(error));
    return devices == 0 ? "this process sees no GPU" : "";
  }

  int current_device() override { return result_of("cudaGetDevice", cudaGetDevice); }

  void use_device(int device) override { check(cudaSetDevice(device), "cudaSetDevice"); }
  // A device that nobody uses stays without a context, which would take hundreds of MB there; torch
  // does the same, and remembers which device is the current one.
  void restore_device(int device) noexcept override {
    unsigned flags = 0;
    int active = 0;
    try {
      driver().context(device, &flags, &active);
    } catch (const DeviceError&) {
      active = 1;
    }
    if (active != 0) cudaSetDevice(device);
  }

  DeviceFacts facts(int device) override {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    return {.uuid = std::bit_cast<Uuid>(properties.uuid),
            .memory_bytes = properties.totalGlobalMem,
            .multiprocessors = properties.multiProcessorCount,
            .capability = 10 * properties.major + properties.minor,
            .node = result_of("cudaDeviceGetAttribute", cudaDeviceGetAttribute,
                              cudaDevAttrHostNumaId, device)};
  }

  // NVLink has atomic operations between devices, and PCIe none. Launchers such as Ray show each
  // process its own device alone, and NVML sees the others.
  bool nvlink(int device, const Uuid& other) override {
    const int devices = result_of("cudaGetDeviceCount", cudaGetDeviceCount);
    for (int peer = 0; peer < devices; ++peer) {
      if (peer == device || facts(peer).uuid != other) continue;
      return result_of("cudaDeviceGetP2PAttribute", cudaDeviceGetP2PAttribute,
                       cudaDevP2PAttrNativeAtomicSupported, device, peer) != 0;
    }
    static const Nvml nvml;
    return nvml.nvlink(facts(device).uuid, other);
  }

  std::byte* allocate(uint64_t bytes) override {
    return static_cast<std::byte*>(result_of("cudaMalloc", cudaMalloc, bytes));
  }

  void release(std::byte* memory) override { check(cudaFree(memory), "cudaFree"); }
  std::byte* allocate_pinned(uint64_t bytes) override {
    return static_cast<std::byte*>(result_of("cudaHostAlloc", cudaHostAlloc, bytes,
                                             cudaHostAllocPortable | cudaHostAllocMapped));
  }

  void release_pinned(std::byte* memory) override { check(cudaFreeHost(memory), "cudaFreeHost"); }
  std::byte* register_host(std::byte* memory, uint64_t bytes) override {
    check(cudaHostRegister(memory, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped),
          "cudaHostRegister");
    return static_cast<std::byte*>(
        result_of("cudaHostGetDevicePointer", cudaHostGetDevicePointer, memory, 0));
  }

  void unregister_host(std::byte* memory) override {
    check(cudaHostUnregister(memory), "cudaHostUnregister");
  }

  Allocation allocation_of(const std::byte* address) override {
    CUdeviceptr base = 0;
    size_t bytes = 0;
    uint64_t ipc = 0;  // the header does not say how wide it is
    unsigned long long id = 0;
    driver().range(&base, &bytes, number_of(address));
    driver().attribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, base);
    driver().attribute(&ipc, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, base);
    return {.base = const_cast<std::byte*>(address) - (number_of(address) - base),
            .bytes = bytes,
            .id = id,
            .ipc = ipc != 0};
  }

  uint64_t id_of(const std::byte* address) override {
    unsigned long long id = 0;
    driver().attribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, number_of(address));
    return id;
  }

  bool ids_change() override {
    static const bool change = try_ids(current_device());
    return change;
  }

  Stream make_stream() override {
    int least = 0, greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    return result_of("cudaStreamCreateWithPriority", cudaStreamCreateWithPriority,
                     cudaStreamNonBlocking, greatest);
  }

  void destroy_stream(Stream stream) override {
    check(cudaStreamDestroy(native(stream)), "cudaStreamDestroy");
  }

  void synchronize(Stream stream) override {
    check(cudaStreamSynchronize(native(stream)), "cudaStreamSynchronize");
  }

  uint64_t capture_of(Stream stream) override {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    unsigned long long id = 0;
    const cudaError_t error = cudaStreamGetCaptureInfo(native(stream), &status, &id);
    if (error != cudaSuccess) refuse_capture_elsewhere(cudaGetErrorString(error));
    return status == cudaStreamCaptureStatusNone ? 0 : id;
  }

  bool relax_captures(bool relaxed) noexcept override {
    cudaStreamCaptureMode mode =
        relaxed ? cudaStreamCaptureModeRelaxed : cudaStreamCaptureModeGlobal;
    const cudaError_t error = cudaThreadExchangeStreamCaptureMode(&mode);
    return error == cudaSuccess && mode == cudaStreamCaptureModeRelaxed;
  }

  Event make_event() override {
    return result_of("cudaEventCreateWithFlags", cudaEventCreateWithFlags, cudaEventDisableTiming);
  }

  void destroy_event(Event event) override {
    check(cudaEventDestroy(native_event(event)), "cudaEventDestroy");
  }

  void record(Event event, Stream stream) override {
    check(cudaEventRecord(native_event(event), native(stream)), "cudaEventRecord");
  }

  void wait(Stream stream, Event event) override {
    check(cudaStreamWaitEvent(native(stream), native_event(event), 0), "cudaStreamWaitEvent");
  }

  void copy(Stream stream, std::byte* to, const std::byte* from, uint64_t bytes) override {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, native(stream)), "cudaMemcpyAsync");
  }

  void each_word(Stream stream, std::span<const Word> words) override {
    constexpr size_t kMost = 128;  // the driver takes less than 256
    CUstreamBatchMemOpParams operations[kMost];
    for (size_t done = 0; done < words.size();) {
      const size_t count = std::min(kMost, words.size() - done);
      std::memset(operations, 0, count * sizeof *operations);
      for (size_t i = 0; i < count; ++i) {
        const auto& [at, value, kind] = words[done + i];
        CUstreamBatchMemOpParams& operation = operations[i];
        if (kind == Word::kWait) {
          operation.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
          operation.waitValue.address = number_of(at);
          operation.waitValue.value = static_cast<uint32_t>(value);
          operation.waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
        } else {
          operation.operation = kind == Word::kWrite ? CU_STREAM_MEM_OP_WRITE_VALUE_32
                                                     : CU_STREAM_MEM_OP_WRITE_VALUE_64;
          operation.writeValue.address = number_of(at);
          operation.writeValue.value64 = value;  // of which 32 bits are the lower half
          operation.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
        }
      }
      driver().batch(native(stream), static_cast<unsigned>(count), operations, 0U);
      done += count;
    }
  }

  void launch(Stream stream, const LeaderArgs& args) override {
    launch_leader(stream, args, multiprocessors());
  }

  void launch(Stream stream, const TwoShotArgs& args) override { launch_meeting(stream, args); }
  void launch(Stream stream, const OneShotArgs& args) override { launch_meeting(stream, args); }
  void launch(Stream stream, const LowLatencyArgs& args) override { launch_meeting(stream, args); }
  void launch(Stream stream, const RingArgs& args) override { launch_meeting(stream, args); }
  void load_kernels() override { cuda::load_kernels(); }

  IpcHandle export_memory(std::byte* base) override {
    return std::bit_cast<IpcHandle>(result_of("cudaIpcGetMemHandle", cudaIpcGetMemHandle, base));
  }

  std::byte* open_memory(const IpcHandle& bytes) override {
    const auto handle = std::bit_cast<cudaIpcMemHandle_t>(bytes);
    return static_cast<std::byte*>(result_of("cudaIpcOpenMemHandle", cudaIpcOpenMemHandle, handle,
                                             cudaIpcMemLazyEnablePeerAccess));
  }

  void close_memory(std::byte* base) override {
    check(cudaIpcCloseMemHandle(base), "cudaIpcCloseMemHandle");
  }

  // ---- memory by virtual addresses (torch's expandable segments)

  std::vector<Chunk> export_chunks(std::byte* address, uint64_t bytes, size_t most) override {
    uint64_t types = 0;
    driver().attribute(&types, CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, number_of(address));
    if ((types & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) == 0) return {};
    std::vector<Chunk> chunks;
    const std::byte* const end = address + bytes;
    for (std::byte* at = address; at < end;) {
      if (chunks.size() == most) return {};
      const Allocation piece = allocation_of(at);
      CUmemGenericAllocationHandle handle = 0;
      driver().retain(&handle, static_cast<void*>(piece.base));
      int descriptor = -1;
      try {
        driver().share(&descriptor, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0ull);
      } catch (const DeviceError&) {
        driver().release(handle);
        throw;
      }
      driver().release(handle);
      chunks.push_back({Fd(descriptor), piece.bytes});
      at = piece.base + piece.bytes;
    }
    return chunks;
  }

  std::byte* map_chunks(const std::vector<Chunk>& chunks) override {
    uint64_t bytes = 0;
    for (const Chunk& chunk : chunks) bytes += chunk.bytes;
    CUdeviceptr base = 0;
    driver().reserve(&base, bytes, 0ul, CUdeviceptr{0}, 0ull);
    uint64_t offset = 0;
    try {
      for (const Chunk& chunk : chunks) {
        CUmemGenericAllocationHandle handle = 0;
        const auto descriptor = static_cast<uintptr_t>(chunk.descriptor.get());
        auto* const number = reinterpret_cast<void*>(descriptor);  // NOLINT: so the driver wants it
        driver().import(&handle, number, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
        driver().map(base + offset, chunk.bytes, 0ul, handle, 0ull);
        driver().release(handle);  // the mapping keeps it
        offset += chunk.bytes;
      }
      CUmemAccessDesc access{};
      access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
      access.location.id = current_device();
      access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
      driver().allow(base, bytes, &access, 1ul);
    } catch (const DeviceError&) {
      if (offset > 0) driver().unmap(base, offset);
      driver().unreserve(base, bytes);
      throw;
    }
    return reinterpret_cast<std::byte*>(base);  // NOLINT: so the driver gives it
  }

  void unmap_chunks(std::byte* base, uint64_t bytes) override {
    driver().unmap(number_of(base), bytes);
    driver().unreserve(number_of(base), bytes);
  }

 private:
  int multiprocessors() {
    return result_of("cudaDeviceGetAttribute", cudaDeviceGetAttribute,
                     cudaDevAttrMultiProcessorCount, current_device());
  }
};

}  // namespace

std::unique_ptr<Api> make_api() { return std::make_unique<CudaApi>(); }

}  // namespace ringcomm::cuda
