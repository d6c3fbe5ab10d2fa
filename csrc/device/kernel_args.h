// The kernels' arguments: the data that crosses from the host to a device, plain and passed by
// value.
//
// One source builds for device and host (kernels.inc.h, over a Context): nvcc makes kernels of it
// and the simulated device runs it on host threads, so that ThreadSanitizer sees the protocol.
#pragma once

#include <cstddef>
#include <cstdint>

#include "reduce/reduce.h"

namespace ringcomm::cuda {

using Stream = void*;  // cudaStream_t; null is the default stream

inline constexpr int kMostRanks = 32;  // of a group that talks over devices

// Where a rank's operands of an operation are, as the leader sees them. That rank's stream writes
// it into memory of its own device, which the leader's kernel reads.
struct LeaderSlot {
  uint64_t input = 0;
  uint64_t output = 0;
  uint64_t staged = 0;  // they are in a window, which holds one round
  uint64_t call = 0;    // LeaderArgs::call, as that rank has it
};

// The ranks that a part of an operation comes from, or goes to: all; the root; or, for part p,
// rank p.
enum class Who : uint8_t { kAll, kRoot, kPart };

// Parts of an operation that a kernel of one rank, the leader, does for all:
//   output[to][p] = op(input[from][p], ...)
// A side that is split holds all parts, each where `first` says, or in a window `unit` bytes apart.
// A side that is not holds the one that concerns its rank.
struct LeaderArgs {
  Reduction reduction;  // bit by bit that of ringcomm::reduce()
  uint64_t call = 0;    // 0: a part's length. Slots that say otherwise are of another operation.
  uint64_t round = 0, unit = 0;               // bytes [round, round + unit) of each part
  int32_t n_ranks = 0, begin = 0, parts = 0;  // parts [begin, begin + parts)
  int32_t rank = 0, root = 0;                 // `rank`: the leader's own
  Who from = Who::kAll, to = Who::kAll;
  bool input_is_split = false, output_is_split = false;
  uint64_t first[kMostRanks], length[kMostRanks];  // of each part, in bytes
  LeaderSlot own;                                  // of `rank`, which need not name its call
  const LeaderSlot* slot[kMostRanks];              // by rank; the leader's is not read
  const uint32_t* abort = nullptr;                 // not 0: the slots may be of earlier operations
};

// ---- ranks with a device each
//
// Their kernels wait for one another, at words in memory of devices. So all blocks of all ranks
// must run at once: never where ranks share a device. Nothing counts but what is in that memory, so
// a graph that has such a kernel does the same at each replay.

inline constexpr int kMostBlocks = 64, kFewestBlocks = 8;  // of a group
inline constexpr int kLowLatencyBlocks = 8;                // always so many: see the kernel
inline constexpr int kMostOneShot = 16;                    // or as many as the group has
inline constexpr uint64_t kOneShotWindow = 256 << 10;      // of an input, at most
inline constexpr uint64_t kLowLatencyBytes = 256 << 10;    // a rank gets at most so many, and
inline constexpr uint64_t kMostLowLatency = 32 << 10;      // so many from one other
inline constexpr int kRingBlocks = 8, kRingSlots = 8;      // always; slots of each block
inline constexpr uint64_t kRingSlot = 32 << 10;
inline constexpr uint64_t kRingBytes = uint64_t{kRingBlocks} * kRingSlots * kRingSlot;
inline constexpr uint32_t kGaveUp = 2;  // of Members::abort: and the rank that it waited for

// The flags of a barrier: flag[parity][from] is written by rank `from` alone, epoch by their owner.
struct BarrierFlags {
  uint32_t epoch;
  uint32_t flag[2][kMostRanks];
};
// Slots that a rank's predecessor in the ring has filled, and slots that its successor has read:
// each writes its word. Behind them what the owner has read and filled itself.
struct RingFlags {
  uint32_t filled, read;
  uint32_t own_read, own_filled;
};
// In each rank's memory. slot[block][from] is written by rank `from` alone.
struct Flags {
  BarrierFlags two_shot[kMostBlocks], one_shot[kMostOneShot];
  LeaderSlot slot[kMostBlocks][kMostRanks];
  uint32_t low_latency[kLowLatencyBlocks];  // epochs
  RingFlags ring[kRingBlocks];
};

// Returns how many low-latency bytes are reserved for each sender.
inline uint64_t low_latency_bytes(int ranks) {
  const uint64_t share = kLowLatencyBytes / static_cast<uint64_t>(ranks);
  return share < kMostLowLatency ? share : kMostLowLatency;
}

struct Members {
  int32_t rank = 0, n_ranks = 0;
  int32_t blocks = 1;  // the same on every rank
  Flags* flags[kMostRanks];
  uint32_t* abort = nullptr;  // not 0: return, and touch nothing more
  uint64_t patience = 0;      // nanoseconds of one wait; then `abort` gets kGaveUp. 0: none
};

// Two-shot: every rank does its part of the operation for all, where the operands lie.
struct TwoShotArgs {
  Members members;
  LeaderArgs part;               // `slot` is not read
  LeaderSlot given[kMostRanks];  // of this rank's operands, as each rank sees them
};

// The parts that a rank gets from each other rank's input; with `sums`, they are reduced.
struct Exchange {
  Reduction reduction;
  bool sums = false;
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  uint64_t input_bytes = 0;
  uint64_t first[kMostRanks], to[kMostRanks], bytes[kMostRanks];  // there, in the output; how many
  uint64_t sent_first[kMostRanks], sent_bytes[kMostRanks];        // the same as the others see it
};

// One-shot: every rank puts its input into its window, and takes what it gets from all windows.
struct OneShotArgs {
  Members members;
  Exchange exchange;
  std::byte* window[kMostRanks];  // of each rank: two of kOneShotWindow, 16-byte aligned
};

// The same by flags in the data, NCCL's "LL": every rank writes what others get into their memory,
// 4 bytes and a flag at a time.
struct LowLatencyArgs {
  Members members;
  Exchange exchange;
  std::byte* lines[kMostRanks];  // of each rank: [2][n_ranks][pieces] of kPieceLines
  uint64_t pieces = 0;           // of 16 bytes
};
inline constexpr uint64_t kPiece = 16, kPieceLines = 32;

// An operation by chunks: shards, or near-equal parts of a message. Of chunks that this rank has
// not in its input or output the address is null, and it reads or writes none.
struct Chunks {
  Reduction reduction;
  bool sums = false, gathers = false;  // both: all_reduce
  const std::byte* input[kMostRanks];
  std::byte* output[kMostRanks];
  uint64_t bytes[kMostRanks];
};

// A ring: every rank fills slots of the next one, and reads nobody's memory but its own.
struct RingArgs {
  Members members;
  Chunks chunks;
  bool chain = false;  // from the root, or to it; of one chunk
  int32_t root = 0;
  std::byte *slots = nullptr, *next_slots = nullptr;  // kRingBytes each, aligned to 16 bytes
  uint64_t slot = kRingSlot;                          // bytes; of a group always the same
};

}  // namespace ringcomm::cuda
