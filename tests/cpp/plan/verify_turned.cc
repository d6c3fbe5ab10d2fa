#include "verify_turned.h"

#include <map>
#include <unordered_map>

#include "plan/cursor.h"
#include "plan/select.h"
#include "symbolic_sums.h"
#include "verify/memory.h"
#include "verify/plan_text.h"

namespace ringcomm {
namespace {

using verify_detail::Clock;
using verify_detail::Time;
using verify_detail::Violation;

// Whole sides have a shard of every rank, the others this rank's alone.
bool whole_input(Collective collective) {
  return collective == Collective::kAllReduce || collective == Collective::kReduceScatter;
}
bool whole_output(Collective collective) {
  return collective == Collective::kAllReduce || collective == Collective::kAllGather;
}
bool is_user(const Ref& ref) { return ref.space == Space::kInput || ref.space == Space::kOutput; }
bool is_whole(Collective collective, Space space) {
  return space == Space::kInput ? whole_input(collective) : whole_output(collective);
}

uint64_t shard_bytes(const Shape& shape) {
  if (shape.collective == Collective::kBarrier) return 0;
  const uint64_t bytes = shape.chunks().front().bytes;
  for (const Extent& chunk : shape.chunks()) {
    if (chunk.bytes != bytes) throw Violation("shards of equal length are needed");
  }
  return bytes;
}

// The plan of the rank `by` after the one that it was made for.
Plan turned(Plan plan, int by, uint64_t shard) {
  const uint64_t total = shard * static_cast<uint64_t>(plan.size);
  const auto rank = [&](int16_t r) { return static_cast<int16_t>((r + by) % plan.size); };
  const auto offset = [&](uint64_t at) {
    return total == 0 ? at : (at + shard * static_cast<uint64_t>(by)) % total;
  };
  plan.rank = rank(static_cast<int16_t>(plan.rank));
  for (Step& step : plan.steps) {
    if (step.peer >= 0) step.peer = rank(step.peer);
  }
  for (Ref& ref : plan.refs) {
    ref.rank = rank(ref.rank);
    ref.from = rank(ref.from);
    const bool moves = is_user(ref) && ref.extent == 0 && is_whole(plan.collective, ref.space);
    if (moves) ref.offset = offset(ref.offset);
  }
  for (Extent& extent : plan.extents) extent.offset = offset(extent.offset);
  return plan;
}

Plan plan_of_all(const Shape& shape, Algorithm algorithm, bool check) {
  const Plan first = make_plan(shape, 0, algorithm);
  const uint64_t shard = shard_bytes(shape);
  for (Rank r = 1; check && r < shape.size; ++r) {
    if (turned(first, r, shard) == make_plan(shape, r, algorithm)) continue;
    throw Violation(str(to_string(shape.collective), ' ', to_string(algorithm),
                        ": the plan of rank ", r, " is not that of rank 0"));
  }
  return first;
}

struct Cell {
  Content content;
  int writer = -1;
  Time written = 0;
  bool changed = false;
  int lent = 0;
  std::vector<std::pair<int, Time>> reads;  // since it was written
};

// Memory of `owner`, by its own name for it.
struct Place {
  int owner;
  uint64_t key;
};

struct Channel {
  struct Signal {
    Clock clock;
    std::vector<uint64_t> announced;
  };
  std::vector<Signal> sent;
  std::vector<uint64_t> pending;
  size_t taken = 0;
  uint64_t signals = 0, waits = 0;  // of this operation
  size_t stamped[2] = {SIZE_MAX, SIZE_MAX};
  Time stamp_read[2] = {0, 0};
};

class Machine {
 public:
  Machine(const std::vector<Shape>& shapes, const std::vector<Plan>& plans,
          const TurnedOptions& options)
      : shapes_(shapes),
        plans_(plans),
        options_(options),
        size_(shapes.front().size),
        now_(static_cast<size_t>(size_), 0) {
    now_[0] = 1;
  }

