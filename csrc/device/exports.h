// Kernels read and write other ranks' memory where it lies. A rank exports allocations as they turn
// up in operations, to the ranks whose kernels are to use them. Those map them when nothing is
// under way on the device: closing others may wait for streams, which may wait for peers. Until
// then, and if memory cannot be exported, the rank copies through its window.
//
// CUDA maps a range of another process's addresses once, and keeps memory that was freed until its
// last mapping is closed. So a process has one mapping of each allocation, for all its groups, and
// an exporter withdraws what was freed.
//
// What a program registers is exported at once, to all ranks, and no other takes its place.
#pragma once

#include <map>
#include <mutex>

#include "device/area.h"
#include "plan/spans.h"
#include "transport/transport.h"

namespace ringcomm::cuda {

// What one rank's exports and imports need.
struct Ends {
  Api& api;
  Transport& transport;
  std::function<void(const std::string& text)> warn;  // says a text once
  std::function<bool()> idle;  // has this process ended all that it has enqueued?

  Area area(Rank rank) const { return {transport.device_area(rank), transport.size()}; }
  Area own() const { return area(transport.rank()); }
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
  void close_if(const auto& which);

  Api& api_;
  std::mutex mutex_;
  std::map<ExportedRange, Entry> entries_;
};

// Memory that lies side by side, as the driver knows it: an allocation, or several chunks.
using Pieces = std::vector<Allocation>;

// What came of memory that a program registers.
struct Registered {
  uint64_t bytes = 0, asked = 0;
  std::string why;  // the first reason why the rest is not; empty where there is none
};

// The allocations that a rank exports.
class Exports {
 public:
  static constexpr int kMostRegistered = kExports / 4 * 3;  // the others are for what turns up
  static constexpr size_t kMostChunks = 256;                // of an entry

  // At most `most_bytes` at a time.
  Exports(Ends ends, uint64_t most_bytes) : ends_(std::move(ends)), most_bytes_(most_bytes) {}

  // The address at which `peer` sees `span`; 0 where it does not, or not yet. What is `kept` stays
  // until it is freed: a graph has its address. Other things make room for new ones while no kernel
  // may use them. In one operation the driver is asked once about each piece.
  uint64_t address_at(Rank peer, const Span& span, bool kept);
  // An operation begins: one piece of what was not used lately is looked at, whether it was freed.
  void begin();
  // Exports to all what the span lies in, where there is room.
  void offer(const Span& span);
  // The same, under a name, instead of what that had before. It stays until it is freed, or nobody
  // has registered it any more.
  Registered enroll(const std::string& name, const std::vector<Span>& memory);
  void dismiss(const std::string& name);
  // Those that have not mapped all that has the name.
  std::vector<Rank> without(const std::string& name) const;

 private:
  struct Entry {
    std::string secret;  // why it cannot be exported
    Pieces pieces;
    std::vector<uint64_t> looked_at;  // each piece: the last operation that found it there
    Allocation range;                 // all of them
    uint64_t generation = 0;
    uint64_t used = 0;
    bool kept = false;   // by a graph
    int registered = 0;  // so many times

    // Also what this operation uses, which other ranks were told of.
    bool stays(uint64_t now) const { return kept || registered > 0 || used == now; }
  };
  struct Held {  // of a name
    int index;
    uint64_t generation;
  };

  Entry* entry_for(const Span& span);
  Entry* known(const Span& span);
  bool is_there(Entry& entry, const Span& span);
  bool is_there(Entry& entry, size_t piece);
  Entry* refuse(const Span& span, const std::string& why);
  std::string enroll_one(const Span& span, std::vector<Held>& held);
  void give_all(Entry& entry);
  bool has_opened(Rank peer, const Entry& entry) const {
    const Opened& opened = ends_.area(peer).opened(ends_.transport.rank(), index_of(entry));
    return opened.generation.load(std::memory_order_acquire) == entry.generation;
  }
  Entry* make_room(uint64_t bytes);
  void withdraw_if_freed(Entry& entry);
  void renew(Entry& entry, Pieces pieces);
  void give(Entry& entry, Rank peer);
  void give_chunks(const Entry& entry, Rank peer);
  void announce(Rank peer) const {
    ends_.own().exports(peer).fetch_add(1, std::memory_order_release);  // partner: look()
  }
  int index_of(const Entry& entry) const { return static_cast<int>(&entry - entries_.data()); }

  const Ends ends_;
  const uint64_t most_bytes_;
  uint64_t now_ = 1;  // counts operations
  std::vector<Entry> entries_ = std::vector<Entry>(kExports);
  std::multimap<const std::byte*, int> by_base_;  // of those that have memory
  uint64_t bytes_ = 0;                            // of all
  std::vector<Span> refused_;                     // by this operation
  size_t next_entry_ = 0, next_piece_ = 0;        // to be looked at by begin()
  std::map<std::string, std::vector<Held>> names_;
};

// The exports of `peer` that this rank uses.
class Imports {
 public:
  Imports(Ends ends, Rank peer)
      : ends_(std::move(ends)),
        peer_(peer),
        theirs_(ends_.area(peer)),
        process_(std::hash<std::string>()(ends_.transport.process(peer)->name())) {}

  Rank peer() const { return peer_; }
  bool has_news() const { return news() != seen_; }
  // Takes what is new, and gives back what was withdrawn. Nothing is under way on the device.
  void look();
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
    return theirs_.exports(ends_.transport.rank()).load(std::memory_order_acquire);
  }
  bool is_wanted(const Export& exported) const {
    return (exported.wanted.load(std::memory_order_acquire) >> ends_.transport.rank() & 1) != 0;
  }
  void renew(int index, uint64_t generation);
  void release(Mapped& mapped) {
    if (std::exchange(mapped.address, nullptr)) ImportCache::of(ends_.api).release(mapped.range);
  }
  std::byte* open(const ExportedMemory& memory, const std::vector<Chunk>& chunks);
  std::vector<Chunk> receive(int index, uint64_t generation, const ExportedMemory& memory);

  const Ends ends_;
  const Rank peer_;
  const Area theirs_;
  const size_t process_;
  uint32_t seen_ = 0;  // changes
  std::vector<Mapped> mapped_ = std::vector<Mapped>(kExports);
};

}  // namespace ringcomm::cuda
