#include "sim/api_sim.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "sim/arguments.h"
#include "sim/kernels_host.h"
#include "sim/sim_process.h"
#include "sim/sim_slices.h"

namespace ringcomm::sim {
namespace {

using namespace cuda;

constexpr int kRuntime = 13000;  // CUDA 13.0
constexpr const char* kLaunch = "cudaLaunchKernel";

class KernelMemory final : public Memory {
 public:
  explicit KernelMemory(Slices* slices) : slices_(slices) {}
  void pause() override { slices_ ? slices_->pause() : Memory::pause(); }

 private:
  Slices* const slices_;
};

class SimApi final : public Api {
 public:
  explicit SimApi(const SimOptions& options)
      : options_(options), faults_(std::make_shared<Faults>(options)) {
    Process::get().streams.set_limits(options.connections, options.commands);
  }

  bool simulated() const override { return options_.stand_ins; }

  // ---- devices ---------------------------------------------------------------------------------

  std::string unusable() override {
    if (options_.driver == 0) return "there is no NVIDIA driver on this machine";
    if (options_.driver < kRuntime) {
      return str("the NVIDIA driver is for CUDA ", options_.driver / 1000, ".",
                 options_.driver % 1000 / 10, " and ringcomm was built with CUDA ", kRuntime / 1000,
                 ".", kRuntime % 1000 / 10, ": update the driver");
    }
    try {
      enter("cudaGetDeviceCount");
    } catch (const DeviceError& error) {
      return error.what();
    }
    return "";
  }

  int current_device() override {
    enter("cudaGetDevice");
    return device_of_thread;
  }

  void use_device(int device) override {
    enter("cudaSetDevice");
    if (device < 0 || device >= options_.devices) {
      throw DeviceError("cudaSetDevice: invalid device ordinal");
    }
    device_of_thread = device;
  }

  void restore_device(int device) noexcept override { device_of_thread = device; }

  DeviceFacts facts(int device) override {
    enter("cudaGetDeviceProperties");
    if (device < 0 || device >= options_.devices) {
      throw DeviceError("cudaGetDeviceProperties: invalid device ordinal");
    }
    DeviceFacts facts;
    const std::array<uint64_t, 2> name{machine(), static_cast<uint64_t>(card_of(device))};
    std::memcpy(facts.uuid.data(), name.data(), facts.uuid.size());
    facts.memory_bytes = options_.memory_bytes;
    facts.multiprocessors = options_.multiprocessors;
    facts.capability = 90, facts.node = options_.node;
    return facts;
  }

  bool nvlink(int, const Uuid&) override { return options_.nvlink; }

  // ---- memory ----------------------------------------------------------------------------------

  std::byte* allocate(uint64_t bytes) override {
    const Entered process = enter_unsafe("cudaMalloc");
    process.pass();
    return process->memory.allocate(options_, card_of(device_of_thread), bytes);
  }

  // A call that unmaps memory may wait for all work on the device: this one always does, so that a
  // program hangs here that would hang somewhere.
  void release(std::byte* memory) override {
    const Entered process = enter_unsafe("cudaFree");
    process->streams.drain(device_of_thread);
    process->memory.release(memory);
  }

  std::byte* allocate_pinned(uint64_t bytes) override {
    return enter_unsafe("cudaMallocHost").pass()->memory.allocate_pinned(bytes);
  }

  void release_pinned(std::byte* memory) override {
    const Entered process = enter_unsafe("cudaFreeHost");
    process->streams.drain(device_of_thread);
    process->memory.release_pinned(memory);
  }

  std::byte* register_host(std::byte* memory, uint64_t bytes) override {
    const Entered process = enter_unsafe("cudaHostRegister");
    if (!options_.register_host) throw DeviceError("cudaHostRegister: operation not supported");
    return process.pass()->memory.register_host(memory, bytes);
  }

  void unregister_host(std::byte* memory) override {
    const Entered process = enter_unsafe("cudaHostUnregister");
    process->streams.drain(device_of_thread);
    process->memory.unregister_host(memory);
  }

