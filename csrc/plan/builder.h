// Planners write plans with PlanBuilder. It drops copies and reduces of nothing, but no signals and
// waits. For after any collective, whatever its size, every rank must know that all others have
// begun it (see planners.h).
#pragma once

#include <utility>

#include "plan/plan.h"
#include "plan/shape.h"

namespace ringcomm {

inline uint64_t minus(uint64_t a, uint64_t b) { return a > b ? a - b : 0; }

// Passes 0 … count - 1 over a long message. Between two edges they differ only in the offsets of
// input and output, `stride` bytes a pass, in the slots they use and in how much is left to move.
struct Passes {
  uint64_t count;
  uint64_t stride;
  std::vector<uint64_t> edges;
};

// Slots of so many bytes that are used in turn, and how many are used in a pass and in a round.
struct Turns {
  uint64_t bytes;
  uint64_t slots;  // a power of two
  uint64_t pass = 1, round = 0;
};

// A stream of messages into the slots of one inbox, in turn. The writer needs a credit for all but
// the first so many, so the reader returns one for all but the last so many.
struct Feed {
  Rank from;
  Rank to;
  uint64_t messages;
  uint64_t slot_bytes;
  bool line = false;             // its only message rides in a line
  bool credits = true;           // false where the reader's own data says as much
  uint64_t pass = 1, round = 0;  // messages of a pass, of a round
};

class PlanBuilder {
 public:
  PlanBuilder(const Shape& shape, Algorithm algorithm, Rank rank) : shape_(shape), rank_(rank) {
    plan_.collective = shape.collective;
    plan_.algorithm = algorithm;
    plan_.size = shape.size;
    plan_.rank = rank;
  }

  const Shape& shape() const { return shape_; }
  Rank rank() const { return rank_; }
  uint64_t slots() const { return shape_.geometry.slots; }
  size_t steps() const { return plan_.steps.size(); }  // so far
  Rank peer(int steps) const { return shape_.after(rank_, steps); }

  // Names `offset` bytes into the caller's memory, or into an extent of the plan.
  Ref input(uint64_t offset, uint16_t extent = 0) { return user(Space::kInput, offset, extent); }
  Ref output(uint64_t offset, uint16_t extent = 0) { return user(Space::kOutput, offset, extent); }
  Ref window(Rank owner, uint64_t offset) const {
    return ref(Space::kWindow, owner, owner, offset);
  }
  Ref inbox(Rank owner, Rank from, uint64_t offset) const {
    return ref(Space::kInbox, owner, from, offset);
  }
  Ref line(Rank owner, Rank from) const { return ref(Space::kLine, owner, from, 0); }

  // Returns the slot of turn `number`, where the first slot is `first`.
  Ref in_turn(Ref first, const Turns& turns, uint64_t number) {
    const uint64_t slots = turns.slots, slot = number % slots;
    if (passes_ == 1 && rounds_ == 1) {
      first.offset += slot * turns.bytes;
      return first;
    }
    const auto slots_per = [&](uint64_t wanted, uint64_t times) {
      return static_cast<uint16_t>(times > 1 ? wanted % slots : 0);
    };
    first.motion =
        plan_.motion({turns.bytes, static_cast<uint16_t>(slots), static_cast<uint16_t>(slot),
                      slots_per(turns.pass, passes_), slots_per(turns.round, rounds_)});
    return first;
  }

  // Sets extents 1 and so on, in the order in which rounds go through them.
  void extents(const std::vector<Extent>& in_order) { plan_.extents = in_order; }

  void copy(Ref dst, Ref src, Stretch stretch) { move(Verb::kCopy, {dst}, {src}, stretch, false); }
  void copy(Ref dst, Ref src, uint64_t bytes) { copy(dst, src, Stretch{bytes}); }
  void reduce(const std::vector<Ref>& dst, const std::vector<Ref>& src, Stretch stretch,
              bool final) {
    move(Verb::kReduce, dst, src, stretch, final);
  }

  void signal(Rank to, Lane lane = kData) { synchronize(Verb::kSignal, to, lane); }
  void wait(Rank from, Lane lane = kData) { synchronize(Verb::kWait, from, lane); }

  // Begin at the next rank, so that not all ranks turn to rank 0 first.
  void signal_all(Lane lane = kData) {
    for (int i = 1; i < shape_.size; ++i) signal(peer(i), lane);
  }
  void wait_all(Lane lane = kData) {
    for (int i = 1; i < shape_.size; ++i) wait(peer(i), lane);
  }

  Feed feed(Rank from, Rank to, uint64_t bytes) const {
    const uint64_t slot = shape_.slot_bytes(), messages = Segments{bytes, slot}.count();
    return {from, to, messages, slot, messages == 1 && bytes <= shape_.geometry.line_bytes};
  }
  // Waits for the credit of a message. The writer's side of a feed: acquire, write the slot,
  // signal(to).
  void acquire(const Feed& feed, uint64_t message) {
    if (feed.credits && message >= slots()) wait(feed.to, kCredit);
  }
  Ref slot(const Feed& feed, uint64_t message) {
    if (feed.line) return line(feed.to, feed.from);
    const Turns turns{feed.slot_bytes, slots(), feed.pass, feed.round};
    return in_turn(inbox(feed.to, feed.from, 0), turns, message);
  }
  void put(const Feed& feed, uint64_t message, Ref src, Stretch stretch) {
    copy(slot(feed, message), src, stretch);
    signal(feed.to);
  }
  // Returns the credit. The reader's side: wait(from), read the slot, release.
  void release(const Feed& feed, uint64_t message) {
    if (feed.credits && message + slots() < feed.messages) signal(feed.from, kCredit);
  }

