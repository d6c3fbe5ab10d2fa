// The leader's kernel reads and writes the caller's memory where it lies. A rank exports
// allocations as they turn up in operations. The leader maps them when nothing is under way on the
// device: closing others may wait for streams, which may wait for peers. Until then, and if memory
// cannot be exported, the rank copies through its window.
//
// CUDA maps a range of another process's addresses once, and keeps memory that was freed until its
// last mapping is closed. So a process has one mapping of each allocation, for all its groups, and
// an exporter withdraws what was freed.
#pragma once

#include <array>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

#include "device/area.h"
#include "plan/spans.h"
#include "transport/transport.h"

namespace ringcomm::cuda {

// The two ends of it: this rank's, and that of `peer`.
struct Ends {
  Api& api;
  Transport& transport;
  Area own, theirs;
  Rank peer;
  std::function<void(const std::string& text)> warn;  // says a text once
};

// What a process has mapped of others. Any thread may call anything.
class ImportCache {
 public:
  static ImportCache& of(Api& api);  // the process's own

  // Adds a user. `open` maps it where nobody has; then what overlaps it has been freed, and is
  // closed first.
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
  template <typename Which>
  void close_if(const Which& which);

  Api& api_;
  std::mutex mutex_;
  std::map<ExportedRange, Entry> entries_;
};

// The allocations that one rank exports to the leader.
class Exports {
 public:
  // At most `most_bytes` at a time.
  Exports(Ends ends, uint64_t most_bytes) : ends_(std::move(ends)), most_bytes_(most_bytes) {}

  // The address at which the leader sees `span` of the operation `sequence`; 0 where it does not,
  // or not yet.
  uint64_t at_leader(const Span& span, uint64_t sequence);

 private:
  struct Entry {
    Allocation range;
    uint64_t generation = 0;
    uint64_t used = 0;
  };

  int find(const Allocation& range) const;
  void make_room(uint64_t bytes);
  void withdraw_if_freed(Entry& entry);
  void withdraw(Entry& entry);
  void publish(Entry& entry, const Span& span);
  void tell(Entry& entry, ExportedMemory::Kind kind);
  bool export_as_chunks(const Entry& entry, const Span& span);
  int index_of(const Entry& entry) const { return static_cast<int>(&entry - entries_.data()); }

  const Ends ends_;
  const uint64_t most_bytes_;
  size_t next_ = 0;  // entry to look at
  std::array<Entry, kExports> entries_;
};

// The exports of one rank that the leader uses.
class Imports {
 public:
  explicit Imports(Ends ends)
      : ends_(std::move(ends)),
        process_(std::hash<std::string>()(ends_.transport.process(ends_.peer)->name())) {}

  bool has_news() const { return ends_.theirs.exports().load(std::memory_order_acquire) != seen_; }
  // Takes what is new, and gives back what was withdrawn. Nothing is under way on the device.
  void look();
  void give_back();

 private:
  struct Mapped {
    uint64_t generation = 0;
    std::byte* address = nullptr;
    ExportedRange range;
  };
  void renew(int index, uint64_t generation);
  void release(Mapped& mapped);
  std::byte* open(const ExportedMemory& memory, const std::vector<Chunk>& chunks);
  std::vector<Chunk> receive(int index, uint64_t generation, const ExportedMemory& memory);

  const Ends ends_;
  const size_t process_;
  uint32_t seen_ = 0;  // changes
  std::array<Mapped, kExports> mapped_;
};

}  // namespace ringcomm::cuda