  void run() {
    for (operation_ = 0; operation_ < plans_.size(); ++operation_) {
      const Time begun = now_[0];
      for (auto& [key, channel] : channels_) channel.signals = channel.waits = 0;
      fill_input();
      for (step_ = PlanCursor(plan()); step_; step_.next()) {
        try {
          execute(*step_);
        } catch (const Violation& violation) {
          throw Violation(str("operation ", operation_, ", ", to_text(plan(), *step_), ", pass ",
                              step_.pass(), " round ", step_.round(), ": ", violation.what()));
        }
      }
      for (int q = 0; q < size_; ++q) {
        if (now_[index(q)] >= begun) continue;
        throw Violation(
            str("operation ", operation_, " may end before the rank ", q, " after has begun it"));
      }
      check_output();
    }
    for (const auto& [key, channel] : channels_) {
      if (channel.taken != channel.sent.size()) throw Violation("signals are left over");
    }
  }

 private:
  const Shape& shape() const { return shapes_[operation_]; }
  const Plan& plan() const { return plans_[operation_]; }
  int wrap(int rank) const { return (rank % size_ + size_) % size_; }
  static size_t index(int rank) { return static_cast<size_t>(rank); }
  Channel& channel(int distance, uint8_t lane) {
    return channels_[index(distance) * kLanes + lane];
  }

  bool dropped(int to, uint8_t lane, uint64_t at) const {
    const auto& drop = options_.dropped;
    return drop && drop->to == to && drop->lane == lane && drop->index == at &&
           (drop->operations >> operation_ & 1) != 0;
  }

  void execute(const Step& step) {
    if (step.verb == Verb::kSignal) return signal(step.peer, step.lane);
    if (step.verb == Verb::kWait) return wait(step.peer, step.lane);
    if (step_.bytes() > 0) move(step);
  }

  void signal(int to, uint8_t lane) {
    Channel& channel = this->channel(to, lane);
    if (dropped(to, lane, channel.signals++)) return;
    const size_t half = operation_ % 2;
    if (channel.stamped[half] != operation_ && channel.stamp_read[half] > now_[index(to)]) {
      throw Violation("overwrites a stamp that the peer may still be reading");
    }
    channel.stamped[half] = operation_;
    channel.sent.push_back({now_, std::move(channel.pending)});
    channel.pending.clear();
    ++now_[0];
  }

  // The rank `from` has sent to me what I have sent to the rank as far after me as I am after it.
  void wait(int from, uint8_t lane) {
    const int distance = wrap(-from);
    Channel& channel = this->channel(distance, lane);
    if (dropped(distance, lane, channel.waits++)) return;
    if (channel.taken == channel.sent.size()) throw Violation("all ranks wait: a deadlock");
    const Channel::Signal then = std::move(channel.sent[channel.taken++]);
    for (int q = 0; q < size_; ++q) {
      Time& known = now_[index(wrap(from + q))];
      known = std::max(known, then.clock[index(q)]);
    }
    for (const uint64_t key : then.announced) {
      Cell& source = cells_.at(key);
      --source.lent;
      note(source, distance);
    }
    const size_t half = operation_ % 2;
    if (channel.stamped[half] != operation_) throw Violation("finds another operation's stamp");
    channel.stamp_read[half] = now_[0];
  }

  void note(Cell& cell, int reader) const {
    for (auto& [rank, time] : cell.reads) {
      if (rank == reader) return void(time = now_[0]);
    }
    cell.reads.emplace_back(reader, now_[0]);
  }

  // Returns the key of bytes in rank 0's own memory. User memory belongs to one operation.
  uint64_t user_key(Space space, uint64_t offset) const {
    const uint64_t shard = shard_bytes_of(operation_);
    const bool input = space == Space::kInput, whole = is_whole(shape().collective, space);
    const bool other = is_whole(shape().collective, input ? Space::kOutput : Space::kInput);
    if (options_.in_place) {
      if (!whole && other) offset %= std::max<uint64_t>(shard, 1);  // it is my shard of the other
      return key(1, 0, offset);
    }
    return key(input ? 0 : 1, 0, offset);
  }
  uint64_t key(uint64_t area, uint64_t from, uint64_t offset) const {
    const uint64_t turn = area < 2 ? operation_ : operation_ % 2;
    return ((turn * 5 + area) << 13 | from) << 40 | offset;
  }
  uint64_t shard_bytes_of(size_t operation) const {
    const Shape& asked = shapes_[operation];
    if (asked.collective == Collective::kBarrier) return 0;
    return asked.shards.empty() ? asked.bytes / static_cast<uint64_t>(size_) : asked.shard(0);
  }

