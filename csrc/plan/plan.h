// A plan is one rank's program for one collective: pure data made by a planner, a pure function of
// (shape, rank). It does no I/O, reads no clock and no environment. Everything that moves bytes
// executes plans; nothing else knows what a ring is.
//
//   verb     operands                     meaning
//   copy     dst <- src                   remote dst = put, remote src = get
//   reduce   dst... <- op(src0, src1...)  n-ary, in the order given; one rounding at the end
//   signal   peer, lane                   release: all I did for you so far is visible to you
//   wait     peer, lane                   acquire: consumes the peer's next signal on that lane
//                                         (the k-th wait meets the k-th signal)
//
// Operands name memory by (space, rank, offset in bytes). Every byte of shared memory has exactly
// one writer, which is why plans of different collectives and sizes can follow one another.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/error.h"

namespace ringcomm {

enum class Collective : uint8_t {
  kAllReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kReduce,
  kScatter,
  kGather,
  kAllToAll,
  kBarrier,
};
inline constexpr int kCollectives = 9;

enum class Algorithm : uint8_t {
  kDirect,         // publish in my window, peers load: needs mapped windows
  kRing,           // neighbour to neighbour
  kTree,           // binomial
  kPairwise,       // step i talks to rank +- i
  kDissemination,  // log2 n rounds of signals
  kHierarchical,   // inside the host, between hosts, inside the host
  kDoubling,       // in round k with the rank that differs in bit k
};
inline constexpr int kAlgorithms = 7;

enum class Verb : uint8_t { kCopy, kReduce, kSignal, kWait };

enum class Space : uint8_t {
  kInput,   // the caller's input: spans with virtual offsets, rank = self
  kOutput,  // the caller's output, rank = self
  kWindow,  // shared memory of `rank`, written by `rank` only, read by anybody
  kInbox,   // shared memory of `rank`, written by `from` only, read by `rank` only
  kLine,    // as kInbox, at most kLineBytes: rides in the cache line of the data lane's counter
};

inline constexpr uint64_t kLineBytes = 112;  // of a 128-byte line; 48 share the counter's 64 bytes

// Signals of one ordered pair of ranks travel on two lanes, each with its own counter.
enum Lane : uint8_t { kData, kCredit };
inline constexpr int kLanes = 2;

struct Ref {
  Space space;
  int16_t rank;         // the owner of the memory
  int16_t from;         // the writer, for kInbox and kLine
  uint64_t offset = 0;  // bytes
  bool operator==(const Ref&) const = default;
};

struct Step {
  Verb verb;
  uint8_t lane = kData;   // signal, wait
  bool final = false;     // reduce: the last one of these elements (AVG divides here)
  uint8_t dst_count = 0;  // destinations stand before sources in Plan::refs
  uint16_t src_count = 0;
  int16_t peer = -1;  // signal, wait
  uint32_t first_ref = 0;
  uint64_t bytes = 0;  // copy, reduce: of each operand
  bool operator==(const Step&) const = default;
};

// Steps [first_step, first_step + step_count) run `repetitions` times; at the i-th, offsets into
// input and output are i * stride bytes further on. Shared memory does not move.
struct Block {
  uint32_t first_step;
  uint32_t step_count;
  uint64_t repetitions;
  uint64_t stride;
  bool operator==(const Block&) const = default;
};

struct Plan {
  Collective collective;
  Algorithm algorithm;
  int size;
  Rank rank;
  std::vector<Block> blocks;
  std::vector<Step> steps;
  std::vector<Ref> refs;

  uint64_t memory_bytes() const;  // what a cache pays for it
  bool operator==(const Plan&) const = default;
};

bool reduces(Collective collective);  // or does it only move?
bool rooted(Collective collective);
bool sharded(Collective collective);           // has a shard for each rank, or one of each
const char* to_string(Collective collective);  // "all_reduce", as in torch.distributed
const char* to_string(Algorithm algorithm);
Algorithm algorithm_called(const std::string& name);  // throws UsageError, with the names there are

}  // namespace ringcomm
