// ringcomm's view of a device: a table of functions. Two things may be behind it: the CUDA
// runtime (api_cuda.cc) and, in a test-only library, a device simulated by host threads
// (tests/sim). Every failure is a DeviceError: "cudaIpcOpenMemHandle: invalid argument".
//
// Any thread may call any function; those without a stream act on the calling thread's device.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <string_view>

#include "base/fd.h"
#include "device/kernel_args.h"
#include "plan/spans.h"

namespace ringcomm::cuda {

struct DeviceError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

using Event = void*;  // cudaEvent_t, without timing
using Uuid = std::array<uint8_t, 16>;
inline Uuid salted(Uuid uuid, uint8_t salt) {
  uuid.back() ^= salt;
  return uuid;
}
inline uint64_t hash_of(const Uuid& uuid) {  // never 0
  return std::hash<std::string_view>()({reinterpret_cast<const char*>(uuid.data()), uuid.size()}) |
         1;
}
using IpcHandle = std::array<std::byte, 64>;

struct Word {
  enum Kind : uint8_t { kWrite, kWait, kWrite64 };
  std::byte* at;
  uint64_t value;
  Kind kind = kWrite;
};

struct DeviceFacts {
  Uuid uuid{};  // of the card, or of the slice of it (MIG): indices mean nothing
  uint64_t memory_bytes = 0;
  int multiprocessors = 1;
  int capability = 0;  // 90 is sm_90
  int node = -1;       // NUMA node of the host beside it; -1: not known
};

// The allocation that an address lies in. `id` is never used again in this process, so memory that
// was freed and allocated anew at the same address is known as such.
struct Allocation {
  std::byte* base = nullptr;
  uint64_t bytes = 0;
  uint64_t id = 0;
  bool ipc = false;  // export_memory() takes it: cudaMalloc's, not that of virtual addresses
  bool operator==(const Allocation&) const = default;
};

// Physical memory behind a range of virtual addresses (expandable segments), piece by piece.
struct Chunk {
  Fd descriptor;
  uint64_t bytes = 0;
};

// Error 906 of CUDA's says nothing about the group whose call asked.
[[noreturn]] inline void refuse_capture_elsewhere(const char* error) {
  throw UsageError(str("cudaStreamIsCapturing: ", error, ": does another thread capture a CUDA ",
                       "graph? Call ringcomm outside of that, or capture thread_local"));
}

class Api {
 public:
  virtual ~Api() = default;

  // By ringcomm_device_salt(): ranks with different ones take their device for one of their own.
  std::atomic<uint8_t> salt{0};

  virtual bool simulated() const = 0;
  // Returns one sentence that says why no device can be used (no driver, or one too old), or "".
  // Call it first.
  virtual std::string unusable() = 0;
  virtual int current_device() = 0;
  virtual void use_device(int device) = 0;               // for the calling thread
  virtual void restore_device(int device) noexcept = 0;  // back to it
  virtual DeviceFacts facts(int device) = 0;
  // Tells whether NVLink joins them. This process need not see the other one.
  virtual bool nvlink(int device, const Uuid& other) = 0;

  // Allocates memory of the device, or of the host such that the device can read and write it.
  virtual std::byte* allocate(uint64_t bytes) = 0;
  virtual void release(std::byte* memory) = 0;
  virtual std::byte* allocate_pinned(uint64_t bytes) = 0;  // the same address on both sides
  virtual void release_pinned(std::byte* memory) = 0;
  // Makes mapped memory of the host the device's too; returns its address there.
  virtual std::byte* register_host(std::byte* memory, uint64_t bytes) = 0;
  virtual void unregister_host(std::byte* memory) = 0;
  virtual Allocation allocation_of(const std::byte* address) = 0;  // several calls of the driver
  virtual uint64_t id_of(const std::byte* address) = 0;            // one; 0: no memory is there
  // Tells whether memory has another id than other memory that was mapped at its address before.
  // CUDA does not promise it for virtual addresses, so the first call tries it.
  virtual bool ids_change() = 0;

