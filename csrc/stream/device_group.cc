#include "stream/device_group.h"

#include "group/process.h"

namespace ringcomm {

DeviceGroup::DeviceGroup(GroupState& state)
    : state(state),
      own(state.transport().device_area(state.rank()), state.size()),
      recorder(state.recorded(true), Process::get().began()),
      diagnosis(state.transport(), recorder, state.where(), Board::kDevice,
                [this](Rank peer, uint64_t sequence) { return state_of(peer, sequence); }),
      transport_(state.transport()) {}

bool DeviceGroup::has_let_go(Rank peer) const {
  return transport_.device_area(peer) != nullptr &&
         area(peer).abort().load(std::memory_order_seq_cst) != 0;
}

// As the peer's board says, which its host writes a little later than its stream the word; and a
// failure is none for what the peer's streams are still in, until it lets them go.
PeerState DeviceGroup::state_of(Rank peer, uint64_t sequence) const {
  if (transport_.device_area(peer) == nullptr) return transport_.state(peer, Board::kDevice);
  const uint32_t done = area(peer).done(kGroupTimeline).load(std::memory_order_seq_cst);
  const bool gone = has_let_go(peer);  // read after what it has done, and before what it says
  PeerState state = transport_.state(peer, Board::kDevice);
  if (!gone && sequence <= state.called && has_come(done, static_cast<uint32_t>(sequence))) {
    state.finished = std::max(state.finished, sequence);
  }
  state.failed = state.failed && (gone || state.called < sequence);
  return state;
}

// Has the message's peer called its side of that one, by its number?
bool DeviceGroup::has_said(const Pending& message, uint64_t number) const {
  const auto& said = area(message.peer).message(transport_.rank(), !message.sending(), number);
  return said.load() >> 48 == (number & 0xffff);
}

bool DeviceGroup::has_called(const Pending& pending) const {
  if (!pending.ticket) return true;  // the host's way sees to it
  if (pending.peer >= 0) return has_said(pending, pending.number);
  for (Rank peer = 0; peer < transport_.size(); ++peer) {
    const uint64_t theirs = transport_.state(peer, Board::kDevice).called;
    if (peer != transport_.rank() && theirs < pending.operation.sequence) return false;
  }
  return true;
}

bool DeviceGroup::has_ended(const Pending& message) const {
  const auto& ended = area(message.peer).ended(transport_.rank(), !message.sending());
  return ended.load(std::memory_order_seq_cst) >= message.number;
}

std::optional<Rank> DeviceGroup::spoiler(const Pending& pending) const {
  if (!pending.ticket) return std::nullopt;
  if (pending.peer >= 0) {
    if (!has_let_go(pending.peer)) return std::nullopt;
    const bool begun = has_said(pending, pending.number + 1);
    if (has_ended(pending) && !begun) return std::nullopt;
    return pending.peer;
  }
  for (Rank peer = 0; peer < transport_.size(); ++peer) {
    if (peer == transport_.rank() || !has_let_go(peer)) continue;
    const PeerState state = transport_.state(peer, Board::kDevice);
    if (state.finished < pending.operation.sequence) return peer;
  }
  return std::nullopt;
}

void DeviceGroup::compare(const Pending& message) const {
  const auto [peer, sending, number] = std::tuple(message.peer, message.sending(), message.number);
  const uint64_t other = area(peer).message(transport_.rank(), !sending, number).load();
  const uint64_t terms = message_terms(message.operation);
  if (other >> 48 != (number & 0xffff) || other == (number << 48 | terms)) return;
  const uint64_t mine = terms & kMessageBytes, theirs = other & kMessageBytes;
  const auto text = [](uint64_t bytes) {
    return bytes == kMessageBytes ? std::string("at least 1 GiB") : str(bytes, " bytes");
  };
  const std::string what = theirs != mine          ? text(theirs)
                           : mine == kMessageBytes ? "another size, type or tag"
                                                   : "another type or tag";
  throw MismatchError(str(to_text(message.operation), ": it has ", text(mine), ", and rank ", peer,
                          sending ? " receives " : " sends ", what,
                          ": between devices messages are matched in the order of the calls"));
}

}  // namespace ringcomm