  Place place(const Ref& ref, uint64_t done) const {
    const uint64_t offset = step_.offset(ref) + done;
    const uint64_t from = static_cast<uint64_t>(wrap(ref.from - ref.rank));
    switch (ref.space) {
      case Space::kInput:
      case Space::kOutput:
        return {0, user_key(ref.space, offset)};
      case Space::kWindow:
        return {ref.rank, key(2, 0, offset)};
      case Space::kInbox:
        return {ref.rank, key(3, from, offset)};
      case Space::kLine:
        return {ref.rank, key(4, from, offset)};
    }
    return {0, 0};
  }

  void check_rights(const Ref& ref, bool write, uint64_t bytes) const {
    const Geometry& geometry = shape().geometry;
    const uint64_t shard = shard_bytes_of(operation_);
    const bool whole = is_user(ref) && is_whole(shape().collective, ref.space);
    const uint64_t room = is_user(ref)                  ? shard * (whole ? index(size_) : 1)
                          : ref.space == Space::kWindow ? geometry.window_room()
                          : ref.space == Space::kInbox  ? geometry.inbox_bytes
                                                        : geometry.line_bytes;
    if (step_.offset(ref) + bytes > room) throw Violation("an operand leaves its memory");
    if (bytes % shape().element != 0 || step_.offset(ref) % shape().element != 0) {
      throw Violation("cuts an element");
    }
    const bool inbox = ref.space == Space::kInbox || ref.space == Space::kLine;
    if (is_user(ref) ? ref.rank != 0 || (write && ref.space == Space::kInput)
        : inbox      ? ref.from == ref.rank || (write ? ref.from != 0 : ref.rank != 0)
                     : write && ref.rank != 0) {
      throw Violation("uses memory that is not its own to use");
    }
  }

  void fill_input() {
    const uint64_t shard = shard_bytes_of(operation_);
    const bool whole = whole_input(shape().collective);
    for (uint64_t at = 0; at < shard * (whole ? index(size_) : 1); at += shape().element) {
      Cell& cell = cells_[user_key(Space::kInput, at)];
      cell = {};
      cell.content = {operation_ + 1, 0, 0, static_cast<int>(at / shard), at % shard, false};
      cell.writer = 0;
    }
  }

  Content read(const Place& place) {
    const auto entry = cells_.find(place.key);
    if (entry == cells_.end() || entry->second.content.operation == 0) {
      throw Violation("reads what nobody has written");
    }
    Cell& cell = entry->second;
    if (cell.content.operation != operation_ + 1) throw Violation("reads an earlier operation's");
    if (cell.written > now_[index(wrap(place.owner + cell.writer))]) {
      throw Violation("reads what a rank may still be writing");
    }
    note(cell, wrap(-place.owner));
    return seen_from(cell.content, -place.owner);
  }

  void write(const Place& place, const Content& content) {
    Cell& cell = cells_[place.key];
    if (cell.lent > 0) throw Violation("overwrites the source of a put that may be under way");
    if (cell.writer >= 0 && cell.written > now_[index(wrap(place.owner + cell.writer))]) {
      throw Violation("overwrites what a rank may still be writing");
    }
    for (const auto& [reader, time] : cell.reads) {
      if (time > now_[index(wrap(place.owner + reader))]) {
        throw Violation("overwrites what a rank may still be reading");
      }
    }
    cell = {seen_from(content, place.owner), wrap(-place.owner), now_[0], true, 0, {}};
  }

