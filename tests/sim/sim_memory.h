// Memory of a simulated device: memfds, which other processes can map.
//
// Released memory is poisoned, and then cannot be touched until the next allocation of the same
// size is made at the very same address, under another id. It counts as used until the last process
// that has mapped it closes it. Until then, other memory that comes to lie at the address cannot be
// opened there.
#pragma once

#include <atomic>
#include <cstddef>
#include <initializer_list>
#include <map>
#include <mutex>
#include <vector>

#include "device/api.h"
#include "sim/sim_options.h"

namespace ringcomm::sim {

using cuda::Allocation;
using cuda::Chunk;
using cuda::DeviceError;
using cuda::IpcHandle;

inline constexpr std::byte kPoison{0xff};  // NaN in every floating-point type

// The device has another address than the host for registered memory: one that the host cannot
// even touch, so that the host address in the device's place, or the reverse, is noticed.
inline constexpr uintptr_t kDeviceSide = uintptr_t{1} << 62;

class SimMemory {
 public:
  // As cudaMalloc does it, or expandable, of chunks.
  std::byte* allocate(const SimOptions& options, int card, uint64_t bytes);
  void release(std::byte* memory);
  std::byte* allocate_pinned(uint64_t bytes);
  void release_pinned(std::byte* memory);
  std::byte* register_host(std::byte* memory, uint64_t bytes);
  void unregister_host(std::byte* memory);

  Allocation allocation_of(const std::byte* address);
  // Has the chunks in [address, address + bytes) give way to new ones, as torch's expandable
  // segments do with unused memory. `same_ids`: they are called like those before.
  void remap(std::byte* address, uint64_t bytes, bool same_ids);
  // Returns the host's address of [address, address + bytes). Throws the error of `call` for a
  // device's address that is not registered; with `mapped`, also for memory that it cannot read.
  std::byte* host_side(const char* call, const std::byte* address, uint64_t bytes, bool mapped);
  // Is it this process's own memory of that card, or memory of the host that devices reach?
  bool is_own(const std::byte* address, int card);

  IpcHandle export_memory(std::byte* base);
  std::byte* open_memory(const IpcHandle& handle, Ipc fault);
  void close_memory(std::byte* base);
  std::vector<Chunk> export_chunks(std::byte* address, uint64_t bytes, size_t most);
  std::byte* map_chunks(const std::vector<Chunk>& chunks);
  void unmap_chunks(std::byte* base, uint64_t bytes);
  uint64_t used(int card);  // bytes
  uint64_t pinned();        // bytes
  // That the thread preferred which allocated such memory last; -1: none.
  int pinned_node() const { return pinned_node_; }

 private:
  std::atomic<int> pinned_node_{-1};
  enum class Kind { kMalloc, kExpandable, kPinned, kOpened, kMapped };
  struct Region {
    Kind kind = Kind::kMalloc;
    uint64_t bytes = 0;   // asked for
    uint64_t mapped = 0;  // whole pages
    int card = 0;
    uint64_t id = 0;
    std::vector<uint64_t> ids;  // an expandable one's, by chunk
    std::vector<Chunk> chunks;  // this process's own memory
    int opens = 0;              // of a handle
    pid_t exporter = 0;
    uint64_t inode = 0;                 // the exporter's memfd
    const std::byte* theirs = nullptr;  // where it lies there
    std::vector<Fd> held;               // locked while this maps their memory
  };
  using Regions = std::map<std::byte*, Region>;
  struct Released {  // by its owner
    int card;
    Chunk chunk;
  };

  Regions::iterator at_base(const char* call, std::byte* base, std::initializer_list<Kind> kinds);
  Regions::iterator around(const std::byte* address);  // end() where there is none
  std::byte* place(uint64_t mapped);
  void retire(Regions::iterator region);
  void count_released();

  std::mutex mutex_;
  uint64_t next_id_ = 1;
  std::map<int, uint64_t> used_;  // bytes by card
  std::vector<Released> released_;
  Regions regions_;
  std::map<std::byte*, uint64_t> registered_;            // by the host's address
  std::map<uint64_t, std::vector<std::byte*>> retired_;  // addresses by size
};

// Equal for processes on one machine or, in tests, in one network namespace, which stands for one.
uint64_t machine();

}  // namespace ringcomm::sim
