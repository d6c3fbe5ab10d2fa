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
// it into memory of the leader's device.
struct LeaderSlot {
  uint64_t input = 0;
  uint64_t output = 0;
  uint64_t staged = 0;  // they are in a window, which holds one round
  uint64_t call = 0;    // what is called: LeaderArgs::call
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
  LeaderSlot own;                                  // of `rank`, who need not say what it calls
  const LeaderSlot* slot[kMostRanks];              // by rank; the leader's is not read
  const uint32_t* abort = nullptr;                 // not 0: the slots may be of earlier operations
};

// Flags of the two-shot kernel, in each rank's memory of the device. flag[parity][block][from] is
// written by rank `from` alone; epoch[block] by its owner alone.
inline constexpr int kMostBlocks = 32;
struct TwoShotFlags {
  uint32_t epoch[kMostBlocks];
  uint32_t flag[2][kMostBlocks][kMostRanks];
};

// all_reduce by ranks with a device each: every rank publishes its input in its window, reduces
// its slice of all windows, in rank order, into that slice of all windows, and takes the output
// from its own, which may be input or output, too. Blocks of equal index of all
// ranks meet at flags (st.release.sys, ld.acquire.sys), so all blocks of all ranks must run at
// once: never where ranks share a device.
struct TwoShotArgs {
  Reduction reduction;
  uint64_t count = 0;  // elements, at most what a window holds
  int32_t rank = 0, n_ranks = 0;
  const std::byte* input = nullptr;
  std::byte* output = nullptr;
  std::byte* window[kMostRanks];  // of each rank: count elements, 16-byte aligned
  TwoShotFlags* flags[kMostRanks];
  const uint32_t* abort = nullptr;  // not 0: return, and touch nothing more
  int32_t blocks = 8;               // the same on every rank, at most kMostBlocks
};

}  // namespace ringcomm::cuda
