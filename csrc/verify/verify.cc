#include "verify/verify.h"

#include <algorithm>
#include <random>
#include <unordered_map>

#include "plan/cursor.h"
#include "verify/memory.h"
#include "verify/plan_text.h"
#include "verify/sequence.h"

namespace ringcomm {
namespace verify_detail {
namespace {

// One rank's place in the sequence.
struct Cursor {
  size_t operation = 0;
  PlanCursor step;
};

// The stamp that signals leave in the line of the receiver, one for each half.
struct Stamp {
  size_t operation = SIZE_MAX;
  Time read = 0;
};

// The signals of one ordered pair of ranks on one lane, in order.
struct Channel {
  std::vector<Clock> sent;
  std::vector<uint32_t> events;               // of the signals
  std::vector<std::vector<Range>> announced;  // sources of puts that the signal follows
  std::vector<Range> pending;                 // put, not yet announced
  size_t taken = 0;
  uint64_t signals = 0, waits = 0;  // of the current operation, dropped ones included
  size_t signal_operation = 0, wait_operation = 0;
  Stamp stamps[2];
};

class Machine {
 public:
  Machine(const std::vector<Program>& sequence, const VerifyOptions& options)
      : sequence_(sequence),
        options_(options),
        size_(sequence.front().shapes.front().size),
        memory_(sequence),
        cursors_(ranks()),
        clocks_(ranks(), Clock(ranks(), 0)),
        begun_(sequence.size(), Clock(ranks(), 0)) {
    for (Rank r = 0; r < size_; ++r) everybody_ += mark(r);
    for (size_t r = 0; r < ranks(); ++r) clocks_[r][r] = 1;
    for (Rank r = 0; r < size_; ++r) begin(r);
  }

  // Notes the events of the run, and its violation, there.
  void record_into(Finding& finding) { finding_ = &finding; }

  void run(uint64_t seed) {
    try {
      run_all(seed);
    } catch (const Violation& violation) {
      if (finding_ != nullptr) note(violation);
      throw;
    }
  }

 private:
  void run_all(uint64_t seed) {
    std::mt19937_64 random(seed);
    for (bool moved = true; moved;) {
      moved = false;
      const uint64_t first = seed == 0 ? 0 : random();
      for (uint64_t i = 0; i < ranks(); ++i) {
        uint64_t quantum = seed == 0 ? UINT64_MAX : 1 + random() % 8;
        const Rank r = static_cast<Rank>((first + i) % ranks());
        while (quantum-- > 0 && advance(r)) moved = true;
      }
    }
    check_finished();
    memory_.check_results(sequence_);
  }

  // ---- the story

  void note_event(Rank rank) {
    if (finding_ == nullptr) return;
    const Cursor& at = cursor(rank);
    const auto step = static_cast<uint32_t>(&*at.step - plan(rank).steps.data());
    memory_.event = static_cast<uint32_t>(finding_->events.size());
    finding_->events.push_back({rank, at.operation, step, at.step.pass(), at.step.round()});
  }
  void note(const Violation& violation) {
    finding_->text = violation.what();
    finding_->other = violation.other;
    for (Rank r = 0; r < size_; ++r) {
      if (finished(r)) continue;
      const Cursor& at = cursor(r);
      const auto step = static_cast<uint32_t>(&*at.step - plan(r).steps.data());
      finding_->places.push_back({r, at.operation, step, at.step.pass(), at.step.round()});
    }
  }

  size_t ranks() const { return static_cast<size_t>(size_); }
  Cursor& cursor(Rank rank) { return cursors_[static_cast<size_t>(rank)]; }
  Clock& clock(Rank rank) { return clocks_[static_cast<size_t>(rank)]; }
  bool finished(Rank rank) { return cursor(rank).operation == sequence_.size(); }
  const Plan& plan(Rank rank) {
    return sequence_[cursor(rank).operation].plans[static_cast<size_t>(rank)];
  }
  Channel& channel(Rank from, Rank to, uint8_t lane) {
    return channels_[(static_cast<size_t>(from) * ranks() + static_cast<size_t>(to)) * kLanes +
                     lane];
  }

  // Notes that the rank begins its current operation, and ends those that have no steps.
  void begin(Rank rank) {
    const size_t r = static_cast<size_t>(rank);
    while (!finished(rank)) {
      begun_[cursor(rank).operation][r] = clock(rank)[r];
      cursor(rank).step = PlanCursor(plan(rank));
      if (cursor(rank).step) return;
      end(rank);
    }
  }

  void end(Rank rank) {
    const size_t operation = cursor(rank).operation;
    for (size_t q = 0; options_.all_meet && q < ranks(); ++q) {
      if (begun_[operation][q] == 0 || begun_[operation][q] > clock(rank)[q]) {
        throw Violation(str("operation ", operation, " (", to_string(plan(rank).collective), ' ',
                            to_string(plan(rank).algorithm), ") may end at rank ", rank,
                            " before rank ", q, " has begun it"));
      }
    }
    memory_.leave(operation, rank, clock(rank));
    cursor(rank) = {operation + 1, PlanCursor()};
  }