  // Writes the passes between two edges as one loop, so that long messages are short plans.
  // pass(c) adds the steps of pass c.
  template <typename Pass>
  void repeat(Passes passes, Pass&& pass) {
    stride_ = passes.stride;
    between_edges(0, passes.count, std::move(passes.edges), [&](uint64_t first, uint64_t count) {
      if (count > 1) close_loop();
      passes_ = count;
      pass(first);
      if (count > 1) close_loop();
      passes_ = 1;
    });
  }
  // Writes rounds first … end - 1 of a pass. Rounds between two edges are one block. From round to
  // round, operands with an extent go on to the next extent.
  template <typename Round>
  void rounds(int first, int end, std::vector<uint64_t> edges, Round&& round) {
    const auto at = static_cast<uint64_t>(first);
    between_edges(at, static_cast<uint64_t>(end), std::move(edges),
                  [&](uint64_t s, uint64_t count) {
                    if (count > 1) close_block();
                    rounds_ = static_cast<uint32_t>(count);
                    round(static_cast<int>(s));
                    if (count > 1) close_block();
                    rounds_ = 1;
                  });
  }

  Plan finish() {
    close_loop();
    return std::move(plan_);
  }

 private:
  static Ref ref(Space space, Rank rank, Rank from, uint64_t offset) {
    return {space, 0, static_cast<int16_t>(rank), static_cast<int16_t>(from), 0, offset};
  }
  Ref user(Space space, uint64_t offset, uint16_t extent) {
    Ref made = ref(space, rank_, rank_, offset);
    made.motion = straight_on();
    if (rounds_ > 1)
      made.extent = extent;
    else if (extent > 0)
      made.offset += plan_.extents[extent - 1u].offset;
    return made;
  }
  uint8_t straight_on() { return passes_ > 1 ? plan_.motion({stride_}) : uint8_t{0}; }

  void move(Verb verb, const std::vector<Ref>& dst, const std::vector<Ref>& src, Stretch stretch,
            bool final) {
    Step step{};
    step.verb = verb;
    step.final = final;
    step.bytes = stretch.bytes;
    if (rounds_ == 1) step.bytes = std::min(step.bytes, minus(stretch.end, stretch.at));
    if (step.bytes == 0) return;
    // Does it end in this loop, or in a round of this block?
    const uint64_t last = stretch.at + (passes_ - 1) * stride_;
    const bool ends = passes_ > 1 && minus(stretch.end, last) < stretch.bytes;
    if (ends || (rounds_ > 1 && stretch.extent > 0)) {
      step.bytes = stretch.bytes;
      step.extent = stretch.extent > 0 ? stretch.extent : plan_.extent({0, stretch.end});
      step.motion = straight_on();
      step.at = stretch.at;
    }
    step.dst_count = static_cast<uint8_t>(dst.size());
    step.src_count = static_cast<uint16_t>(src.size());
    step.first_ref = static_cast<uint32_t>(plan_.refs.size());
    plan_.refs.insert(plan_.refs.end(), dst.begin(), dst.end());
    plan_.refs.insert(plan_.refs.end(), src.begin(), src.end());
    plan_.steps.push_back(step);
  }

  void synchronize(Verb verb, Rank peer, Lane lane) {
    Step step{};
    step.verb = verb;
    step.lane = lane;
    step.peer = static_cast<int16_t>(peer);
    plan_.steps.push_back(step);
  }

  // Calls act(first, count) for each stretch between two edges.
  template <typename Act>
  static void between_edges(uint64_t first, uint64_t end, std::vector<uint64_t> edges, Act&& act) {
    edges.insert(edges.end(), {first, end});
    for (uint64_t& edge : edges) edge = std::clamp(edge, first, std::max(first, end));
    std::ranges::sort(edges);
    for (size_t i = 0; i + 1 < edges.size(); ++i) {
      if (edges[i] < edges[i + 1]) act(edges[i], edges[i + 1] - edges[i]);
    }
  }

  void close_block() {
    const uint32_t end = static_cast<uint32_t>(plan_.steps.size());
    if (end > block_begin_) plan_.blocks.push_back({block_begin_, end - block_begin_, rounds_});
    block_begin_ = end;
  }
  void close_loop() {
    close_block();
    const uint32_t end = static_cast<uint32_t>(plan_.blocks.size());
    if (end > loop_begin_) plan_.loops.push_back({loop_begin_, end - loop_begin_, passes_});
    loop_begin_ = end;
  }

  const Shape& shape_;
  const Rank rank_;
  Plan plan_{};
  uint64_t passes_ = 1, stride_ = 0;  // of the loop that is being written
  uint32_t rounds_ = 1;               // of the block
  uint32_t block_begin_ = 0, loop_begin_ = 0;
};

}  // namespace ringcomm
