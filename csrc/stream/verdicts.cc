// How operations of a DeviceEngine end: which of them are good, and what is wrong with the rest.
//
// A rank that fails lets its streams go on without what they wait for, and what they do from then
// on is garbage: they signal, and write to windows, as if all were well. So what a peer had not
// finished by then is lost; and so is what it had, once anybody has begun the operation after next,
// which uses the same half of all memory.

#include "stream/device_engine.h"

namespace ringcomm {
namespace {

bool has_come(uint32_t count, uint32_t value) { return static_cast<int32_t>(count - value) >= 0; }

}  // namespace

// ---- good or not

// As the peer's board says, which its host writes a little later than its stream the word; and a
// failure is none for what the peer's streams are still in, until it lets them go.
PeerState DeviceEngine::state_of(Rank peer, uint64_t sequence) const {
  Transport& transport = state_.transport();
  if (transport.device_area(peer) == nullptr) return transport.state(peer, Board::kDevice);
  const uint32_t done = area_of(peer).done(0).load(std::memory_order_seq_cst);
  const bool gone = has_let_go(peer);  // read after what it has done, and before what it says
  PeerState state = transport.state(peer, Board::kDevice);
  if (!gone && sequence <= state.called && has_come(done, static_cast<uint32_t>(sequence))) {
    state.finished = std::max(state.finished, sequence);
  }
  state.failed = state.failed && (gone || state.called < sequence);
  return state;
}

// Has the message's peer called its side of that one, by its number?
bool DeviceEngine::has_said(const Pending& pending, uint64_t number) const {
  const auto& said = area_of(pending.peer).message(state_.rank(), !pending.sending(), number);
  return said.load() >> 48 == (number & 0xffff);
}

// A peer whose streams, let go, may have put garbage into this.
std::optional<Rank> DeviceEngine::spoiler(const Pending& pending) const {
  if (!pending.ticket) return std::nullopt;
  const Rank self = state_.rank();
  if (pending.peer >= 0) {
    if (!has_let_go(pending.peer)) return std::nullopt;
    const cuda::Area area = area_of(pending.peer);
    const bool begun = has_said(pending, pending.number + 1);
    const bool ended = area.ended(self, !pending.sending()).load() >= pending.number;
    if (ended && !begun) return std::nullopt;
    return pending.peer;
  }
  for (Rank peer = 0; peer < state_.size(); ++peer) {
    if (peer == state_.rank() || !has_let_go(peer)) continue;
    const PeerState state = state_.transport().state(peer, Board::kDevice);
    if (state.finished < pending.operation.sequence) return peer;
  }
  return std::nullopt;
}

// Of what is over, as a word said that was read before.
bool DeviceEngine::ended_well(const Pending& pending) const {
  if (pending.ticket) return !gave_up() && !released() && !spoiler(pending);  // in that order
  return pending.result == nullptr ||
         pending.result->load(std::memory_order_seq_cst) == HostStaging::kGood;
}

bool DeviceEngine::is_good(int timeline, uint32_t value) {
  const Lock lock(mutex_);
  if (has_come(good_until_[static_cast<size_t>(timeline)], value)) return true;
  const auto known = [&](const Pending& each) {
    return each.timeline == timeline && each.value == value;
  };
  const auto hopeful = [&](const Pending& each) {
    if (reached(timeline, value) || (!each.ticket && failed())) return ended_well(each);
    if (failed()) return can_end_well(each);
    return !is_doomed(each);
  };
  return std::any_of(pending_.begin(), pending_.end(), known) &&
         std::all_of(pending_.begin(), pending_.end(),
                     [&](const Pending& each) { return !known(each) || hopeful(each); });
}

bool DeviceEngine::is_all_good() {
  note_progress();
  if (watched() && (gave_up() || released())) return false;  // nothing is pending of a replay
  for (Rank peer = 0; watched() && peer < state_.size(); ++peer) {
    if (peer != state_.rank() && has_let_go(peer)) return false;
  }
  const Lock lock(mutex_);
  return std::ranges::find(spoilt_, true) == spoilt_.end();
}

// By the word of a peer that has failed.
bool DeviceEngine::is_doomed(const Pending& pending) const {
  if (!pending.ticket) return false;
  if (spoiler(pending)) return true;
  if (pending.peer < 0) return diagnosis_.failed_before(pending.operation.sequence).has_value();
  return state_.transport().state(pending.peer, Board::kDevice).failed && !called(pending);
}

void DeviceEngine::note_progress() {
  if (state_.forked()) return;
  const Lock lock(mutex_);
  std::vector<uint32_t> now;
  for (size_t i = 0; i < good_until_.size(); ++i) {
    now.push_back(own_.done(static_cast<int>(i)).load(std::memory_order_seq_cst));
  }
  const auto is_over = [&](const Pending& each) {
    return has_come(now[static_cast<size_t>(each.timeline)], each.value);
  };
  for (const Pending& each : pending_) {
    if (!is_over(each)) continue;
    const auto timeline = static_cast<size_t>(each.timeline);
    const bool good = !spoilt_[timeline] && ended_well(each);
    spoilt_[timeline] = !good;
    if (good || has_come(good_until_[timeline], each.value))
      good_until_[timeline] = each.value - !good;
    if (each.ticket) recorder_.end(*each.ticket, good);
    if (!good || each.number == 0) continue;  // peers must not take it for finished
    if (each.peer >= 0) {
      own_.ended(each.peer, each.sending()).store(each.number, std::memory_order_seq_cst);
    } else {
      state_.transport().finish(Board::kDevice, each.number);
    }
  }
  under_way -= static_cast<int64_t>(std::erase_if(pending_, is_over));
}

// ---- the slow path

// A rank that has called cannot be waited for in vain, unless it fails.
bool DeviceEngine::called(const Pending& pending) const {
  if (!pending.ticket) return true;  // the host's way sees to it
  if (pending.peer >= 0) return has_said(pending, pending.number);
  for (Rank peer = 0; peer < state_.size(); ++peer) {
    const uint64_t theirs = state_.transport().state(peer, Board::kDevice).called;
    if (peer != state_.rank() && theirs < pending.operation.sequence) return false;
  }
  return true;
}

bool DeviceEngine::expected() {
  note_progress();
  const Lock lock(mutex_);
  return !pending_.empty() && std::all_of(pending_.begin(), pending_.end(),
                                          [&](const auto& each) { return called(each); });
}

// Not over, and it needs nothing but time, of which there is an end.
bool DeviceEngine::can_end_well(const Pending& pending) {
  if (!pending.ticket || !pending.deadline || reached(pending.timeline, pending.value))
    return false;
  if (!called(pending)) return false;
  try {
    check_pending(pending);
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

// Is there something that can still end well? The first that is not over decides: what was enqueued
// after it may wait for it, also on the ranks that would have to end it.
bool DeviceEngine::owed() {
  const std::vector<Pending> rest = unfinished();
  const auto first = std::find_if(rest.begin(), rest.end(), [&](const Pending& each) {
    return each.ticket && !reached(each.timeline, each.value);
  });
  return first != rest.end() && can_end_well(*first);
}

std::vector<DeviceEngine::Pending> DeviceEngine::unfinished() {
  note_progress();
  const Lock lock(mutex_);
  return {pending_.begin(), pending_.end()};
}

// What was asked for cannot be had. What was asked for before it may.
void DeviceEngine::await_owed(const std::string& asked) {
  bool is_owed = owed();
  const auto over = [&] {
    note_progress();
    return failed() || !is_owed || !pending();
  };
  poll_until(over, kStreamInterval, [&] {
    state_.check();
    state_.check_failure(asked);
    state_.check_interrupt(asked);
    is_owed = owed();
  });
}

void DeviceEngine::check() {
  try {
    check_operations();
  } catch (const PeerError&) {
    // Else when the host's operation has ended.
    if (state_.failed() || !needs_only_time(state_.transport())) {
      state_.fail(std::current_exception());
    }
  } catch (const std::exception&) {
    state_.fail(std::current_exception());
  }
}

void DeviceEngine::check_operations() {
  const std::vector<Pending> rest = unfinished();
  if (released()) {
    if (!rest.empty() || watched()) release_streams();
    return;
  }
  if (failed()) {
    if (!owed()) release_now();
    return;
  }
  if (const auto awaited = gave_up()) {
    throw TimeoutError(str("a kernel on the device waited too long for rank ", *awaited, " (",
                           diagnosis_.where_is(*awaited, sequence()),
                           "): do all ranks replay the same CUDA graphs?"));
  }
  const bool replays = watched() && own_.replaying().load(std::memory_order_seq_cst) != 0;
  for (Rank peer = 0; replays && peer < state_.size(); ++peer) {  // one that is gone comes to none
    if (peer != state_.rank()) diagnosis_.check_partner(peer, "the replay of a CUDA graph");
  }
  // Not of those that have ended meanwhile: a peer may have gone after the last of them.
  for (const Pending& each : rest) {
    if (reached(each.timeline, each.value)) continue;
    try {
      check_pending(each);
    } catch (const PeerError&) {
      if (!owed()) throw;  // else when that is over
    }
  }
}

void DeviceEngine::check_pending(const Pending& pending) {
  const bool late = pending.deadline && pending.deadline->passed();
  const Descriptor& operation = pending.operation;
  if (pending.peer >= 0) {
    if (pending.ticket) check_message(pending);
    if (!late) return;
    throw timed_out(to_text(operation), *pending.deadline,
                    str("rank ", pending.peer, " (", state_.transport().condition(pending.peer),
                        "): every send needs a recv, and the other way round"));
  }
  if (pending.ticket) {
    diagnosis_.check_peers(operation);
    if (const auto by = spoiler(pending)) {
      throw PeerError(*by, str(numbered(operation), ": ", diagnosis_.told_by(*by)));
    }
    if (late) diagnosis_.throw_late(operation, *pending.deadline, state_.rank());
  } else if (late) {
    throw timed_out(numbered(operation), *pending.deadline,
                    "what this rank's stream has to do before it");
  }
}

// A sender may leave once its message is on its way, and the other way round.
void DeviceEngine::check_message(const Pending& pending) const {
  compare(pending);  // the peer may have been the second to call
  const std::string text = to_text(pending.operation);
  const PeerState state = state_.transport().state(pending.peer, Board::kDevice);
  const bool called = this->called(pending);
  if (is_doomed(pending)) {
    throw PeerError(pending.peer, str(text, ": ", diagnosis_.told_by(pending.peer)));
  }
  const auto& ended = area_of(pending.peer).ended(state_.rank(), !pending.sending());
  if (ended.load(std::memory_order_seq_cst) >= pending.number || (state.left && called)) return;
  diagnosis_.check_gone(pending.peer, text);
}

// ---- letting go

void DeviceEngine::fail(const std::exception_ptr& error) {
  Release not_yet = Release::kNot;
  release_.compare_exchange_strong(not_yet, Release::kDue);
  if (!is_of_peer(error, state_.rank()) || !owed()) release_now();  // else check() does, in time
}

void DeviceEngine::release_now() {
  note_progress();  // what is over by now is good
  if (release_.exchange(Release::kDone) != Release::kDone && pending()) {
    state_.logger().warning(
        "streams go on without what the group was to give them: its next call, "
        "or wait(), says so");
  }
  release_streams();
}

}  // namespace ringcomm