  // Executes the rank's next step; false if it has to wait, or has finished.
  bool advance(Rank rank) {
    if (finished(rank)) return false;
    PlanCursor& at = cursor(rank).step;
    try {
      note_event(rank);
      if (!execute(rank, *at)) {
        if (finding_ != nullptr) finding_->events.pop_back();
        return false;
      }
    } catch (const Violation& violation) {
      if (finding_ != nullptr) finding_->event = memory_.event;
      throw Violation(str(where(rank), ": ", violation.what()), violation.other);
    }
    at.next();
    if (at) return true;
    end(rank);
    begin(rank);
    return true;
  }

  std::string where(Rank rank) {
    const Cursor& at = cursor(rank);
    return str("operation ", at.operation, " (", to_string(plan(rank).collective), ' ',
               to_string(plan(rank).algorithm), "), rank ", rank, ", block ", at.step.block(),
               " pass ", at.step.pass(), " round ", at.step.round(), ", ",
               to_text(plan(rank), *at.step));
  }

  bool execute(Rank rank, const Step& step) {
    switch (step.verb) {
      case Verb::kSignal:
        signal(rank, step);
        return true;
      case Verb::kWait:
        return wait(rank, step);
      case Verb::kCopy:
      case Verb::kReduce:
        if (cursor(rank).step.bytes() > 0) move(rank, step);
        return true;
    }
    return false;
  }

  bool dropped(Rank from, Rank to, const Step& step, size_t operation, uint64_t index) const {
    const auto& drop = options_.dropped;
    return drop && drop->from == from && drop->to == to && drop->lane == step.lane &&
           drop->index == index && (drop->operations >> operation & 1) != 0;
  }

  void signal(Rank rank, const Step& step) {
    const size_t operation = cursor(rank).operation;
    Channel& channel = this->channel(rank, step.peer, step.lane);
    if (channel.signal_operation != operation) channel.signals = 0;
    channel.signal_operation = operation;
    if (dropped(rank, step.peer, step, operation, channel.signals++)) return;
    Stamp& stamp = channel.stamps[operation % 2];
    if (stamp.operation != operation && stamp.read > clock(rank)[static_cast<size_t>(step.peer)]) {
      throw Violation(str("overwrites the stamp of operation ", stamp.operation,
                          " that the peer may still be reading"));
    }
    stamp.operation = operation;
    channel.sent.push_back(clock(rank));
    channel.events.push_back(memory_.event);
    channel.announced.push_back(std::move(channel.pending));
    channel.pending.clear();
    ++clock(rank)[static_cast<size_t>(rank)];
  }

  bool wait(Rank rank, const Step& step) {
    const size_t operation = cursor(rank).operation;
    Channel& channel = this->channel(step.peer, rank, step.lane);
    if (channel.wait_operation != operation) channel.waits = 0;
    channel.wait_operation = operation;
    if (dropped(step.peer, rank, step, operation, channel.waits)) {
      ++channel.waits;
      return true;
    }
    if (channel.taken == channel.sent.size()) return false;
    ++channel.waits;
    Clock& now = clock(rank);
    const Clock then = std::move(channel.sent[channel.taken]);
    if (finding_ != nullptr) finding_->events.back().met = channel.events[channel.taken];
    for (size_t q = 0; q < ranks(); ++q) now[q] = std::max(now[q], then[q]);
    for (const Range& range : channel.announced[channel.taken]) {
      memory_.give_back(range, rank, now);
    }
    channel.announced[channel.taken].clear();
    ++channel.taken;
    Stamp& stamp = channel.stamps[operation % 2];
    if (stamp.operation != operation) {
      throw Violation(str("finds the stamp of operation ", stamp.operation));
    }
    stamp.read = now[static_cast<size_t>(rank)];
    return true;
  }

  Range locate(Rank rank, Ref ref, bool write) {
    const Cursor& at = cursor(rank);
    ref.offset = at.step.offset(ref);
    return memory_.locate(ref, at.step.bytes(), at.operation, rank, write);
  }