  Allocation allocation_of(const std::byte* address) override {
    const Entered process = enter("cudaPointerGetAttributes");
    process->asked += 3;  // its range, its id, and whether it can be exported
    return process->memory.allocation_of(address);
  }

  uint64_t id_of(const std::byte* address) override {
    const Entered process = enter("cudaPointerGetAttributes");
    ++process->asked;
    return process->memory.allocation_of(address).id;
  }

  bool ids_change() override {
    SimOptions options = options_;
    options.chunk_bytes = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
    SimMemory& memory = enter("cuMemMap")->memory;
    std::byte* const chunk = memory.allocate(options, card_of(device_of_thread), 1);
    const uint64_t before = memory.allocation_of(chunk).id;
    memory.remap(chunk, 1, options.same_ids);
    const bool change = memory.allocation_of(chunk).id != before;
    memory.release(chunk);
    return change;
  }

  // ---- streams and events ----------------------------------------------------------------------

  Stream make_stream() override {
    return enter("cudaStreamCreate").pass()->streams.make(device_of_thread);
  }

  uint64_t capture_of(Stream stream) override {
    constexpr const char* kCall = "cudaStreamGetCaptureInfo";
    const Entered process = enter(kCall);
    if (captures_asked_++ < options_.capture_fails ||
        (stream == nullptr && process->graphs.captures_globally())) {
      refuse_capture_elsewhere("operation would make the legacy stream depend on a capture");
    }
    if (stream == nullptr) return 0;
    return process->graphs.capture_of(process->streams.find(kCall, stream, device_of_thread));
  }

  bool relax_captures(bool relaxed) noexcept override {
    return std::exchange(thread_relaxed, relaxed);
  }

  void destroy_stream(Stream stream) override {
    constexpr const char* kCall = "cudaStreamDestroy";
    const Entered process = enter(kCall);
    process->graphs.refuse(kCall, process->streams.find(kCall, stream, device_of_thread));
    process->streams.destroy(stream);
  }

  void synchronize(Stream stream) override {
    constexpr const char* kCall = "cudaStreamSynchronize";
    StreamPtr target;
    {
      const Entered process = enter(kCall);
      target = process->streams.find(kCall, stream, device_of_thread);
      process->graphs.refuse(kCall, target);
    }
    target->wait_for_all();  // others may call meanwhile
    Process::get().check(kCall);
  }

  Event make_event() override {
    return enter("cudaEventCreate")->streams.make_event(device_of_thread);
  }

  void destroy_event(Event event) override {
    const Entered process = enter("cudaEventDestroy");
    process->streams.destroy_event(event);
    process->graphs.forget(event);
  }

  void record(Event event, Stream stream) override {
    constexpr const char* kCall = "cudaEventRecord";
    const Entered process = enter(kCall);
    SimStreams& streams = process->streams;
    const auto target = streams.find(kCall, stream, device_of_thread);
    if (streams.device_of(kCall, event) != target->device) {
      throw DeviceError("cudaEventRecord: invalid resource handle");
    }
    if (process->graphs.record(event, target, {faults_, {}, [] {}})) return;
    streams.record(event, target, enqueue(target, {kCall, process->memory}, [] {}));
  }

  void wait(Stream stream, Event event) override {
    constexpr const char* kCall = "cudaStreamWaitEvent";
    const Entered process = enter(kCall);
    SimStreams& streams = process->streams;
    const auto target = streams.find(kCall, stream, device_of_thread);
    auto operation = streams.waiter(event);
    if (process->graphs.wait(event, target, stream == nullptr)) operation = [] {};  // nodes' order
    enqueue(target, {kCall, process->memory}, std::move(operation));
  }

  // ---- work of streams -------------------------------------------------------------------------

  void copy(Stream stream, std::byte* to, const std::byte* from, uint64_t bytes) override {
    constexpr const char* kCall = "cudaMemcpyAsync";
    const Entered process = enter(kCall);
    ++process->copies;
    Addresses addresses(kCall, process->memory);
    std::byte* dst = addresses.host_side(to, bytes, false);
    const std::byte* src = addresses.host_side(from, bytes, false);
    enqueue(process->streams.find(kCall, stream, device_of_thread), addresses, [dst, src, bytes] {
      std::memmove(dst, src, bytes);
      ++Process::get().copied;
    });
  }