  virtual Stream make_stream() = 0;  // of high priority, independent of the default stream
  virtual void destroy_stream(Stream stream) = 0;
  virtual void synchronize(Stream stream) = 0;
  // Returns the capture of a CUDA graph that the stream takes part in: 0 for none, else an id that
  // no other capture of this process has. Throws UsageError where that cannot be told.
  virtual uint64_t capture_of(Stream stream) = 0;
  // Relaxes the thread's mode, or not: while a graph is captured CUDA refuses calls that allocate,
  // map or wait in any other mode. Returns whether it was relaxed.
  virtual bool relax_captures(bool relaxed) noexcept = 0;
  virtual Event make_event() = 0;
  virtual void destroy_event(Event event) = 0;
  virtual void record(Event event, Stream stream) = 0;
  virtual void wait(Stream stream, Event event) = 0;

  // Enqueues a copy between any two memories that this process can address.
  virtual void copy(Stream stream, std::byte* to, const std::byte* from, uint64_t bytes) = 0;
  // Enqueues memory operations on words of registered or pinned host memory, by their device
  // address, in order. A write comes after all that is before it in the stream, which is visible to
  // all that see the value. A wait ends when (int32)(word - value) >= 0; the host does not wait. 64
  // bits are also written to memory of the stream's device, and of no other: CUDA 13.1 refuses
  // that.
  virtual void each_word(Stream stream, std::span<const Word> words) = 0;
  void write(Stream stream, std::byte* word, uint32_t value) {
    each_word(stream, std::array{Word{word, value, Word::kWrite}});
  }
  void wait_until(Stream stream, std::byte* word, uint32_t value) {
    each_word(stream, std::array{Word{word, value, Word::kWait}});
  }
  virtual void launch(Stream stream, const LeaderArgs& args) = 0;
  virtual void launch(Stream stream, const TwoShotArgs& args) = 0;
  virtual void launch(Stream stream, const OneShotArgs& args) = 0;
  virtual void launch(Stream stream, const LowLatencyArgs& args) = 0;
  virtual void launch(Stream stream, const RingArgs& args) = 0;
  // Loads all kernels: loading one later may wait for a stream that waits for a peer.
  virtual void load_kernels() = 0;

  // Memory of other processes. A handle is opened in another process than its own, once.
  virtual IpcHandle export_memory(std::byte* base) = 0;
  virtual std::byte* open_memory(const IpcHandle& handle) = 0;
  virtual void close_memory(std::byte* base) = 0;
  // Exports the chunks that cover [address, address + bytes), the first of them from its begin.
  // Returns none where the memory cannot be exported so, or takes more than `most` of them.
  virtual std::vector<Chunk> export_chunks(std::byte* address, uint64_t bytes, size_t most) = 0;
  virtual std::byte* map_chunks(const std::vector<Chunk>& chunks) = 0;
  virtual void unmap_chunks(std::byte* base, uint64_t bytes) = 0;  // of all of them
};

std::unique_ptr<Api> make_api();  // in such a library: cuda/api_cuda.cc, tests/sim/api_sim.cc

// The symbol in a library that has such a table: never destroyed. `interface`, a hash of all
// headers (RINGCOMM_INTERFACE), must be the library's, else null: C++ types cross this line.
inline constexpr const char* kApiSymbol = "ringcomm_device_api";
using ApiFunction = Api* (*)(const char* interface);

// Calls copy(to, from, bytes) for all that two lists of memory do not have in the same place.
void copy_each(const Spans& to, uint64_t at, const Spans& from, uint64_t first, uint64_t bytes,
               auto&& copy) {
  while (bytes > 0) {
    const Span into = to.at(at), out = from.at(first);
    const uint64_t piece = std::min({bytes, into.bytes, out.bytes});
    if (into.data != out.data) copy(into.data, out.data, piece);
    at += piece;
    first += piece;
    bytes -= piece;
  }
}

// The thread's device, for a scope.
class OnDevice {
 public:
  OnDevice(Api& api, int device) : api_(api), before_(api.current_device()), device_(device) {
    api_.use_device(device_);  // a thread may not have used it yet: the driver asks for that
  }
  ~OnDevice() {
    if (before_ != device_) api_.restore_device(before_);
  }
  OnDevice(const OnDevice&) = delete;

 private:
  Api& api_;
  const int before_, device_;
};

}  // namespace ringcomm::cuda
