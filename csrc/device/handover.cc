// Operations and messages by kernels that read and write other ranks' memory.
//
// A rank gives its operands to a leader, whose kernel does the work: it says in the leader's slot
// where they are. Where they cannot be mapped they are staged in a window, round by round of what
// that holds. Words of the host's memory order it all:
//
//   a rank                                         the leader
//   wait until done is all; done = 0
//   slot = addresses
//   ready = all rounds; one more each if staged
//                                                  wait until ready > round; kernel; then
//                                                  done = rounds so far, or in the last one:
//   wait until done is all                         ready = 0, done = all
//
// Values are constants, and at the end words are what they were at the beginning. So what a graph
// has captured can be done again, and calls may come in between. Of a message that is staged
// nothing is awaited at the end: its window is waited for before the next one.
#include "device/handover.h"

namespace ringcomm::cuda {

// ---- words

void DeviceComm::send_line(Rank to, int lane, uint64_t value) {
  words_.push_back({word(to, &peer(to).area.line(rank_, lane)), value});
}

void DeviceComm::set_own_line(Rank from, int lane, uint64_t value) {
  words_.push_back({word(rank_, &own().line(from, lane)), value});
}

void DeviceComm::await_line(Rank from, int lane, uint64_t value) {
  words_.push_back({word(rank_, &own().line(from, lane)), value, Word::kWait});
}

// ---- hand-overs

void DeviceComm::run(Stream stream, Handover& handover) {
  const uint64_t rounds = handover.rounds();
  for (uint64_t round = 0; round < rounds; ++round) {
    for (const Share& share : handover.shares) give(stream, handover, share, round);
    for (Served& served : handover.served) serve(stream, handover, served, round);
    for (const Share& share : handover.shares) take_back(stream, handover, share, round);
  }
  for (const Share& share : handover.shares) {
    const bool staged_message = handover.messages && share.staged();
    if (share.leader != rank_ && !staged_message)
      await_line(share.leader, handover.done(), kAllDone);
  }
}

void DeviceComm::give(Stream stream, const Handover& handover, const Share& share, uint64_t round) {
  const bool begins = round == 0;
  if (round >= share.rounds || (!begins && !share.staged())) return;
  const auto [leader, slot] = std::tie(share.leader, share.slot);
  if (leader != rank_) await_line(leader, handover.done(), begins ? kAllDone : round);
  if (leader != rank_ && begins) set_own_line(leader, handover.done(), 0);
  for (const Piece& piece : share.staged() ? share.in : std::vector<Piece>()) {
    const Segments rounds{piece.length, share.unit};
    copy(stream, share.window, piece.at, *piece.spans, piece.first + rounds.offset(round),
         rounds.length(round));
  }
  if (leader == rank_) return;
  if (begins) {
    LeaderSlot& at = slot_of(leader, rank_, handover.messages);
    const std::pair<uint64_t*, uint64_t> fields[] = {{&at.input, slot.input},
                                                     {&at.output, slot.output},
                                                     {&at.staged, slot.staged},
                                                     {&at.call, slot.call}};
    for (const auto& [field, value] : fields) {
      words_.push_back({reinterpret_cast<std::byte*>(field), value, Word::kWrite64});
    }
  }
  send_line(leader, handover.ready(), share.staged() ? round + 1 : share.rounds);
}

void DeviceComm::take_back(Stream stream, const Handover& handover, const Share& share,
                           uint64_t round) {
  if (round >= share.rounds || !share.staged() || share.out.empty()) return;
  if (share.leader != rank_) await_line(share.leader, handover.done(), round + 1);
  for (const Piece& piece : share.out) {
    const Segments rounds{piece.length, share.unit};
    copy(stream, *piece.spans, piece.first + rounds.offset(round), share.window, piece.at,
         rounds.length(round));
  }
}

void DeviceComm::serve(Stream stream, const Handover& handover, Served& served, uint64_t round) {
  LeaderArgs& args = served.args;
  for (Rank rank = 0; rank < size(); ++rank) {
    if (round < served.rounds[static_cast<size_t>(rank)])
      await_line(rank, handover.ready(), round + 1);
  }
  args.round = round * args.unit;
  if (args.round < longest_part(args)) {
    flush(stream);
    api_.launch(stream, args);
  }
  for (Rank rank = 0; rank < size(); ++rank) {
    const uint64_t rounds = served.rounds[static_cast<size_t>(rank)];
    if (round >= rounds) continue;
    const bool ends = round + 1 == rounds;
    if (ends) set_own_line(rank, handover.ready(), 0);
    send_line(rank, handover.done(), ends ? kAllDone : round + 1);
  }
}

}  // namespace ringcomm::cuda