  // The same by the numbers of the rank `by` after.
  Content seen_from(Content content, int by) const {
    content.turn = wrap(content.turn - by);
    if (whole_input(shape().collective)) content.shard = wrap(content.shard - by);
    return content;
  }

  void move(const Step& step) {
    const Ref* refs = &plan().refs[step.first_ref];
    const uint64_t bytes = step_.bytes();
    const int count = step.dst_count + step.src_count;
    for (int i = 0; i < count; ++i) check_rights(refs[i], i < step.dst_count, bytes);
    const bool lends = step.verb == Verb::kCopy && refs[0].space == Space::kInbox;
    for (uint64_t done = 0; done < bytes; done += shape().element) {
      std::vector<Content> from;
      for (int i = step.dst_count; i < count; ++i) {
        const Place source = place(refs[i], done);
        if (refs[i].space == Space::kInput && reduces(shape().collective) &&
            cells_[source.key].changed) {
          throw Violation("reads its input where it has written");
        }
        if (step.verb == Verb::kCopy && place(refs[0], done).key == source.key) continue;
        from.push_back(read(source));
      }
      if (from.empty()) continue;  // in place
      const Content result = step.verb == Verb::kCopy ? from.front() : sum_of(from, step.final);
      for (int i = 0; i < step.dst_count; ++i) write(place(refs[i], done), result);
      if (!lends) continue;
      const Place source = place(refs[1], done);
      ++cells_[source.key].lent;
      channel(refs[0].rank, kData).pending.push_back(source.key);
    }
  }

  Content sum_of(const std::vector<Content>& from, bool final) {
    Content sum = from.front();
    std::vector<Sums::Part> parts;
    for (const Content& content : from) {
      if (content.final) throw Violation("reduces what was final already");
      if (content.shard != sum.shard || content.within != sum.within) {
        throw Violation("reduces different elements");
      }
      parts.push_back({content.sum, wrap(content.turn - sum.turn)});
    }
    if (parts.size() > 1) sum.sum = sums_.of(parts);
    sum.final = final;
    if (final && !sums_.has_all_once(sum.sum, size_)) throw Violation("lacks or repeats a rank");
    return sum;
  }

  void check_output() {
    const uint64_t shard = shard_bytes_of(operation_);
    const Collective collective = shape().collective;
    const bool whole = whole_output(collective);
    std::optional<std::pair<uint32_t, int>> order;
    for (uint64_t at = 0; at < shard * (whole ? index(size_) : 1); at += shape().element) {
      const Content& content = cells_[user_key(Space::kOutput, at)].content;
      const int part = static_cast<int>(at / shard);
      Content wanted{operation_ + 1, content.sum, content.turn,
                     part,           at % shard,  reduces(collective)};
      if (collective == Collective::kAllGather)
        wanted = {operation_ + 1, 0, part, 0, at % shard, false};
      if (content != wanted) throw Violation(str("the output is wrong at byte ", at));
      if (!reduces(collective)) continue;
      if (!sums_.has_all_once(content.sum, size_)) throw Violation("lacks or repeats a rank");
      const std::pair seen{content.sum, wrap(content.turn - part)};
      if (order.value_or(seen) != seen) throw Violation("shards are added up in different orders");
      order = seen;
    }
  }

  const std::vector<Shape>& shapes_;
  const std::vector<Plan>& plans_;
  const TurnedOptions& options_;
  const int size_;
  size_t operation_ = 0;
  PlanCursor step_;
  Clock now_;  // of the rank so far after me
  std::unordered_map<uint64_t, Cell> cells_;
  std::map<size_t, Channel> channels_;
  Sums sums_;
};

}  // namespace

std::string verify_turned(const std::vector<Shape>& shapes, Algorithm algorithm,
                          const TurnedOptions& options) {
  try {
    std::vector<Plan> plans;
    for (const Shape& shape : shapes) {
      plans.push_back(plan_of_all(shape, algorithm, options.alike && plans.empty()));
    }
    Machine(shapes, plans, options).run();
  } catch (const Violation& violation) {
    return violation.what();
  }
  return "";
}

}  // namespace ringcomm
