#include "stream/verdicts.h"

namespace ringcomm {

constexpr auto kPause = std::chrono::microseconds(100);  // between looks at what is under way

bool Verdicts::reached(const Point& point) const {
  if (state_.forked()) return true;  // that memory is the parent's alone
  return has_come(group_.own.done(point.timeline).load(std::memory_order_seq_cst), point.value);
}

std::pair<uint64_t, bool> Verdicts::add(std::vector<Pending> pending) {
  const Lock lock(mutex_);
  const bool first = pending_.empty();
  ++batches_;
  for (Pending& item : pending) {
    item.batch = batches_;
    pending_.push_back(item);
    ++under_way;
  }
  return {batches_, first};
}

bool Verdicts::pending(uint64_t until_batch) {
  const Lock lock(mutex_);
  return !pending_.empty() && pending_.front().batch <= until_batch;
}

void Verdicts::expect(std::optional<uint64_t> batch) {
  const Lock lock(mutex_);
  for (Pending& item : pending_) {
    if (batch.value_or(item.batch) == item.batch && !item.deadline) {
      item.deadline.emplace(item.timeout);
    }
  }
}

void Verdicts::forget() {
  const Lock lock(mutex_);
  under_way -= static_cast<int64_t>(pending_.size());
}

bool Verdicts::is_idle() {
  note_progress();
  return under_way == 0;
}

bool Verdicts::await_idle(Clock::duration at_most) {
  const Deadline deadline(at_most);
  poll_until([&] { return under_way == 0 || deadline.passed(); }, kPause,
             [&] {
               note_progress();
               state_.check();
             });
  return under_way == 0;
}

std::optional<Rank> Verdicts::gave_up() const {
  // Partner: await() in cuda/meetings.inc.h. Peers can write there, too.
  const uint32_t word = group_.own.abort().load(std::memory_order_seq_cst);
  if (word < cuda::kGaveUp) return std::nullopt;
  return std::min(static_cast<Rank>(word - cuda::kGaveUp), state_.size() - 1);
}

// ---- good or not

// It is over, as a word said that was read before.
bool Verdicts::ended_well(const Pending& pending) const {
  if (pending.ticket)
    return !gave_up() && !released() && !group_.spoiler(pending);  // in that order
  return pending.result == nullptr ||
         pending.result->load(std::memory_order_seq_cst) == HostStaging::kGood;
}

bool Verdicts::is_good(const Point& point) {
  const Lock lock(mutex_);
  if (has_come(good_until_[static_cast<size_t>(point.timeline)], point.value)) return true;
  const auto known = [&](const Pending& item) { return item.end == point; };
  const auto hopeful = [&](const Pending& item) {
    if (reached(point) || (!item.ticket && failed())) return ended_well(item);
    if (failed()) return can_end_well(item);
    return !is_doomed(item);
  };
  return std::any_of(pending_.begin(), pending_.end(), known) &&
         std::all_of(pending_.begin(), pending_.end(),
                     [&](const Pending& item) { return !known(item) || hopeful(item); });
}

bool Verdicts::is_all_good() {
  note_progress();
  if (watched() && (gave_up() || released())) return false;  // nothing is pending of a replay
  for (Rank peer = 0; watched() && peer < state_.size(); ++peer) {
    if (peer != state_.rank() && group_.has_let_go(peer)) return false;
  }
  const Lock lock(mutex_);
  return std::ranges::find(spoilt_, true) == spoilt_.end();
}

// By the word of a peer that has failed.
bool Verdicts::is_doomed(const Pending& pending) const {
  if (!pending.ticket) return false;
  if (group_.spoiler(pending)) return true;
  if (pending.peer < 0)
    return group_.diagnosis.failed_before(pending.operation.sequence).has_value();
  return state_.transport().state(pending.peer, Board::kDevice).failed &&
         !group_.has_called(pending);
}

void Verdicts::note_progress() {
  if (state_.forked()) return;
  const Lock lock(mutex_);
  std::vector<uint32_t> now;
  for (size_t i = 0; i < good_until_.size(); ++i) {
    now.push_back(group_.own.done(static_cast<int>(i)).load(std::memory_order_seq_cst));
  }
  const auto is_over = [&](const Pending& item) {
    return has_come(now[static_cast<size_t>(item.end.timeline)], item.end.value);
  };
  for (const Pending& item : pending_) {
    if (!is_over(item)) continue;
    const auto timeline = static_cast<size_t>(item.end.timeline);
    const bool good = !spoilt_[timeline] && ended_well(item);
    spoilt_[timeline] = !good;
    if (good || has_come(good_until_[timeline], item.end.value))
      good_until_[timeline] = item.end.value - !good;
    if (item.ticket) group_.recorder.end(*item.ticket, good);
    if (!good || item.number == 0) continue;  // peers must not take it for finished
    if (item.peer >= 0) {
      group_.own.ended(item.peer, item.sending()).store(item.number, std::memory_order_seq_cst);
    } else {
      state_.transport().finish(Board::kDevice, item.number);
    }
  }
  under_way -= static_cast<int64_t>(std::erase_if(pending_, is_over));
}

// ---- the slow path

bool Verdicts::expected() {
  note_progress();
  const Lock lock(mutex_);
  return !pending_.empty() && std::all_of(pending_.begin(), pending_.end(), [&](const auto& item) {
    return group_.has_called(item);
  });
}

// Not over, and it needs nothing but time, of which there is an end.
bool Verdicts::can_end_well(const Pending& pending) const {
  if (!pending.ticket || !pending.deadline || reached(pending.end)) return false;
  if (!group_.has_called(pending)) return false;
  try {
    check_pending(pending);
  } catch (const std::exception&) {
    return false;
  }
  return true;
}

// Is there something that can still end well? The first that is not over decides: operations
// enqueued after it may wait for it, also on the ranks that would have to end them.
bool Verdicts::owed() {
  const std::vector<Pending> rest = unfinished();
  const auto first = std::find_if(rest.begin(), rest.end(), [&](const Pending& item) {
    return item.ticket && !reached(item.end);
  });
  return first != rest.end() && can_end_well(*first);
}

std::vector<Pending> Verdicts::unfinished() {
  note_progress();
  const Lock lock(mutex_);
  return {pending_.begin(), pending_.end()};
}

// The caller cannot have its own operation. Those before it may still end.
void Verdicts::await_owed(const std::string& asked) {
  bool is_owed = owed();
  const auto over = [&] {
    note_progress();
    return failed() || !is_owed || !pending();
  };
  poll_until(over, Engine::kStreamInterval, [&] {
    state_.check();
    state_.check_failure(asked);
    state_.check_interrupt(asked);
    is_owed = owed();
  });
}

void Verdicts::check() {
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

void Verdicts::check_operations() {
  const std::vector<Pending> rest = unfinished();
  if (released()) {
    if (!rest.empty() || watched()) group_.own.release();
    return;
  }
  if (failed()) {
    if (!owed()) release_now();
    return;
  }
  if (const auto awaited = gave_up()) {
    throw TimeoutError(
        str("a kernel on the device waited too long for rank ", *awaited, " (",
            group_.diagnosis.where_is(
                *awaited, state_.transport().state(state_.rank(), Board::kDevice).called),
            "): do all ranks replay the same CUDA graphs?"));
  }
  const bool replays = watched() && group_.own.replaying().load(std::memory_order_seq_cst) != 0;
  for (Rank peer = 0; replays && peer < state_.size(); ++peer) {  // one that is gone comes to none
    if (peer != state_.rank()) group_.diagnosis.check_partner(peer, "the replay of a CUDA graph");
  }
  // Not of those that have ended meanwhile: a peer may have gone after the last of them.
  for (const Pending& item : rest) {
    if (reached(item.end)) continue;
    try {
      check_pending(item);
    } catch (const PeerError&) {
      if (!owed()) throw;  // else when that is over
    }
  }
}

void Verdicts::check_pending(const Pending& pending) const {
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
    group_.diagnosis.check_peers(operation);
    if (const auto by = group_.spoiler(pending)) {
      throw PeerError(*by, str(numbered(operation), ": ", group_.diagnosis.told_by(*by)));
    }
    if (late) group_.diagnosis.throw_late(operation, *pending.deadline, state_.rank());
  } else if (late) {
    throw timed_out(numbered(operation), *pending.deadline,
                    "what this rank's stream has to do before it");
  }
}

// A sender may leave once its message is on its way, and the other way round.
void Verdicts::check_message(const Pending& pending) const {
  group_.compare(pending);  // the peer may have been the second to call
  const std::string text = to_text(pending.operation);
  const PeerState state = state_.transport().state(pending.peer, Board::kDevice);
  const bool called = group_.has_called(pending);
  if (is_doomed(pending)) {
    throw PeerError(pending.peer, str(text, ": ", group_.diagnosis.told_by(pending.peer)));
  }
  if (group_.has_ended(pending) || (state.left && called)) return;
  group_.diagnosis.check_gone(pending.peer, text);
}

// ---- letting go

void Verdicts::fail(const std::exception_ptr& error) {
  Release not_yet = Release::kNot;
  release_.compare_exchange_strong(not_yet, Release::kDue);
  if (!is_of_peer(error, state_.rank()) || !owed()) release_now();  // else check() does, in time
}

void Verdicts::release_now() {
  note_progress();  // what is over by now is good
  if (release_.exchange(Release::kDone) != Release::kDone && pending()) {
    state_.logger().warning(
        "streams go on without what the group was to give them: its next call, "
        "or wait(), says so");
  }
  group_.own.release();
}

}  // namespace ringcomm
