// A hand-over: kernels of leaders, and copies, that read and write other ranks' memory, in the
// order that words give them. No function here waits for another rank.
//
// A rank gives its operands to a leader, whose kernel does the work: it says in a slot where they
// are. The slot lies in its own memory, because a stream cannot write to another device.
// The leader's kernel reads it there. Where they cannot be mapped they are staged in a window,
// round by round of what that holds. Words of the host's memory order it all:
//
//   a rank                                         a leader
//   wait until done is all; done = 0
//   slot = addresses
//   ready = all rounds; one more each if staged
//                                                  wait until ready > round; kernel; then
//                                                  done = rounds so far, or in the last one:
//   wait until done is all                         ready = 0, done = all
//
// Values are constants, and at the end words are what they were at the beginning. So a graph can
// replay what it has captured, and calls may come in between. The end of a staged message is not
// awaited: its window is waited for before the next one.
#pragma once

#include <algorithm>

#include "device/stream_words.h"

namespace ringcomm::cuda {

// Bytes of an operand that pass a window: `unit` of them in each round, at that place in it.
struct StagedOperand {
  const Spans* spans;
  uint64_t first, length;
  uint64_t unit;
  std::byte* window;
};

// An operation's work on one rank.
struct Handover {
  struct Share {  // given by this rank to a leader
    Rank leader;
    LeaderSlot slot;
    uint64_t rounds;

    bool staged() const { return slot.staged != 0; }
  };
  struct Served {  // done by a kernel of this rank
    LeaderArgs args{};
    std::array<uint64_t, kMostRanks> rounds{};  // for the memory that each rank gives it
  };
  struct Pull {  // by a copy engine, from a peer's window; or a kernel serves it
    Rank from;
    StagedOperand operand;
    uint64_t rounds;
  };

  bool messages = false;
  std::vector<Share> shares;
  std::vector<Served> served;
  std::vector<Pull> pulls;
  std::vector<StagedOperand> in, out;

  int ready() const { return messages ? kSentLane : kReadyLane; }
  int done() const { return messages ? kTakenLane : kDoneLane; }
  uint64_t rounds() const {
    uint64_t most = 0;
    for (const Share& share : shares) most = std::max(most, share.rounds);
    for (const Served& kernel : served) most = std::max(most, std::ranges::max(kernel.rounds));
    for (const Pull& pull : pulls) most = std::max(most, pull.rounds);
    return most;
  }
};

// Enqueues the copy of a round into the window, or back.
void stage(StreamWords& words, Stream stream, const StagedOperand& operand, uint64_t round,
           bool back);

// Enqueues a hand-over. Words at its end may be put off until they are flushed.
void run(const Peers& peers, StreamWords& words, Stream stream, Handover& work);

}  // namespace ringcomm::cuda
