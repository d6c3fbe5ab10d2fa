// Lets a torch without CUDA have a CUDA device: the simulated one. Streams, events, tensors and
// kernels of torch's are there (torch_kernels.h), generators and graphs are not. What ringcomm does
// with torch's streams can be tested so: tests/device/test_device_streams.py.
#include <ATen/ATen.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include "device/api.h"
#include "sim/torch_kernels.h"

namespace c10d {  // where torch's registry has its timers
namespace {

// What DDP notes of its steps: DDP fails without a timer for its device.
class SimulatedTimer final : public Timer {
 public:
  explicit SimulatedTimer(c10::Device) {}

  void record(Event event) override { getTimeRef(event) = current_time_in_nanos(); }
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};

C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, SimulatedTimer)

}  // namespace
}  // namespace c10d

namespace ringcomm::sim {
namespace {

namespace py = pybind11;

cuda::Api* api = nullptr;
thread_local c10::StreamId current = 0;  // a stream's number is its handle; 0: the default stream

cuda::Stream handle(const c10::Stream& stream) {
  return reinterpret_cast<cuda::Stream>(stream.id());
}

c10::Stream stream_of(c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, 0), id);
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Device getDevice() const override { return c10::Device(c10::kCUDA, 0); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return stream_of(current); }
  c10::Stream getDefaultStream(c10::Device) const override { return stream_of(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    static const cuda::Stream pool = api->make_stream();
    return stream_of(reinterpret_cast<c10::StreamId>(pool));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return stream_of(std::exchange(current, stream.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return handle(stream); }
  void synchronizeStream(const c10::Stream& stream) const override {
    api->synchronize(handle(stream));
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    if (*event == nullptr) *event = api->make_event();
    api->record(*event, handle(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) api->wait(handle(stream), event);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    if (event != nullptr) api->destroy_event(event);
  }
};

// What torch asks before it takes CUDA for the accelerator of this process, as autograd does.
class Hooks final : public at::CUDAHooksInterface {
 public:
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex current_device() const override { return 0; }
  bool isPinnedPtr(const void*) const override { return false; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
};

// torch has made its own when it was imported, and asks no registry again: so these are made in
// their place.
void use_hooks() {
  static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface), "they have state");
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks;
}

void start(const std::string& path, const std::string& interface) {
  void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  TORCH_CHECK(library != nullptr, ::dlerror());
  const auto function = reinterpret_cast<cuda::ApiFunction>(::dlsym(library, cuda::kApiSymbol));
  cuda::Api* const found = function(interface.c_str());
  TORCH_CHECK(found != nullptr, path, " is of another build");
  api = found;
  c10::impl::registerDeviceGuard(c10::kCUDA, new Guard);
  use_hooks();
  use_kernels([] { api->synchronize(reinterpret_cast<cuda::Stream>(current)); });
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.attr("interface") = RINGCOMM_INTERFACE;
  module.def("start", &start);
  module.def("cuda_view", &as_cuda);
  module.def("new_stream", [] { return reinterpret_cast<uint64_t>(api->make_stream()); });
  module.def("use_stream", [](uint64_t stream) {
    return static_cast<uint64_t>(std::exchange(current, static_cast<c10::StreamId>(stream)));
  });
  module.def(
      "synchronize", [] { api->synchronize(reinterpret_cast<cuda::Stream>(current)); },
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace ringcomm::sim
