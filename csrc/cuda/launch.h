// The kernels' launch, for api_cuda.cc alone. All throw DeviceError.
#pragma once

#include <algorithm>

#include "device/kernel_args.h"

namespace ringcomm::cuda {

// The threads of a block, and how many blocks fit on a multiprocessor, with 80 registers a thread.
inline constexpr int kThreads = 256, kBlocks = 3;
inline constexpr int kMeetingThreads = 512;  // their blocks are few

// Returns how many blocks share `bytes` of each operand: 16 bytes for every thread, until the
// device is full of blocks.
constexpr int blocks_for(uint64_t bytes, int multiprocessors) {
  const uint64_t wanted = (bytes + 16 * kThreads - 1) / (16 * kThreads);
  const uint64_t most = static_cast<uint64_t>(kBlocks) * static_cast<uint64_t>(multiprocessors);
  return static_cast<int>(std::clamp<uint64_t>(wanted, 1, most));
}

void launch_leader(Stream stream, const LeaderArgs& args, int multiprocessors);
void launch_meeting(Stream stream, const TwoShotArgs& args);
void launch_meeting(Stream stream, const OneShotArgs& args);
void launch_meeting(Stream stream, const LowLatencyArgs& args);
void launch_meeting(Stream stream, const RingArgs& args);

// Loads every kernel into the current device.
void load_kernels();
void load_meeting_kernels();  // parts of it
void load_ring_kernels();

}  // namespace ringcomm::cuda
