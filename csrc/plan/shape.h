// The input of a planner: the collective, how many bytes each rank gives and gets, and the geometry
// of the shared memory. All ranks have the same, except for all_to_all's splits. All offset
// arithmetic of planners is here.
#pragma once

#include <algorithm>
#include <memory>

#include "plan/plan.h"

namespace ringcomm {

inline constexpr uint64_t kOneShotBytes = 16 * 1024;  // a rank loads this rather than sync twice

inline constexpr int kMostRanks = 4096;  // of a group

// Where more ranks, or hosts, talk over a network, each talks to few of them.
inline constexpr int kFewEnds = 16;

// The part of a rank's shared memory that plans address. The k-th plan that a group runs, one for
// an operation or for each piece of a long one, uses half k mod 2 of everything. So the next plan
// never writes memory that a slow peer still reads.
//
//   half = | window: 4 segments, written by the owner | an inbox of each writer |
struct Geometry {
  int size = 1;                             // ranks
  uint64_t segment_bytes = 0;               // unit of pipelining, a multiple of 64; of an operation
  uint64_t room_bytes = 0;                  // kept for the window, where segments may be larger
  uint64_t inbox_bytes = 0;                 // from each peer, a multiple of 64
  uint64_t slots = 2;                       // of an inbox, used in turn: a power of two
  uint64_t line_bytes = kLineBytes;         // up to this, messages ride in lines; 0: never
  uint64_t one_shot_bytes = kOneShotBytes;  // all_reduce in one hop up to this times (size - 1)

  uint64_t window_bytes() const { return 4 * segment_bytes; }
  uint64_t window_room() const { return std::max(room_bytes, window_bytes()); }
  // Makes segments of 256 KiB, with room for 2 MiB; inboxes share 4 MiB, 16 to 256 KiB each.
  static Geometry for_ranks(int size);
  // Sizes slots so that half of them hold the bytes under way at 8 Gbit/s. `distance` 0 is for
  // round trips of up to 1 ms, 1 for up to 8 ms, and 2 for longer ones, of which 60 ms are filled.
  // `local` is the number of ranks of the largest host, whose inboxes share 2 GiB of addresses.
  static Geometry across_hosts(int size, int distance = 0, int local = 1);
  bool operator==(const Geometry&) const = default;
};

// The costs of a network, in seconds (Hockney, "The communication challenge for MPP", 1994). Ranks
// choose by them, so all ranks of a group have the same. `ringcomm tune` measured the defaults
// between four hosts with links of 1 Gbit/s.
struct Costs {
  double alpha = 18e-6;    // of a message
  double beta = 8.4e-9;    // of each byte sent
  double gamma = 0.02e-9;  // of each byte added up
  bool operator==(const Costs&) const = default;
};

// Bytes of element sequences. `shards[r]` belongs to rank r:
//   all_reduce, broadcast, reduce     bytes: the message; shards unused
//   all_gather                        input = my shard, output = all shards in rank order
//   reduce_scatter                    input = all shards in rank order, output = my shard
//   scatter, gather                   as reduce_scatter, all_gather, whole side only at the root
//   all_to_all                        send[r] to, recv[r] from rank r, in rank order in each side
struct Sides {
  uint64_t input = 0, output = 0;
};
struct CallShape {
  Collective collective = Collective::kBarrier;
  Rank root = 0;                     // broadcast, reduce, scatter, gather
  uint64_t bytes = 0;                // all_reduce, broadcast, reduce
  std::vector<uint64_t> shards;      // all_gather, reduce_scatter, scatter, gather
  std::vector<uint64_t> send, recv;  // all_to_all: this rank's

