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

// The computation: that of ringcomm::reduce() (reduce/reduce.h), bit by bit.
struct Math {
  DType dtype = DType::kUint8;
  ReduceOp op = ReduceOp::kSum;
  bool final = true;   // AVG divides
  bool scale = false;  // dst = src * factor, as ringcomm::scale(); one source
  int32_t ranks = 1;
  double factor = 1;
  uint8_t e4m3_overflow = 0;  // what torch's float8_e4m3fn makes of a number that is too large
};

// dst[d][i] = op(src[0][i], src[1][i], ...) for i < count. Any alignment that the type allows. A
// destination may be one of the sources exactly.
struct ReduceArgs {
  Math math;
  uint64_t count = 0;  // elements
  int32_t n_dsts = 0, n_srcs = 0;
  std::byte* dst[kMostRanks];
  const std::byte* src[kMostRanks];
};

// The addresses of one rank's input and output of an operation, in the leader's address space. That
// rank's host writes them, and the leader's kernel reads them from mapped memory of the host.
struct LeaderSlot {
  uint64_t input;  // of element 0; where staged, of the first that this launch is about
  uint64_t output;
  uint64_t staged;
};

// output[r][i] = op(input[0][i], ..., input[n-1][i]) for every rank r: 2 * n * bytes of traffic.
struct LeaderArgs {
  Math math;
  uint64_t first = 0, count = 0;  // elements [first, first + count) of each operand
  int32_t n_ranks = 0;
  const LeaderSlot* slot[kMostRanks];
  const uint32_t* abort = nullptr;  // not 0: the slots may be of another operation; touch nothing
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
  Math math;
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
