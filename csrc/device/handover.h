// What a hand-over is, for handover.cc, which runs it, and operands.cc, which makes it.
#pragma once

#include <algorithm>

#include "device/device_comm.h"

namespace ringcomm::cuda {

// Bytes of an operand that is staged: `unit` of them in each round, at that place in a window.
struct DeviceComm::Piece {
  const Spans* spans;
  uint64_t first, length;
  uint64_t unit;
  std::byte* window;
};

// What this rank gives a leader.
struct DeviceComm::Share {
  Rank leader;
  LeaderSlot slot;
  uint64_t rounds;

  bool staged() const { return slot.staged != 0; }
};

// What a kernel of this rank does.
struct DeviceComm::Served {
  LeaderArgs args{};
  std::array<uint64_t, kMostRanks> rounds{};  // of what each rank gives it, and of its own
};

struct DeviceComm::Handover {
  bool messages = false;
  std::vector<Share> shares;
  std::vector<Served> served;
  std::vector<Piece> in, out;

  int ready() const { return messages ? kSentLane : kReadyLane; }
  int done() const { return messages ? kTakenLane : kDoneLane; }
  uint64_t rounds() const {
    uint64_t most = 0;
    for (const Share& share : shares) most = std::max(most, share.rounds);
    for (const Served& each : served) most = std::max(most, *std::ranges::max_element(each.rounds));
    return most;
  }
};

}  // namespace ringcomm::cuda
