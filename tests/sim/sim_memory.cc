#include "sim/sim_memory.h"

#include <fcntl.h>
#include <linux/mempolicy.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cstring>

namespace ringcomm::sim {
namespace {

// The 64 bytes of a handle. The peer opens /proc/PID/fd/N.
struct Exported {
  uint64_t machine, inode, bytes, mapped;
  const std::byte* base;
  int32_t pid, fd, card;
};
static_assert(sizeof(Exported) <= sizeof(IpcHandle));

[[noreturn]] void refuse(const std::string& what) {
  throw DeviceError(str(what, ": ", std::strerror(errno)));
}

uint64_t round_up(uint64_t bytes, uint64_t unit) { return (bytes + unit - 1) / unit * unit; }

uint64_t page() { return static_cast<uint64_t>(::sysconf(_SC_PAGESIZE)); }

Chunk make_chunk(uint64_t bytes) {
  Chunk chunk{Fd(::memfd_create("ringcomm-sim", MFD_CLOEXEC)), bytes};
  if (!chunk.descriptor || ::ftruncate(chunk.descriptor.get(), static_cast<off_t>(bytes)) != 0) {
    refuse(str("simulated device memory of ", bytes, " bytes"));
  }
  return chunk;
}

// A forked child has no memory of its parent's device.
void map_at(std::byte* at, const Chunk& chunk) {
  if (::mmap(at, chunk.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
             chunk.descriptor.get(), 0) == MAP_FAILED ||
      ::madvise(at, chunk.bytes, MADV_DONTFORK) != 0) {
    refuse("mapping simulated device memory");
  }
}

uint64_t inode_of(const Fd& fd) {
  struct stat status{};
  return ::fstat(fd.get(), &status) == 0 ? status.st_ino : 0;
}

// A lock is a process's own only by a file that it has opened itself, and ends with the process.
Fd open_locked(const std::string& path) {
  Fd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  struct flock whole{};
  whole.l_type = F_RDLCK;
  if (fd && ::fcntl(fd.get(), F_OFD_SETLK, &whole) != 0) refuse("locking simulated device memory");
  return fd;
}

bool is_locked(const Fd& fd) {
  struct flock whole{};
  whole.l_type = F_WRLCK;
  if (::fcntl(fd.get(), F_OFD_GETLK, &whole) != 0) refuse("a lock of simulated device memory");
  return whole.l_type != F_UNLCK;
}

Exported decode(const IpcHandle& handle) {
  Exported exported{};
  std::memcpy(&exported, handle.data(), sizeof exported);
  return exported;
}

}  // namespace

uint64_t machine() {
  struct stat status{};
  return ::stat("/proc/self/ns/net", &status) == 0 ? status.st_ino : 0;
}

// ---- allocation ---------------------------------------------------------------------------------

std::byte* SimMemory::allocate(const SimOptions& options, int card, uint64_t bytes) {
  if (bytes == 0) return nullptr;
  const uint64_t unit = options.chunk_bytes == 0 ? page() : options.chunk_bytes;
  Region region;
  region.kind = options.chunk_bytes == 0 ? Kind::kMalloc : Kind::kExpandable;
  region.bytes = bytes;
  region.mapped = round_up(bytes, unit);
  region.card = card;
  const uint64_t chunk = options.chunk_bytes == 0 ? region.mapped : options.chunk_bytes;

  const std::lock_guard lock(mutex_);
  count_released();
  if (used_[card] + region.mapped > options.memory_bytes) {
    throw DeviceError("cudaMalloc: out of memory");
  }
  std::byte* base = place(region.mapped);
  for (uint64_t done = 0; done < region.mapped; done += chunk) {
    region.chunks.push_back(make_chunk(chunk));
    map_at(base + done, region.chunks.back());
  }
  std::memset(base, static_cast<int>(kPoison), region.mapped);
  used_[card] += region.mapped;
  for (size_t i = 0; i < region.chunks.size(); ++i) region.ids.push_back(next_id_++);
  region.id = region.ids[0];
  regions_[base] = std::move(region);
  return base;
}

void SimMemory::release(std::byte* memory) {
  if (memory == nullptr) return;
  const std::lock_guard lock(mutex_);
  const auto region = at_base("cudaFree", memory, {Kind::kMalloc, Kind::kExpandable});
  std::memset(memory, static_cast<int>(kPoison), region->second.mapped);  // peers may map it still
  for (const Chunk& chunk : region->second.chunks) {  // a handle names the old number
    Fd again(::fcntl(chunk.descriptor.get(), F_DUPFD_CLOEXEC, 0));
    if (!again) refuse("dup");
    released_.push_back({region->second.card, {std::move(again), chunk.bytes}});
  }
  retire(region);
  count_released();
}

// Counts memory as free that nobody maps any more.
void SimMemory::count_released() {
  std::erase_if(released_, [&](const Released& released) {
    if (is_locked(released.chunk.descriptor)) return false;
    used_[released.card] -= released.chunk.bytes;
    return true;
  });
}

uint64_t SimMemory::used(int card) {
  const std::lock_guard lock(mutex_);
  count_released();
  return used_[card];
}

uint64_t SimMemory::pinned() {
  const std::lock_guard lock(mutex_);
  uint64_t bytes = 0;
  for (const auto& [base, region] : regions_) {
    if (region.kind == Kind::kPinned) bytes += region.mapped;
  }
  return bytes;
}

int preferred_node() {
  int mode = MPOL_DEFAULT;
  unsigned long nodes[16]{};
  ::syscall(SYS_get_mempolicy, &mode, nodes, 8 * sizeof nodes, nullptr, 0);
  return mode == MPOL_PREFERRED && nodes[0] != 0 ? std::countr_zero(nodes[0]) : -1;
}

std::byte* SimMemory::allocate_pinned(uint64_t bytes) {
  pinned_node_ = preferred_node();
  Region region;
  region.kind = Kind::kPinned;
  region.bytes = bytes;
  region.mapped = round_up(std::max<uint64_t>(bytes, 1), page());
  const std::lock_guard lock(mutex_);
  std::byte* base = place(region.mapped);
  map_at(base, make_chunk(region.mapped));
  std::memset(base, static_cast<int>(kPoison), region.mapped);
  region.id = next_id_++;
  regions_[base] = std::move(region);
  return base;
}

void SimMemory::release_pinned(std::byte* memory) {
  if (memory == nullptr) return;
  const std::lock_guard lock(mutex_);
  retire(at_base("cudaFreeHost", memory, {Kind::kPinned}));
}

// Returns an unused address: the one that was released last, of this size.
std::byte* SimMemory::place(uint64_t mapped) {
  std::vector<std::byte*>& again = retired_[mapped];
  if (!again.empty()) {
    std::byte* base = again.back();
    again.pop_back();
    return base;
  }
  void* at = ::mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) refuse("mmap");
  return static_cast<std::byte*>(at);
}

