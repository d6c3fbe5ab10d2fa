// A plan is one rank's program for one collective: pure data made by a planner, a pure function of
// (shape, rank). It does no I/O, reads no clock and no environment. Executors
// run plans; no other code knows what a ring is.
//
//   verb     operands                     meaning
//   copy     dst <- src                   remote dst = put, remote src = get
//   reduce   dst... <- op(src0, src1...)  n-ary, in the order given; one rounding at the end
//   signal   peer, lane                   release: all I did for you so far is visible to you
//   wait     peer, lane                   acquire: consumes the peer's next signal on that lane
//                                         (the k-th wait meets the k-th signal)
//
// Operands name memory by (space, rank, offset in bytes). Every byte of shared memory that plans
// use has exactly one writer. So plans of different collectives and sizes can follow one another.
//
// Long messages are short plans: a loop runs its blocks in many passes, a block its steps in many
// rounds. Data says how they differ. An operand's motion is its way from pass to pass and round to
// round. An extent is the memory of one shard, and its end cuts off a step. So shards of any length
// are one loop, in which steps do nothing when nothing is left to move. A block of ring rounds is
// one round that goes from extent to extent. cursor.h has the arithmetic.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <tuple>
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
  kBruck,          // log2 n rounds, of half as many shards each
};
inline constexpr int kAlgorithms = 8;
// Instead of an algorithm, on devices: kernels (device/kernels_for.h), or what a graph has.
inline constexpr auto kHandOver = static_cast<Algorithm>(kAlgorithms);  // hands over
inline constexpr auto kByGraph = static_cast<Algorithm>(kAlgorithms + 1);
inline constexpr auto kByTwoShot = static_cast<Algorithm>(kAlgorithms + 2);
inline constexpr auto kByOneShot = static_cast<Algorithm>(kAlgorithms + 3);
inline constexpr auto kByLowLatency = static_cast<Algorithm>(kAlgorithms + 4);
inline constexpr auto kByRing = static_cast<Algorithm>(kAlgorithms + 5);
inline constexpr auto kByCopies = static_cast<Algorithm>(kAlgorithms + 6);
inline constexpr int kNamed = kAlgorithms + 7;
inline bool is_kernel(Algorithm algorithm) {
  return algorithm >= kHandOver && static_cast<int>(algorithm) < kNamed;
}
// Returns all kNamed names, by number.
std::span<const char* const> algorithm_names();
bool kernel_serves(Algorithm kernel, Collective collective);

enum class Verb : uint8_t { kCopy, kReduce, kSignal, kWait };

enum class Space : uint8_t {
  kInput,   // the caller's input: spans with virtual offsets, written by nobody. Only a plan for
            // a readable shape names another rank's
  kOutput,  // the caller's output, written by its rank; likewise
  kWindow,  // shared memory of `rank`, written by `rank` only, read by anybody
  kInbox,   // shared memory of `rank`, written by `from` only, read by `rank` only
  kLine,    // like kInbox, at most kLineBytes: rides in the line of the data lane's counter
};

inline constexpr uint64_t kLineBytes = 112;  // of a 128-byte line; 48 share the counter's 64 bytes

// Signals of one ordered pair of ranks travel on two lanes, each with its own counter.
enum Lane : uint8_t { kData, kCredit };
inline constexpr int kLanes = 2;

// A way in which an operand moves. It moves straight on, `bytes` a pass. Or it goes in turn through
// slots of so many bytes. Then it begins at slot `first`, and goes `pass` slots further each pass
// and `round` slots each round.
struct Motion {
  uint64_t bytes;
  uint16_t slots = 0;  // a power of two; 0: straight on
  uint16_t first = 0, pass = 0, round = 0;
  bool operator==(const Motion&) const = default;
};

// A part of input or output, such as a shard.
struct Extent {
  uint64_t offset;
  uint64_t bytes;
  bool operator==(const Extent&) const = default;
};

// Motions and extents are named by their place in the plan's tables, counted from 1; 0 is none. In
// round i of a block an extent is the i-th after the one named.
struct Ref {
  Space space;
  uint8_t motion = 0;
  int16_t rank;         // the owner of the memory
  int16_t from;         // the writer, for kInbox and kLine
  uint16_t extent = 0;  // its offset is to be added
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
  uint16_t extent = 0;  // copy, reduce: of the bytes, those before its end are moved
  uint8_t motion = 0;   // of `at`
  uint64_t bytes = 0;   // copy, reduce: each operand's
  uint64_t at = 0;      // where in the extent they begin
  bool operator==(const Step&) const = default;
};

struct Block {  // steps that follow one another, `rounds` times
  uint32_t first_step;
  uint32_t step_count;
  uint32_t rounds;
  bool operator==(const Block&) const = default;
};

struct Loop {  // blocks that follow one another, `passes` times
  uint32_t first_block;
  uint32_t block_count;
  uint64_t passes;
  bool operator==(const Loop&) const = default;
};

struct Plan {
  Collective collective;
  Algorithm algorithm;
  int size;
  Rank rank;
  uint64_t code = 0;  // if the program registered it: a hash of all ranks' scripts
  std::vector<Loop> loops;
  std::vector<Block> blocks;
  std::vector<Step> steps;
  std::vector<Ref> refs;
  std::vector<Motion> motions;
  std::vector<Extent> extents;

  uint8_t motion(const Motion& motion);  // its number in the table, in which it is from now on
  uint16_t extent(const Extent& extent);
  auto tables() { return std::tie(loops, blocks, steps, refs, motions, extents); }
  auto tables() const { return std::tie(loops, blocks, steps, refs, motions, extents); }
  uint64_t memory_bytes() const;  // its price in a cache
  bool operator==(const Plan&) const = default;
};

bool reduces(Collective collective);  // or does it only move?
bool rooted(Collective collective);
bool sharded(Collective collective);           // has a shard for each rank, or one of each
const char* to_string(Collective collective);  // "all_reduce", as in torch.distributed
const char* to_string(Algorithm algorithm);
std::optional<Collective> collective_called(const std::string& name);
Algorithm algorithm_called(const std::string& name);  // throws UsageError, with the names there are

}  // namespace ringcomm
