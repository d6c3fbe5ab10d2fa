// The memory of other ranks that this rank has mapped. It maps memory when nothing is under way on
// the device: closing other memory may wait for streams, which may wait for peers.
//
// CUDA maps a range of another process's addresses once. So a process has one mapping of each
// allocation, for all its groups.
#pragma once

#include <map>
#include <mutex>

#include "device/exports.h"

namespace ringcomm::cuda {

// A process's mappings of others' memory. Any thread may call any function.
class ImportCache {
 public:
  static ImportCache& of(Api& api);  // the process's own

  // Adds a user. `open` maps it if it is not mapped yet; then mappings that overlap it are of freed
  // memory, and are closed first.
  std::byte* acquire(const ExportedRange& range, bool chunks,
                     const std::function<std::byte*()>& open);
  void release(const ExportedRange& range);  // by one user

 private:
  struct Entry {
    std::byte* address;
    bool chunks;
    int users;
  };
  explicit ImportCache(Api& api) : api_(api) {}
  void close_if(const auto& which);

  Api& api_;
  std::mutex mutex_;
  std::map<ExportedRange, Entry> entries_;
};

// The exports of `peer` that this rank uses.
class Imports {
 public:
  Imports(ExportContext context, Rank peer)
      : context_(std::move(context)),
        peer_(peer),
        theirs_(context_.area(peer)),
        process_(std::hash<std::string>()(context_.transport.process(peer)->name())) {}

  Rank peer() const { return peer_; }
  bool has_news() const { return news() != seen_; }
  // Maps new memory, and gives withdrawn memory back. Nothing may be under way on the device.
  void refresh();
  void give_back() {
    for (Mapped& mapped : mapped_) release(mapped);
  }

 private:
  struct Mapped {
    uint64_t generation = 0;
    bool wanted = false;
    std::byte* address = nullptr;
    ExportedRange range{};
  };
  uint32_t news() const {
    return theirs_.exports(context_.transport.rank()).load(std::memory_order_acquire);
  }
  bool is_wanted(const Export& exported) const {
    return (exported.wanted.load(std::memory_order_acquire) >> context_.transport.rank() & 1) != 0;
  }
  void renew(int index, uint64_t generation);
  void release(Mapped& mapped) {
    if (std::exchange(mapped.address, nullptr)) ImportCache::of(context_.api).release(mapped.range);
  }
  std::byte* open(const ExportedMemory& memory, const std::vector<Chunk>& chunks);
  std::vector<Chunk> receive(int index, uint64_t generation, const ExportedMemory& memory);

  const ExportContext context_;
  const Rank peer_;
  const Area theirs_;
  const size_t process_;
  uint32_t seen_ = 0;  // changes
  std::vector<Mapped> mapped_ = std::vector<Mapped>(kExports);
};

}  // namespace ringcomm::cuda
