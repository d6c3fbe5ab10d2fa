// The functions by which a program allocates tensors in memory of a simulated device.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <functional>
#include <list>
#include <map>
#include <mutex>

#include "sim/api_sim.h"
#include "sim/sim_memory.h"
#include "sim/sim_process.h"
#include "sim/sim_slices.h"

namespace ringcomm::sim {
namespace {

constexpr uint64_t kBlockBytes = 512;  // blocks are multiples of it, as torch's are

struct Segment {
  std::byte* base = nullptr;
  uint64_t bytes = 0, used = 0;
  std::map<std::byte*, uint64_t> blocks;  // in use, and their sizes
};

// Blocks are taken one after the other; a segment whose blocks are all back begins anew.
class Tensors {
 public:
  static Tensors& get() {
    static auto* tensors = new Tensors;
    return *tensors;
  }

  std::byte* allocate(uint64_t bytes) {
    api_->current_device();  // throws in a forked child
    const uint64_t block = (bytes / kBlockBytes + 1) * kBlockBytes;
    const std::lock_guard lock(mutex_);
    auto segment = std::find_if(segments_.begin(), segments_.end(), [&](const Segment& other) {
      return other.bytes - other.used >= block;
    });
    if (segment == segments_.end()) {
      const uint64_t wanted = std::max(block, options_.segment_bytes);
      // As torch's allocator does while it calls cudaMalloc.
      const bool before = api_->relax_captures(true);
      const Finally restore{[&] { api_->relax_captures(before); }};
      segments_.push_front({api_->allocate(wanted), wanted, 0, {}});
      segment = segments_.begin();
    }
    std::byte* address = segment->base + segment->used;
    segment->used += block;
    segment->blocks[address] = block;
    return address;
  }

  void release(std::byte* block) {
    if (owner_ != ::getpid()) return;  // the block is the parent's
    const std::lock_guard lock(mutex_);
    for (Segment& segment : segments_) {
      const auto entry = segment.blocks.find(block);
      if (entry == segment.blocks.end()) continue;
      std::memset(block, static_cast<int>(kPoison), entry->second);
      segment.blocks.erase(entry);
      if (segment.blocks.empty()) segment.used = 0;
    }
  }

  uint64_t empty_cache() {
    api_->current_device();
    const std::lock_guard lock(mutex_);
    for (const Segment& segment : segments_) {
      if (segment.blocks.empty()) api_->release(segment.base);
    }
    return segments_.remove_if([](const Segment& segment) { return segment.blocks.empty(); });
  }

  void remap(std::byte* block, uint64_t bytes) {
    api_->synchronize(nullptr);
    Process::get().memory.remap(block, bytes, options_.same_ids);
  }

  void synchronize() { api_->synchronize(nullptr); }

 private:
  const pid_t owner_ = ::getpid();
  const SimOptions options_ = SimOptions::from_environment();
  const std::unique_ptr<cuda::Api> api_ = make_simulated_api(options_);
  std::mutex mutex_;
  std::list<Segment> segments_;
};

// False after an error, which it prints: C has no exceptions.
bool call(const std::function<void(Tensors&)>& what) {
  try {
    what(Tensors::get());
    return true;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "simulated device: %s\n", error.what());
    return false;
  }
}

}  // namespace

uint64_t copies() { return Process::get().copies; }
uint64_t copied() { return Process::get().copied; }
uint64_t pinned_bytes() { return Process::get().memory.pinned(); }
uint64_t used_bytes(int card) { return Process::get().memory.used(card); }
}  // namespace ringcomm::sim

extern "C" {

[[gnu::visibility("default")]] void* ringcomm_sim_allocate(uint64_t bytes) {
  void* block = nullptr;
  ringcomm::sim::call([&](auto& tensors) { block = tensors.allocate(bytes); });
  return block;
}

[[gnu::visibility("default")]] void ringcomm_sim_release(void* block) {
  ringcomm::sim::call([&](auto& tensors) { tensors.release(static_cast<std::byte*>(block)); });
}

[[gnu::visibility("default")]] uint64_t ringcomm_sim_empty_cache() {
  uint64_t released = 0;
  ringcomm::sim::call([&](auto& tensors) { released = tensors.empty_cache(); });
  return released;
}

[[gnu::visibility("default")]] uint64_t ringcomm_sim_used() {
  uint64_t used = 0;
  ringcomm::sim::call([&](auto&) { used = ringcomm::sim::used_bytes(0); });
  return used;
}

[[gnu::visibility("default")]] uint64_t ringcomm_sim_copies() { return ringcomm::sim::copies(); }
[[gnu::visibility("default")]] uint64_t ringcomm_sim_copied() { return ringcomm::sim::copied(); }
[[gnu::visibility("default")]] uint64_t ringcomm_sim_asked() {
  return ringcomm::sim::Process::get().asked;
}
[[gnu::visibility("default")]] uint64_t ringcomm_sim_lost_slices() {
  return ringcomm::sim::lost_slices();
}
[[gnu::visibility("default")]] void ringcomm_sim_remap(void* block, uint64_t bytes) {
  ringcomm::sim::call([&](auto& all) { all.remap(static_cast<std::byte*>(block), bytes); });
}
[[gnu::visibility("default")]] uint64_t ringcomm_sim_pinned() {
  return ringcomm::sim::pinned_bytes();
}

[[gnu::visibility("default")]] int ringcomm_sim_pinned_node() {
  return ringcomm::sim::Process::get().memory.pinned_node();
}

[[gnu::visibility("default")]] int ringcomm_sim_synchronize() {
  return ringcomm::sim::call([](auto& tensors) { tensors.synchronize(); }) ? 0 : 1;
}
}