void SimMemory::retire(Regions::iterator region) {
  const auto [base, mapped] = std::pair(region->first, region->second.mapped);
  if (::mmap(base, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
             0) == MAP_FAILED) {
    refuse("mmap");
  }
  regions_.erase(region);
  retired_[mapped].push_back(base);
}

// ---- addresses ----------------------------------------------------------------------------------

std::byte* SimMemory::register_host(std::byte* memory, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto after = registered_.lower_bound(memory + bytes);
  if (after != registered_.begin() && std::prev(after)->first + std::prev(after)->second > memory) {
    throw DeviceError(
        "cudaHostRegister: part or all of the requested memory range is already mapped");
  }
  registered_[memory] = bytes;
  return memory + kDeviceSide;
}

void SimMemory::unregister_host(std::byte* memory) {
  const std::lock_guard lock(mutex_);
  if (registered_.erase(memory) == 0) {
    throw DeviceError(
        "cudaHostUnregister: pointer does not correspond to a registered memory region");
  }
}

std::byte* SimMemory::host_side(const char* call, const std::byte* address, uint64_t bytes,
                                bool mapped) {
  const bool registered = (reinterpret_cast<uintptr_t>(address) & kDeviceSide) != 0;
  auto* host = const_cast<std::byte*>(registered ? address - kDeviceSide : address);
  const std::lock_guard lock(mutex_);
  const auto covers = [&](const std::byte* base, uint64_t size) {
    return host >= base && host + bytes <= base + size;
  };
  if (registered) {
    const auto after = registered_.upper_bound(host);
    if (after != registered_.begin() && covers(std::prev(after)->first, std::prev(after)->second)) {
      return host;
    }
  } else {
    const auto region = around(host);
    const bool pinned = region != regions_.end() && region->second.kind == Kind::kPinned &&
                        covers(region->first, region->second.bytes);
    if (pinned || !mapped) return host;
  }
  throw DeviceError(str(call, ": invalid argument"));
}