  void each_word(Stream stream, std::span<const Word> words) override {
    for (const auto& [at, value, kind] : words) {
      if (kind == Word::kWrite64) {
        write_to("cuStreamWriteValue64", stream, at, value);
      } else if (kind == Word::kWait) {
        wait_for(stream, at, static_cast<uint32_t>(value));
      } else {
        write_to("cuStreamWriteValue32", stream, at, static_cast<uint32_t>(value));
      }
    }
  }

  void launch(Stream stream, const LeaderArgs& args) override {
    LeaderArgs host = args;
    Addresses to_host = arguments();
    for (int i = 0; i < args.n_ranks; ++i) to_host(host.slot[i], sizeof(LeaderSlot));
    for (uint64_t* const operand : {&host.own.input, &host.own.output}) {
      auto* at = reinterpret_cast<std::byte*>(*operand);
      to_host(at, 1);
      *operand = reinterpret_cast<uint64_t>(at);
    }
    to_host(host.abort, sizeof *host.abort, true);
    enqueue_kernel(stream, to_host, [host](Memory& memory) mutable {
      if (host.abort != nullptr && std::atomic_ref(const_cast<uint32_t&>(*host.abort)) != 0) return;
      // Now they are filled in; they may be addresses of registered memory, too.
      const auto host_side = [](LeaderSlot& slot) {
        slot.input &= ~kDeviceSide;
        slot.output &= ~kDeviceSide;
      };
      std::array<LeaderSlot, kMostRanks> slots;
      for (size_t i = 0; i < slots.size(); ++i) {
        if (host.slot[i] == nullptr) continue;
        slots[i] = *host.slot[i];
        host_side(slots[i]);
        host.slot[i] = &slots[i];
      }
      run_leader(host, memory);
    });
  }

  void launch(Stream stream, const TwoShotArgs& args) override { launch_blocks(stream, args); }
  void launch(Stream stream, const OneShotArgs& args) override { launch_blocks(stream, args); }
  void launch(Stream stream, const LowLatencyArgs& args) override { launch_blocks(stream, args); }
  void launch(Stream stream, const RingArgs& args) override { launch_blocks(stream, args); }

  // As loading may do, the first time this waits for all work.
  void load_kernels() override {
    const Entered process = enter("cudaFuncGetAttributes");
    if (!kernels_loaded_.exchange(true)) process->streams.drain(device_of_thread);
  }

  // ---- memory of other processes ---------------------------------------------------------------

  IpcHandle export_memory(std::byte* base) override {
    return enter("cudaIpcGetMemHandle")->memory.export_memory(base);
  }

  std::byte* open_memory(const IpcHandle& handle) override {
    const Entered process = enter_unsafe("cudaIpcOpenMemHandle");
    const bool fails = options_.ipc_opens >= 0 && opens_++ >= options_.ipc_opens;
    return process->memory.open_memory(handle, fails ? Ipc::kFails : options_.ipc);
  }

  void close_memory(std::byte* base) override {
    const Entered process = enter_unsafe("cudaIpcCloseMemHandle");
    process->streams.drain(device_of_thread);
    process->memory.close_memory(base);
  }

  std::vector<Chunk> export_chunks(std::byte* address, uint64_t bytes, size_t most) override {
    constexpr const char* kCall = "cuMemExportToShareableHandle";
    const Entered process = enter(kCall);
    if (!options_.chunk_exports) throw DeviceError(str(kCall, ": operation not supported"));
    return process->memory.export_chunks(address, bytes, most);
  }

  std::byte* map_chunks(const std::vector<Chunk>& chunks) override {
    return enter_unsafe("cuMemMap")->memory.map_chunks(chunks);
  }

  void unmap_chunks(std::byte* base, uint64_t bytes) override {
    enter_unsafe("cuMemUnmap")->memory.unmap_chunks(base, bytes);
  }

