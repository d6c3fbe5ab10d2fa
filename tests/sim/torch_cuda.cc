// Lets a torch without CUDA have a CUDA device: the simulated one. Streams, events, tensors and
// kernels of torch's are there (torch_kernels.h), generators are not. Graphs are, of all but
// torch's kernels. Ringcomm's use of torch's streams can be tested so:
// tests/device/test_device_streams.py.
#include <ATen/ATen.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>
#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <utility>

#include "device/api.h"
#include "sim/api_sim.h"
#include "sim/torch_kernels.h"

namespace c10d {  // where torch's registry has its timers
namespace {

// Takes DDP's notes about its steps: DDP fails without a timer for its device.
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

// Functions of the simulator's library, which is loaded for this module alone.
struct Graphs {
  decltype(&ringcomm_sim_begin_capture) begin_capture = nullptr;
  decltype(&ringcomm_sim_end_capture) end_capture = nullptr;
  decltype(&ringcomm_sim_is_capturing) is_capturing = nullptr;
  decltype(&ringcomm_sim_launch_graph) launch_graph = nullptr;
  decltype(&ringcomm_sim_destroy_graph) destroy_graph = nullptr;
  decltype(&ringcomm_sim_graph_error) error = nullptr;

  void check(bool done) const {
    if (!done) throw std::runtime_error(error());
  }
};
Graphs graphs;

struct Memory {
  void* (*allocate)(uint64_t bytes) = nullptr;
  void (*release)(void* block) = nullptr;
};
Memory memory;

cuda::Stream current_handle() { return reinterpret_cast<cuda::Stream>(current); }

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

// Torch asks these before it takes CUDA for the accelerator of this process, as autograd does.
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

template <typename Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  TORCH_CHECK(function != nullptr, "the simulated device has no ", name);
}

void find_graphs(void* library) {
  find(library, "ringcomm_sim_begin_capture", graphs.begin_capture);
  find(library, "ringcomm_sim_end_capture", graphs.end_capture);
  find(library, "ringcomm_sim_is_capturing", graphs.is_capturing);
  find(library, "ringcomm_sim_launch_graph", graphs.launch_graph);
  find(library, "ringcomm_sim_destroy_graph", graphs.destroy_graph);
  find(library, "ringcomm_sim_graph_error", graphs.error);
}

// Before torch computes on the host, which no graph can do again.
void synchronize_for_kernels() {
  TORCH_CHECK(graphs.is_capturing(current_handle()) == 0,
              "torch's kernels cannot be captured on the simulated device");
  api->synchronize(current_handle());
}

// As torch.cuda.graph() calls them.
int mode_of(const std::string& name) {
  if (name == "global") return 0;
  if (name == "thread_local") return 1;
  if (name == "relaxed") return 2;
  throw std::runtime_error("there is no capture_error_mode " + name);
}

void begin_capture(const std::string& mode) {
  graphs.check(graphs.begin_capture(current_handle(), mode_of(mode)) == 0);
}

uint64_t end_capture() {
  void* const graph = graphs.end_capture(current_handle());
  graphs.check(graph != nullptr);
  return reinterpret_cast<uint64_t>(graph);
}

void launch_graph(uint64_t graph) {
  graphs.check(graphs.launch_graph(reinterpret_cast<void*>(graph), current_handle()) == 0);
}

void destroy_graph(uint64_t graph) { graphs.destroy_graph(reinterpret_cast<void*>(graph)); }

void start(const std::string& path, const std::string& interface) {
  void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  TORCH_CHECK(library != nullptr, ::dlerror());
  const auto function = reinterpret_cast<cuda::ApiFunction>(::dlsym(library, cuda::kApiSymbol));
  cuda::Api* const table = function(interface.c_str());
  TORCH_CHECK(table != nullptr, path, " is of another build");
  find_graphs(library);
  api = table;
  find(library, "ringcomm_sim_allocate", memory.allocate);
  find(library, "ringcomm_sim_release", memory.release);
  c10::impl::registerDeviceGuard(c10::kCUDA, new Guard);
  use_hooks();
  use_kernels(&synchronize_for_kernels);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.attr("interface") = RINGCOMM_INTERFACE;
  module.def("start", &start);
  module.def("cuda_view", &as_cuda);
  module.def("allocate_there", [] { use_allocator(memory.allocate, memory.release); });
  module.def("new_stream", [] { return reinterpret_cast<uint64_t>(api->make_stream()); });
  module.def("use_stream", [](uint64_t stream) {
    return static_cast<uint64_t>(std::exchange(current, static_cast<c10::StreamId>(stream)));
  });
  // These wait for calls of other threads, if not for the device.
  using Unlocked = py::call_guard<py::gil_scoped_release>;
  module.def("synchronize", [] { api->synchronize(current_handle()); }, Unlocked());
  // These act on the current stream. Graphs are numbers.
  module.def("begin_capture", &begin_capture, py::arg("mode") = "global", Unlocked());
  module.def("end_capture", &end_capture, Unlocked());
  module.def("launch_graph", &launch_graph, Unlocked());
  module.def("destroy_graph", &destroy_graph, Unlocked());
}

}  // namespace ringcomm::sim