Allocation SimMemory::allocation_of(const std::byte* address) {
  const std::lock_guard lock(mutex_);
  const auto entry = around(address);
  // Other tensors of a torch without CUDA stand in for a device's, too: in no known allocation.
  if (entry == regions_.end()) return {};
  const auto& [base, region] = *entry;
  if (region.kind != Kind::kExpandable) {
    return {base, region.bytes, region.id, region.kind == Kind::kMalloc};
  }
  // The driver knows chunks, not ranges made of several.
  const uint64_t chunk = region.chunks.front().bytes;
  const uint64_t index = static_cast<uint64_t>(address - base) / chunk;
  return {base + index * chunk, chunk, region.ids[index], false};
}

void SimMemory::remap(std::byte* address, uint64_t bytes, bool same_ids) {
  const std::lock_guard lock(mutex_);
  const auto entry = around(address);
  if (entry == regions_.end() || entry->second.kind != Kind::kExpandable)
    throw DeviceError("cuMemUnmap: invalid argument");
  auto& [base, region] = *entry;
  const uint64_t chunk = region.chunks.front().bytes;
  for (auto i = static_cast<uint64_t>(address - base) / chunk; base + i * chunk < address + bytes;
       ++i) {
    std::memset(base + i * chunk, static_cast<int>(kPoison), chunk);
    released_.push_back({region.card, std::exchange(region.chunks[i], make_chunk(chunk))});
    map_at(base + i * chunk, region.chunks[i]);
    std::memset(base + i * chunk, static_cast<int>(kPoison), chunk);
    used_[region.card] += chunk;
    if (!same_ids) region.ids[i] = next_id_++;
  }
  count_released();
}

bool SimMemory::is_own(const std::byte* address, int card) {
  if ((reinterpret_cast<uintptr_t>(address) & kDeviceSide) != 0) return true;
  const std::lock_guard lock(mutex_);
  const auto region = around(address);
  if (region == regions_.end()) return false;
  const Kind kind = region->second.kind;
  if (kind == Kind::kPinned) return true;
  return (kind == Kind::kMalloc || kind == Kind::kExpandable) && region->second.card == card;
}

SimMemory::Regions::iterator SimMemory::around(const std::byte* address) {
  const auto after = regions_.upper_bound(const_cast<std::byte*>(address));
  if (after == regions_.begin()) return regions_.end();
  const auto region = std::prev(after);
  return address < region->first + region->second.mapped ? region : regions_.end();
}

SimMemory::Regions::iterator SimMemory::at_base(const char* call, std::byte* base,
                                                std::initializer_list<Kind> kinds) {
  const auto region = regions_.find(base);
  if (region == regions_.end() ||
      std::find(kinds.begin(), kinds.end(), region->second.kind) == kinds.end()) {
    throw DeviceError(str(call, ": invalid argument"));
  }
  return region;
}

// ---- memory of other processes ------------------------------------------------------------------

IpcHandle SimMemory::export_memory(std::byte* base) {
  const std::lock_guard lock(mutex_);
  const Region& region = at_base("cudaIpcGetMemHandle", base, {Kind::kMalloc})->second;
  const Fd& fd = region.chunks.front().descriptor;
  const Exported exported{machine(), inode_of(fd), region.bytes, region.mapped,
                          base,      ::getpid(),   fd.get(),     region.card};
  IpcHandle handle{};
  std::memcpy(handle.data(), &exported, sizeof exported);
  return handle;
}

