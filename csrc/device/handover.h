// What a hand-over is, for handover.cc, which runs it, and operands.cc, which makes it.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "device/device_comm.h"

namespace ringcomm::cuda {

inline uint64_t longest_part(const LeaderArgs& args) {
  return args.parts == 0 ? 0 : *std::max_element(args.length, args.length + args.parts);
}

// So many bytes of operands, that go to a window or come from there, round by round.
struct DeviceComm::Piece {
  const Spans* spans;
  uint64_t first, length;
  uint64_t at;  // in the window
};

// What a rank gives a leader.
struct DeviceComm::Share {
  Rank leader;
  LeaderSlot slot{};
  uint64_t rounds = 1;
  uint64_t unit;  // bytes of a piece in a round
  Spans window;
  std::vector<Piece> in{}, out{};

  bool staged() const { return slot.staged != 0; }
};

// What a kernel of this rank does for others.
struct DeviceComm::Served {
  LeaderArgs args{};
  std::array<uint64_t, kMostRanks> rounds{};  // of each rank that gives it something
};

struct DeviceComm::Handover {
  bool messages;
  std::vector<Share> shares;
  std::vector<Served> served;

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