  Sides sides(Rank rank) const;  // how many bytes each side of this rank has
  bool operator==(const CallShape&) const = default;
};

// Mixes by the finalizer of SplitMix64 (Steele, Lea, Flood 2014): every bit of the input moves half
// of the output.
inline uint64_t mix(uint64_t a, uint64_t b) {
  uint64_t z = a * 0x9e3779b97f4a7c15 + b + 0x9e3779b97f4a7c15;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}
inline uint64_t mix(uint64_t hash, const std::vector<uint64_t>& values) {
  for (const uint64_t value : values) hash = mix(hash, value);
  return hash;
}
inline uint64_t mix(uint64_t hash, std::initializer_list<uint64_t> values) {
  for (const uint64_t value : values) hash = mix(hash, value);
  return hash;
}

// Returns where a rank's part begins: parts lie in rank order.
uint64_t offset_of(const std::vector<uint64_t>& parts, Rank rank);
inline uint64_t total_of(const std::vector<uint64_t>& parts) {
  return offset_of(parts, static_cast<Rank>(parts.size()));
}

// How the ranks of a group lie: host by host, site by site.
struct Levels {
  int local = 1;  // ranks of each host, where all have as many; rank = host * local + index; else 1
  int site = 1;   // the same of each site, whole hosts; 1: there are no sites
  Costs costs;    // of the network, between sites where there are some
  Costs near;     // inside a site
  // The rank at each place. Plans go by places, where some are given: hosts and sites are laid out
  // in this order, and a ring goes along it. Null: by number.
  std::shared_ptr<const std::vector<Rank>> order = nullptr;
  bool operator==(const Levels&) const = default;
};

// The same in a group: the whole input of a planner.
struct Shape : CallShape, Levels {
  int size = 1;
  uint64_t element = 1;   // bytes of one element; no operand cuts one
  bool meets = true;      // false: a part of a plan whose other parts see to it that all meet
  bool readable = false;  // all ranks can load from one another's input and output
  Geometry geometry;

  Rank after(Rank rank, int steps = 1) const;  // steps may be negative; wraps
  uint64_t shard(Rank rank) const { return shards[static_cast<size_t>(rank)]; }
  // Returns where shard `rank` begins in the whole side.
  uint64_t shard_offset(Rank rank) const { return offset_of(shards, rank); }
  uint64_t largest_shard() const;
  // Returns every rank's part of the whole side: shards, or near-equal cuts of the message.
  std::vector<Extent> chunks() const;
  uint64_t slot_bytes() const { return align(geometry.inbox_bytes / geometry.slots); }
  // Returns how much of every shard a pass of bruck.cc takes; 0: there is no room.
  uint64_t bruck_bytes() const;
  // Tells whether so few ranks meet over a network that each may talk to all others.
  bool few() const { return size <= kFewEnds; }
  // Tells the same of hosts, and whether a plan may have steps for each of their ranks.
  bool few_hosts() const { return size / local <= kFewEnds && size <= kFewEnds * kFewEnds; }
  // Rounds down to cache lines if there is room for one, else to elements.
  uint64_t align(uint64_t wanted) const;
  // Returns the r-th of `parts` near-equal cuts of `total` bytes: cut(total, 0) = 0, cut(total,
  // parts) = total, every cut on an element and, where there is room, on a cache line.
  uint64_t cut(uint64_t total, int part, int parts) const;
  uint64_t longest_cut(uint64_t total, int parts) const;  // no part is longer
  bool operator==(const Shape&) const = default;
};

// So many bytes to move, but only those before `end`: they begin at `at`.
struct Stretch {
  uint64_t bytes;
  uint64_t at = 0, end = UINT64_MAX;
  uint16_t extent = 0;  // of the plan, where `end` is that of one
};

// `total` bytes in segments of `unit`. Nothing is one empty segment: its signals are still due.
struct Segments {
  uint64_t total;
  uint64_t unit;

  uint64_t count() const { return total == 0 ? 1 : (total + unit - 1) / unit; }
  uint64_t offset(uint64_t segment) const { return segment * unit; }
  uint64_t length(uint64_t segment) const {
    return offset(segment) >= total ? 0 : std::min(unit, total - offset(segment));
  }
  Stretch stretch(uint64_t segment) const { return {unit, offset(segment), total}; }
};

}  // namespace ringcomm
