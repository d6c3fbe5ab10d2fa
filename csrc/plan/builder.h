// What planners write plans with. Copies and reduces of nothing vanish; signals and waits never do,
// since every collective must leave every rank knowing that all others have begun it (see
// planners.h), whatever its size.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "plan/plan.h"
#include "plan/shape.h"

namespace ringcomm {

inline uint64_t minus(uint64_t a, uint64_t b) { return a > b ? a - b : 0; }

// Passes 0 … count - 1 over a long message. Between two edges they differ only in the offsets of
// input and output, `stride` bytes a pass, and in which slot they use, with this period.
struct Passes {
  uint64_t count;
  uint64_t period;
  uint64_t stride;
  std::vector<uint64_t> edges;
};

// A stream of messages into the slots of one inbox, in turn. The writer needs a credit for all but
// the first so many, so the reader returns one for all but the last so many.
struct Link {
  Rank from;
  Rank to;
  uint64_t messages;
  uint64_t slot_bytes;
  bool line = false;    // its only message rides in a line
  bool credits = true;  // false where the reader's own data says as much
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
  Rank peer(int steps) const { return shape_.after(rank_, steps); }

  Ref input(uint64_t offset) const { return ref(Space::kInput, rank_, rank_, offset); }
  Ref output(uint64_t offset) const { return ref(Space::kOutput, rank_, rank_, offset); }
  Ref window(Rank owner, uint64_t offset) const {
    return ref(Space::kWindow, owner, owner, offset);
  }
  Ref inbox(Rank owner, Rank from, uint64_t offset) const {
    return ref(Space::kInbox, owner, from, offset);
  }
  Ref line(Rank owner, Rank from) const { return ref(Space::kLine, owner, from, 0); }

  void copy(Ref dst, Ref src, uint64_t bytes) {
    if (bytes == 0) return;
    Step step = operands({dst}, {src}, bytes);
    step.verb = Verb::kCopy;
    plan_.steps.push_back(step);
  }

  void reduce(const std::vector<Ref>& dst, const std::vector<Ref>& src, uint64_t bytes,
              bool final) {
    if (bytes == 0) return;
    Step step = operands(dst, src, bytes);
    step.verb = Verb::kReduce;
    step.final = final;
    plan_.steps.push_back(step);
  }

  void signal(Rank to, Lane lane = kData) { synchronize(Verb::kSignal, to, lane); }
  void wait(Rank from, Lane lane = kData) { synchronize(Verb::kWait, from, lane); }

  // Beginning at the next rank, so that not all turn to rank 0 first.
  void signal_all(Lane lane = kData) {
    for (int i = 1; i < shape_.size; ++i) signal(peer(i), lane);
  }
  void wait_all(Lane lane = kData) {
    for (int i = 1; i < shape_.size; ++i) wait(peer(i), lane);
  }

  Link link(Rank from, Rank to, uint64_t bytes) const {
    const uint64_t slot = shape_.slot_bytes(), messages = Segments{bytes, slot}.count();
    return {from, to, messages, slot, messages == 1 && bytes <= shape_.geometry.line_bytes};
  }
  // The writer's side of a link: acquire, write the slot, signal(to).
  void acquire(const Link& link, uint64_t message) {
    if (link.credits && message >= slots()) wait(link.to, kCredit);
  }
  Ref slot(const Link& link, uint64_t message) const {
    if (link.line) return line(link.to, link.from);
    return inbox(link.to, link.from, message % slots() * link.slot_bytes);
  }
  void put(const Link& link, uint64_t message, Ref src, uint64_t bytes) {
    copy(slot(link, message), src, bytes);
    signal(link.to);
  }
  // The reader's side: wait(from), read the slot, release.
  void release(const Link& link, uint64_t message) {
    if (link.credits && message + slots() < link.messages) signal(link.from, kCredit);
  }

  // Writes the passes between two edges as one repeated block, so that long messages are short
  // plans. pass(i) adds the steps of pass i.
  template <typename Pass>
  void repeat(Passes passes, Pass&& pass) {
    std::vector<uint64_t>& edges = passes.edges;
    edges.insert(edges.end(), {0, passes.count});
    for (uint64_t& edge : edges) edge = std::min(edge, passes.count);
    std::sort(edges.begin(), edges.end());
    for (size_t i = 0; i + 1 < edges.size(); ++i) {
      uint64_t at = edges[i];
      const uint64_t repetitions = (edges[i + 1] - at) / passes.period;
      if (repetitions > 1) {
        close_block(1, 0);
        for (uint64_t end = at + passes.period; at < end; ++at) pass(at);
        close_block(repetitions, passes.stride * passes.period);
        at = edges[i] + repetitions * passes.period;
      }
      for (; at < edges[i + 1]; ++at) pass(at);
    }
  }

  Plan finish() {
    close_block(1, 0);
    plan_.blocks.shrink_to_fit();
    plan_.steps.shrink_to_fit();
    plan_.refs.shrink_to_fit();
    return std::move(plan_);
  }

 private:
  static Ref ref(Space space, Rank rank, Rank from, uint64_t offset) {
    return {space, static_cast<int16_t>(rank), static_cast<int16_t>(from), offset};
  }

  Step operands(const std::vector<Ref>& dst, const std::vector<Ref>& src, uint64_t bytes) {
    Step step{};
    step.dst_count = static_cast<uint8_t>(dst.size());
    step.src_count = static_cast<uint16_t>(src.size());
    step.first_ref = static_cast<uint32_t>(plan_.refs.size());
    step.bytes = bytes;
    plan_.refs.insert(plan_.refs.end(), dst.begin(), dst.end());
    plan_.refs.insert(plan_.refs.end(), src.begin(), src.end());
    return step;
  }

  void synchronize(Verb verb, Rank peer, Lane lane) {
    Step step{};
    step.verb = verb;
    step.lane = lane;
    step.peer = static_cast<int16_t>(peer);
    plan_.steps.push_back(step);
  }

  void close_block(uint64_t repetitions, uint64_t stride) {
    const uint32_t end = static_cast<uint32_t>(plan_.steps.size());
    if (end > block_begin_) {
      plan_.blocks.push_back({block_begin_, end - block_begin_, repetitions, stride});
    }
    block_begin_ = end;
  }

  const Shape& shape_;
  const Rank rank_;
  Plan plan_{};
  uint32_t block_begin_ = 0;
};

}  // namespace ringcomm