 private:
  void launch_blocks(Stream stream, const auto& args) {
    auto host = args;
    Addresses to_host = arguments();
    set_host_side(to_host, host);
    enqueue_kernel(stream, to_host, [host](Memory& memory) { run_blocks(host, memory); });
  }
  Entered enter(const char* call) const {
    if (options_.driver < kRuntime) {
      throw DeviceError(
          str(call, ": CUDA driver version is insufficient for CUDA runtime version"));
    }
    Process& process = Process::get();
    process.check_owner(call);
    Entered entered(process);
    process.check(call);
    return entered;
  }

  // For calls that a capture may forbid.
  Entered enter_unsafe(const char* call) const {
    Entered process = enter(call);
    process->graphs.refuse_unsafe(call);
    return process;
  }

  uint64_t enqueue(const StreamPtr& stream, const Addresses& addresses,
                   std::function<void()> operation) {
    return Process::get().graphs.enqueue(addresses.call(), stream,
                                         {faults_, addresses.uses(), std::move(operation)});
  }

  template <typename Number>
  void write_to(const char* call, Stream stream, std::byte* word, Number value) {
    // Pairs with wait_for() of other processes, and with the way their hosts read it.
    enqueue_word<Number>(call, stream, word, [value](Number* at) {
      std::atomic_ref(*at).store(value, std::memory_order_seq_cst);
    });
  }

  void wait_for(Stream stream, std::byte* word, uint32_t value) {
    enqueue_word<uint32_t>("cuStreamWaitValue32", stream, word,
                           [value, device = device_of_thread](uint32_t* at) {
                             Process::get().streams.wait_for_word(device, at, value);
                           });
  }

  template <typename Number>
  void enqueue_word(const char* call, Stream stream, std::byte* word,
                    std::function<void(Number*)> operation) {
    const Entered process = enter(call);
    if (!options_.memory_operations) throw DeviceError(str(call, ": operation not supported"));
    Addresses addresses(call, process->memory);
    const bool mapped = sizeof(Number) == 4;  // 64 bits: also the device's own memory
    std::byte* host = addresses.host_side(word, sizeof(Number), mapped);
    // CUDA 13.1 and later refuse memory of another device. To see it on one card, too, memory of
    // another process is refused.
    if (!process->memory.is_own(word, card_of(device_of_thread)))
      throw DeviceError(str(call, ": invalid argument"));
    auto* at = reinterpret_cast<Number*>(host);
    if (reinterpret_cast<uintptr_t>(at) % sizeof *at != 0) {
      throw DeviceError(str(call, ": invalid argument"));
    }
    enqueue(process->streams.find(call, stream, device_of_thread), addresses,
            [at, operation = std::move(operation)] { operation(at); });
  }

  // Addresses in a kernel's arguments: a call of it puts the host's address in their place.
  Addresses arguments() const { return {kLaunch, enter(kLaunch)->memory}; }

  void enqueue_kernel(Stream stream, const Addresses& addresses,
                      std::function<void(Memory&)> kernel) {
    const Entered process = enter(kLaunch);
    const auto target = process->streams.find(kLaunch, stream, device_of_thread);
    if (target->device != device_of_thread) {
      throw DeviceError("cudaLaunchKernel: invalid resource handle");
    }
    load_kernels();
    const auto slices = Slices::of(options_.slices, card_of(device_of_thread));
    enqueue(target, addresses, [slices, kernel = std::move(kernel)] {
      const Slice slice(slices);
      KernelMemory memory(slices.get());
      kernel(memory);
    });
  }

  int card_of(int device) const { return (device + options_.rotate) % options_.devices; }

  const SimOptions options_;
  const std::shared_ptr<Faults> faults_;
  std::atomic<int64_t> opens_{0}, captures_asked_{0};
  std::atomic<bool> kernels_loaded_{false};
};

}  // namespace

std::unique_ptr<Api> make_simulated_api(const SimOptions& options) {
  return std::make_unique<SimApi>(options);
}

}  // namespace ringcomm::sim

namespace ringcomm::cuda {

std::unique_ptr<Api> make_api() {
  sim::SimOptions options = sim::SimOptions::from_environment();
  options.chunk_bytes = 0;  // cudaMalloc's memory has none
  return sim::make_simulated_api(options);
}

}  // namespace ringcomm::cuda
