// Kernels read and write other ranks' memory where it lies. A rank exports allocations as they turn
// up in operations, to the ranks whose kernels are to use them. Those map them (imports.h) when
// nothing is under way on the device. Until then, and if memory cannot be exported, the rank copies
// through its window. CUDA keeps memory that was freed until its last mapping is closed, so an
// exporter withdraws it.
//
// Memory that a program registers is exported at once, to all ranks, and no other takes its place.
#pragma once

#include <map>

#include "device/area.h"
#include "plan/spans.h"
#include "transport/transport.h"

namespace ringcomm::cuda {

// Parts of the process and the group that a rank's exports and imports need.
struct ExportContext {
  Api& api;
  Transport& transport;
  std::function<void(const std::string& text)> warn;  // says a text once
  std::function<bool()> idle;  // has this process ended all that it has enqueued?

  // Passes a descriptor, and waits while there is no room. Throws where there is none for long.
  void send(Rank peer, uint32_t number, const Fd& descriptor) const;
  Area area(Rank rank) const { return {transport.device_area(rank), transport.size()}; }
  Area own() const { return area(transport.rank()); }
};

// Memory that lies side by side, as the driver knows it: an allocation, or several chunks.
using Allocations = std::vector<Allocation>;

// The outcome of a registration.
struct Registered {
  uint64_t bytes = 0, asked = 0;
  std::string why;  // the first reason why the rest is not; empty where there is none
};

inline constexpr size_t kMostChunks = 256;  // of an allocation that is exported

// Returns the number under which a chunk's descriptor is sent. An entry's generations come one
// after the other.
inline uint32_t chunk_number(int index, uint64_t generation, size_t chunk) {
  const uint64_t entry = (generation * kExports + static_cast<uint64_t>(index)) * kMostChunks;
  return static_cast<uint32_t>(entry + chunk) & INT32_MAX;
}

// The allocations that a rank exports.
class Exports {
 public:
  static constexpr int kMostRegistered = kExports / 4 * 3;  // the others are for what turns up

  // Exports at most `most_bytes` at a time.
  Exports(ExportContext context, uint64_t most_bytes)
      : context_(std::move(context)), most_bytes_(most_bytes) {}

  // Returns the address at which `peer` sees `span`; 0 where it does not, or not yet. Memory that
  // is `kept` stays until it is freed: a graph has its address. Other memory makes room for new
  // while no kernel may use it. In one operation the driver is asked once about each piece.
  uint64_t address_at(Rank peer, const Span& span, bool kept);
  // Begins an operation: looks whether one piece that was not used lately was freed.
  void begin();
  // Exports the memory in which the span lies to all ranks, where there is room.
  void offer(const Span& span);
  // Does the same under a name, in place of the memory that this had before. It stays until it is
  // freed, or has no name any more.
  Registered enroll(const std::string& name, const std::vector<Span>& memory);
  void dismiss(const std::string& name);
  // Returns the ranks that have not mapped all memory of that name.
  std::vector<Rank> without(const std::string& name) const;

 private:
  struct Entry {
    std::string refusal;  // why it cannot be exported
    Allocations pieces;
    std::vector<uint64_t> looked_at;  // each piece: the last operation that found it there
    Allocation range;                 // all of them
    uint64_t generation = 0;
    uint64_t used = 0;
    bool kept = false;   // by a graph
    int registered = 0;  // so many times

    // Also memory that this operation uses, because other ranks were told of it.
    bool stays(uint64_t now) const { return kept || registered > 0 || used == now; }
  };
  struct Held {  // by a name
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
    const Opened& opened = context_.area(peer).opened(context_.transport.rank(), index_of(entry));
    return opened.generation.load(std::memory_order_acquire) == entry.generation;
  }
  Entry* make_room(uint64_t bytes);
  void withdraw_if_freed(Entry& entry);
  void renew(Entry& entry, Allocations pieces);
  void give(Entry& entry, Rank peer);
  void give_chunks(const Entry& entry, Rank peer);
  void announce(Rank peer) const {
    context_.own().exports(peer).fetch_add(1, std::memory_order_release);  // partner: has_news()
  }
  int index_of(const Entry& entry) const { return static_cast<int>(&entry - entries_.data()); }

  const ExportContext context_;
  const uint64_t most_bytes_;
  uint64_t now_ = 1;  // counts operations
  std::vector<Entry> entries_ = std::vector<Entry>(kExports);
  std::multimap<const std::byte*, int> by_base_;  // of those that have memory
  uint64_t bytes_ = 0;                            // of all
  std::vector<Span> refused_;                     // by this operation
  size_t next_entry_ = 0, next_piece_ = 0;        // to be looked at by begin()
  std::map<std::string, std::vector<Held>> names_;
};

}  // namespace ringcomm::cuda
