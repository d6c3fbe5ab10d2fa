// Ranks as threads on one mapping: groups without a meeting.
#pragma once

#include <sys/mman.h>

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "comm/communicator.h"
#include "harness.h"

namespace ringcomm::testing {

// The memory of all ranks of a group, zeroed, in this process only.
class World {
 public:
  explicit World(int size, const Geometry& geometry) : geometry_(geometry) {
    layout_ = {size, geometry.window_room(), geometry.inbox_bytes, 16 << 10};
    for (Rank rank = 0; rank < size; ++rank) {
      segments_.push_back(make_pages(layout_.bytes()));
      bells_.push_back(make_pages(SegmentLayout::kPage));
      arenas_.push_back(make_pages(kArenaBytes));
    }
  }
  // The worker may hold a group for a moment longer than its rank does, and with it this memory.
  ~World() {
    const Deadline soon(std::chrono::seconds(20));
    for (const auto& group : groups_) {
      while (!group.expired() && !soon.passed()) std::this_thread::yield();
      if (group.expired()) continue;
      std::fprintf(stderr, "somebody keeps a group that nobody uses any more\n");
      std::abort();
    }
    for (auto& [at, bytes] : pages_) ::munmap(at, bytes);
  }

  // `change` may give this rank other options and another geometry than the others have.
  struct Terms {
    CommunicatorOptions options;
    Geometry geometry;
    std::string word;
  };
  static constexpr uint64_t kArenaBytes = 8 << 20;
  std::byte* arena(Rank rank) const { return arenas_[static_cast<size_t>(rank)]; }

  template <typename Kind>
  std::shared_ptr<Communicator> join(Rank rank, const std::function<void(Terms&)>& change = {}) {
    std::vector<ShmPeer> peers(segments_.size());
    for (size_t i = 0; i < peers.size(); ++i) {
      peers[i].segment = Segment(segments_[i], layout_);
      peers[i].doorbell = Doorbell(reinterpret_cast<DoorbellPage*>(bells_[i]));
      peers[i].arena = {arenas_[i], kArenaBytes};
    }
    Terms terms{{}, geometry_, {}};
    terms.options.rank = rank;
    terms.options.size = static_cast<int>(peers.size());
    terms.options.timeout = std::chrono::seconds(60);
    if (change) change(terms);
    MappedGroup memory;
    memory.costs_text = terms.word;
    auto group = std::make_shared<Communicator>(std::make_unique<Kind>(rank, std::move(peers)),
                                                terms.geometry, terms.options,
                                                std::make_shared<MappedGroup>(std::move(memory)));
    const std::lock_guard lock(mutex_);
    groups_.push_back(group);
    return group;
  }

 private:
  std::byte* make_pages(uint64_t bytes) {
    void* at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) throw SystemError("mmap");
    pages_.emplace_back(at, bytes);
    return static_cast<std::byte*>(at);
  }

  Geometry geometry_;
  SegmentLayout layout_;
  std::vector<std::byte*> segments_, bells_, arenas_;
  std::vector<std::pair<void*, uint64_t>> pages_;
  std::mutex mutex_;  // guards what follows
  std::vector<std::weak_ptr<Communicator>> groups_;
};

// Tiny segments: a few thousand elements go through every regime and many repetitions.
inline Geometry tiny(int size) {
  Geometry geometry;
  geometry.size = size;
  geometry.segment_bytes = 1024;
  geometry.inbox_bytes = 512;
  return geometry;
}

}  // namespace ringcomm::testing