std::byte* SimMemory::open_memory(const IpcHandle& handle, Ipc fault) {
  const Exported exported = decode(handle);
  const auto fail = [](const char* why) { throw DeviceError(str("cudaIpcOpenMemHandle: ", why)); };
  if (exported.pid == ::getpid()) fail("invalid device context");
  if (fault == Ipc::kFails || exported.machine != machine()) fail("invalid resource handle");
  const std::lock_guard lock(mutex_);
  for (auto& [base, region] : regions_) {
    if (region.inode == exported.inode) {
      ++region.opens;
      return base;
    }
    // One mapping of a range of the exporter's addresses at a time: error 208.
    if (region.kind == Kind::kOpened && region.exporter == exported.pid &&
        region.theirs < exported.base + exported.mapped &&
        exported.base < region.theirs + region.mapped) {
      fail("resource already mapped");
    }
  }
  Chunk chunk{open_locked(str("/proc/", exported.pid, "/fd/", exported.fd)), exported.mapped};
  if (!chunk.descriptor || inode_of(chunk.descriptor) != exported.inode) {
    fail("invalid resource handle");  // it was released, or its process has ended
  }
  if (fault == Ipc::kLies) chunk = make_chunk(exported.mapped);
  Region region;
  region.exporter = exported.pid;
  region.theirs = exported.base;
  region.kind = Kind::kOpened;
  region.bytes = exported.bytes;
  region.mapped = exported.mapped;
  region.card = exported.card;
  region.id = next_id_++;
  region.inode = exported.inode;
  region.opens = 1;
  std::byte* base = place(region.mapped);
  map_at(base, chunk);
  if (fault == Ipc::kLies) std::memset(base, static_cast<int>(kPoison), region.mapped);
  region.held.push_back(std::move(chunk.descriptor));
  regions_[base] = std::move(region);
  return base;
}

void SimMemory::close_memory(std::byte* base) {
  const std::lock_guard lock(mutex_);
  const auto region = at_base("cudaIpcCloseMemHandle", base, {Kind::kOpened});
  if (--region->second.opens == 0) retire(region);
}

std::vector<Chunk> SimMemory::export_chunks(std::byte* address, uint64_t bytes, size_t most) {
  const std::lock_guard lock(mutex_);
  const auto entry = around(address);
  if (entry == regions_.end() || entry->second.kind != Kind::kExpandable || bytes == 0) return {};
  const auto& [base, region] = *entry;
  const uint64_t chunk = region.chunks.front().bytes;
  const auto begin = static_cast<uint64_t>(address - base);
  if (bytes > region.mapped - begin) return {};
  std::vector<Chunk> chunks;
  for (uint64_t i = begin / chunk; i * chunk < begin + bytes; ++i) {
    if (chunks.size() == most) return {};
    chunks.push_back({Fd(::fcntl(region.chunks[i].descriptor.get(), F_DUPFD_CLOEXEC, 0)), chunk});
    if (!chunks.back().descriptor) refuse("dup");
  }
  return chunks;
}

std::byte* SimMemory::map_chunks(const std::vector<Chunk>& chunks) {
  Region region;
  region.kind = Kind::kMapped;
  for (const Chunk& chunk : chunks) region.bytes += chunk.bytes;
  if (region.bytes == 0 || region.bytes % page() != 0) {
    throw DeviceError("cuMemAddressReserve: invalid argument");
  }
  region.mapped = region.bytes;
  const std::lock_guard lock(mutex_);
  region.id = next_id_++;
  std::byte* base = place(region.mapped);
  uint64_t done = 0;
  for (const Chunk& chunk : chunks) {
    map_at(base + done, chunk);
    done += chunk.bytes;
    region.held.push_back(open_locked(str("/proc/self/fd/", chunk.descriptor.get())));
  }
  regions_[base] = std::move(region);
  return base;
}

void SimMemory::unmap_chunks(std::byte* base, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto entry = at_base("cuMemUnmap", base, {Kind::kMapped});
  if (entry->second.mapped != bytes) throw DeviceError("cuMemUnmap: invalid argument");
  retire(entry);
}

}  // namespace ringcomm::sim
