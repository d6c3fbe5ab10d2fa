#include "sim/sim_multicast.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <mutex>

namespace ringcomm::sim {
namespace {

using cuda::DeviceError;

struct Replicas {
  uint64_t bytes;
  std::vector<std::byte*> of;
};
std::mutex mutex;
std::map<const std::byte*, Replicas>& all_replicas() {
  static auto* const table = new std::map<const std::byte*, Replicas>;  // kernels may outlive it
  return *table;
}

constexpr uint64_t kPage = 4096;

// A file: how many devices have joined, how many have bound a window, and then the windows.
class SimMulticast final : public cuda::Multicast {
 public:
  SimMulticast(Fd file, uint64_t bytes) : file_(std::move(file)), bytes_(bytes) {
    struct stat status{};
    if (::fstat(file_.get(), &status) != 0 || status.st_size == 0) {
      throw DeviceError("cuMemImportFromShareableHandle: driver error 1");
    }
    size_ = static_cast<uint64_t>(status.st_size);
    void* const at = ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_SHARED, file_.get(), 0);
    if (at == MAP_FAILED) throw DeviceError("cuMemMap: driver error 2");
    base_ = static_cast<std::byte*>(at);
    index_ = std::atomic_ref(counts()[0]).fetch_add(1);
  }
  ~SimMulticast() override {
    if (all != nullptr) remove_replicas(all);
    ::munmap(base_, size_);
  }

  Fd descriptor() override { return Fd(::fcntl(file_.get(), F_DUPFD_CLOEXEC, 0)); }

  void bind() override {
    const uint64_t devices = (size_ - kPage) / bytes_;
    if (std::atomic_ref(counts()[0]).load() != devices) {
      throw DeviceError("cuMulticastBindMem: driver error 801");  // not all have joined
    }
    std::vector<std::byte*> replicas;
    for (uint64_t i = 0; i < devices; ++i) replicas.push_back(base_ + kPage + i * bytes_);
    own = replicas[index_];
    all = base_;  // an address of its own: no window is there
    add_replicas(all, bytes_, std::move(replicas));
  }

 private:
  uint64_t* counts() const { return reinterpret_cast<uint64_t*>(base_); }

  const Fd file_;
  const uint64_t bytes_;
  uint64_t size_ = 0, index_ = 0;
  std::byte* base_ = nullptr;
};

}  // namespace

void add_replicas(const std::byte* all, uint64_t bytes, std::vector<std::byte*> replicas) {
  const std::lock_guard lock(mutex);
  all_replicas()[all] = {bytes, std::move(replicas)};
}

void remove_replicas(const std::byte* all) {
  const std::lock_guard lock(mutex);
  all_replicas().erase(all);
}

std::vector<std::byte*> replicas_of(const std::byte* at) {
  const std::lock_guard lock(mutex);
  const auto after = all_replicas().upper_bound(at);
  if (after == all_replicas().begin()) throw DeviceError("an illegal memory access");
  const auto& [all, replicas] = *std::prev(after);
  const auto offset = static_cast<uint64_t>(at - all);
  if (offset >= replicas.bytes) throw DeviceError("an illegal memory access");
  std::vector<std::byte*> found;
  for (std::byte* const of : replicas.of) found.push_back(of + offset);
  return found;
}

std::unique_ptr<cuda::Multicast> make_multicast(uint64_t bytes, int devices) {
  Fd file(::memfd_create("multicast", MFD_CLOEXEC));
  const uint64_t size = kPage + static_cast<uint64_t>(devices) * bytes;
  if (::ftruncate(file.get(), static_cast<off_t>(size)) != 0) {
    throw DeviceError("cuMulticastCreate: driver error 2");
  }
  return std::make_unique<SimMulticast>(std::move(file), bytes);
}

std::unique_ptr<cuda::Multicast> join_multicast(const Fd& descriptor, uint64_t bytes) {
  return std::make_unique<SimMulticast>(Fd(::fcntl(descriptor.get(), F_DUPFD_CLOEXEC, 0)), bytes);
}

}  // namespace ringcomm::sim