  void move(Rank rank, const Step& step) {
    const Ref* refs = &plan(rank).refs[step.first_ref];
    std::vector<Range> dst, src;
    for (int i = 0; i < step.dst_count + step.src_count; ++i) {
      const bool write = i < step.dst_count;
      (write ? dst : src).push_back(locate(rank, refs[i], write));
      // The executor multiplies by PREMUL_SUM's factor where it reads the input.
      if (refs[i].space == Space::kInput && reduces(plan(rank).collective) &&
          memory_.is_changed(src.back())) {
        throw Violation("reads its input where it has written");
      }
    }
    check_overlap(dst, src);
    if (step.verb == Verb::kCopy && dst.front() == src.front()) return;  // in place
    if (dst.front().bytes == 0) return;
    const bool in_order = plan(rank).algorithm == Algorithm::kDirect;
    ValueRuns values = step.verb == Verb::kCopy
                           ? memory_.read(src.front(), cursor(rank).operation, rank, clock(rank))
                           : reduce(rank, src, in_order);
    for (ValueRun& run : values) {
      if (step.final && run.value.ranks != everybody_) throw Violation("is final too early");
      run.value.final = run.value.final || step.final;
    }
    for (const Range& range : dst) memory_.write(range, values, rank, clock(rank));
    // Memory that is not the caller's is copied at once.
    const bool lends = refs[step.dst_count].space <= Space::kOutput;
    if (step.verb == Verb::kCopy && refs[0].space == Space::kInbox && lends) {
      memory_.lend(src.front());
      channel(rank, refs[0].rank, kData).pending.push_back(src.front());
    }
  }

  static void check_overlap(const std::vector<Range>& dst, const std::vector<Range>& src) {
    const auto overlap = [](const Range& a, const Range& b) {
      return a.region == b.region && a.begin < b.end() && b.begin < a.end();
    };
    for (size_t i = 0; i < dst.size(); ++i) {
      for (const Range& range : src) {
        if (overlap(dst[i], range) && dst[i] != range) throw Violation("operands overlap in part");
      }
      for (size_t j = 0; j < i; ++j) {
        if (overlap(dst[i], dst[j])) throw Violation("destinations overlap");
      }
    }
  }

  // Adds up stretch by stretch: each ends where one of a source does.
  ValueRuns reduce(Rank rank, const std::vector<Range>& src, bool in_order) {
    ValueRuns sum;
    for (size_t s = 0; s < src.size(); ++s) {
      const ValueRuns more = memory_.read(src[s], cursor(rank).operation, rank, clock(rank));
      for (const ValueRun& run : more) {
        if (run.value.final) throw Violation("reduces what was final already");
        if (in_order && run.value.ranks != mark(static_cast<Rank>(s)))
          throw Violation("does not go in rank order");
      }
      sum = s == 0 ? more : added(sum, more);
    }
    return sum;
  }
  static ValueRuns added(const ValueRuns& sum, const ValueRuns& more) {
    ValueRuns result;
    uint64_t done_a = 0, done_b = 0;  // of the run
    for (size_t a = 0, b = 0; a < sum.size();) {
      const Value left = sum[a].value.after(done_a), right = more[b].value.after(done_b);
      if (left.index != right.index) throw Violation("reduces different elements");
      const uint64_t bytes = std::min(sum[a].bytes - done_a, more[b].bytes - done_b);
      result.push_back({bytes,
                        {left.operation, left.index, left.ranks + right.ranks, false,
                         mix(left.order, right.order)}});
      done_a += bytes, done_b += bytes;
      if (done_a == sum[a].bytes) ++a, done_a = 0;
      if (done_b == more[b].bytes) ++b, done_b = 0;
    }
    return result;
  }

  void check_finished() {
    std::string stuck;
    for (Rank r = 0; r < size_; ++r) {
      if (finished(r)) continue;
      stuck += str(stuck.empty() ? "deadlock: " : "; ", where(r));
    }
    if (finding_ != nullptr && !stuck.empty()) finding_->stuck = true;
    if (!stuck.empty()) throw Violation(stuck);
  }

  const std::vector<Program>& sequence_;
  const VerifyOptions& options_;
  const int size_;
  Memory memory_;
  std::vector<Cursor> cursors_;
  std::vector<Clock> clocks_;
  std::vector<Clock> begun_;  // by operation and rank: that rank's time, 0 for not yet
  std::unordered_map<size_t, Channel> channels_;
  uint64_t everybody_ = 0;
  Finding* finding_ = nullptr;
};

}  // namespace
}  // namespace verify_detail

Finding verify_detail::found_by(const std::vector<Program>& sequence, uint64_t seed) {
  Finding finding;
  const VerifyOptions options;
  try {
    check_sequence(sequence);
    Machine machine(sequence, options);
    machine.record_into(finding);
    machine.run(seed);
  } catch (const Violation& violation) {
    finding.text = violation.what();
  }
  return finding;
}

std::string verify(const std::vector<Program>& sequence, const VerifyOptions& options) {
  if (sequence.empty()) return "";
  try {
    verify_detail::check_sequence(sequence);
    for (int i = 0; i < options.interleavings; ++i) {
      verify_detail::Machine(sequence, options).run(static_cast<uint64_t>(i));
    }
  } catch (const verify_detail::Violation& violation) {
    return violation.what();
  }
  return "";
}

}  // namespace ringcomm
