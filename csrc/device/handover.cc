// Work of streams: copies, words that are written and waited for, and kernels that read and write
// other ranks' memory. No function here waits for another rank.
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
// Values are constants, and at the end words are what they were at the beginning. So what a graph
// has captured can be done again, and calls may come in between. Of a message that is staged
// nothing is awaited at the end: its window is waited for before the next one.
#include <bit>

#include "device/device_comm.h"

namespace ringcomm::cuda {

// ---- words

std::byte* DeviceComm::word(Rank of, const void* in_its_area) const {
  const auto* at = static_cast<const std::byte*>(in_its_area);
  return peer(of).device_area + (at - peer(of).area.base());
}

// They are put off until there is other work for the stream: a call of the driver costs as much for
// many words as for one.
void DeviceComm::flush(Stream stream) {
  if (!words_.empty()) api_.each_word(stream, words_);
  words_.clear();
}

void DeviceComm::copy(Stream stream, std::byte* to, const std::byte* from, uint64_t bytes) {
  flush(stream);
  api_.copy(stream, to, from, bytes);
}

void DeviceComm::copy(Stream stream, const Spans& to, uint64_t at, const Spans& from,
                      uint64_t first, uint64_t bytes) {
  while (bytes > 0) {
    const Span dst = to.at(at), src = from.at(first);
    const uint64_t piece = std::min({bytes, dst.bytes, src.bytes});
    if (dst.data != src.data) copy(stream, dst.data, src.data, piece);
    at += piece;
    first += piece;
    bytes -= piece;
  }
}

void DeviceComm::mark(Stream stream, int timeline, uint32_t value) {
  words_.push_back({word(rank_, &own().done(timeline)), value});
  flush(stream);
}

void DeviceComm::fill_slot(const Share& share, bool messages) {
  auto* const slot = reinterpret_cast<std::byte*>(&slot_of(share.leader, rank_, messages));
  const auto fields = std::bit_cast<std::array<uint64_t, 4>>(share.slot);
  for (size_t i = 0; i < fields.size(); ++i) {
    words_.push_back({slot + i * sizeof(uint64_t), fields[i], Word::kWrite64});
  }
}

// ---- rounds

void DeviceComm::stage(Stream stream, const Piece& piece, uint64_t round, bool back) {
  const Segments rounds{piece.length, piece.unit};
  const uint64_t first = piece.first + rounds.offset(round), bytes = rounds.length(round);
  const Spans window({{piece.window, piece.unit}});
  back ? copy(stream, *piece.spans, first, window, 0, bytes)
       : copy(stream, window, 0, *piece.spans, first, bytes);
}

// All is given before anything is waited for: others do the same.
void DeviceComm::run(Stream stream, Handover& handover) {
  for (uint64_t round = 0; round < handover.rounds(); ++round) {
    std::vector<const Share*> given;
    for (const Share& share : handover.shares) {
      if (round < share.rounds && (round == 0 || share.staged())) given.push_back(&share);
    }
    for (const Share* share : given) {
      await_line(share->leader, handover.done(), round == 0 ? kAllDone : round);
      if (round == 0) set_own_line(share->leader, handover.done(), 0);
    }
    for (const Piece& piece : handover.in) stage(stream, piece, round, false);
    for (const Share* share : given) {
      if (round == 0) fill_slot(*share, handover.messages);
      send_line(share->leader, handover.ready(), share->staged() ? round + 1 : share->rounds);
    }
    for (Served& served : handover.served) serve(stream, handover, served, round);
    for (const Pull& pull : handover.pulls) this->pull(stream, handover, pull, round);
    if (handover.out.empty()) continue;
    for (const Share* share : given) await_line(share->leader, handover.done(), round + 1);
    for (const Piece& piece : handover.out) stage(stream, piece, round, true);
  }
  for (const Share& share : handover.shares) {
    const bool goes_on = handover.messages && share.staged();
    if (!goes_on) await_line(share.leader, handover.done(), kAllDone);
  }
}

void DeviceComm::pull(Stream stream, const Handover& handover, const Pull& pull, uint64_t round) {
  if (round >= pull.rounds) return;
  await_line(pull.from, handover.ready(), round + 1);
  stage(stream, pull.piece, round, true);
  let_go_on(pull.from, handover, round, round + 1 == pull.rounds);
}

// A rank's operands have served a round.
void DeviceComm::let_go_on(Rank rank, const Handover& handover, uint64_t round, bool ends) {
  if (ends) set_own_line(rank, handover.ready(), 0);
  send_line(rank, handover.done(), ends ? kAllDone : round + 1);
}

void DeviceComm::serve(Stream stream, const Handover& handover, Served& served, uint64_t round) {
  std::vector<Rank> ranks;
  for (Rank rank = 0; rank < size(); ++rank) {
    if (rank != rank_ && round < served.rounds[static_cast<size_t>(rank)]) ranks.push_back(rank);
  }
  LeaderArgs& args = served.args;
  for (const Rank rank : ranks) {
    await_line(rank, handover.ready(), round + 1);
    args.slot[rank] = &slot_of(rank_, rank, handover.messages);
  }
  args.round = round * args.unit;
  const uint64_t* const first = args.length + args.begin;
  if (std::any_of(first, first + args.parts, [&](uint64_t bytes) { return args.round < bytes; })) {
    flush(stream);
    api_.launch(stream, args);
  }
  for (const Rank rank : ranks) {
    let_go_on(rank, handover, round, round + 1 == served.rounds[static_cast<size_t>(rank)]);
  }
}

}  // namespace ringcomm::cuda
