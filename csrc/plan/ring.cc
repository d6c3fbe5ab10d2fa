// Rings: every rank sends to the next one and hears from the previous one, and never loads from
// another's memory. Reduce-scatter and all-gather are the two halves of the bandwidth-optimal
// all-reduce (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
// workstations", 2009). Long messages go round in passes, a few segments of each chunk at a time:
// half the slots are under way on every link, while the credits of the other half come back.
#include <vector>

#include "plan/builder.h"
#include "plan/planners.h"

namespace ringcomm {
namespace {

constexpr uint64_t kMostPerSlot = 8;  // segments; shorter ones cost more than they hide

class Ring {
 public:
  Ring(const Shape& shape, Rank rank, int rounds)
      : plan_(shape, Algorithm::kRing, rank), rounds_(rounds), rank_(rank), size_(shape.size) {
    uint64_t largest = 0;
    for (Rank r = 0; r < size_; ++r) {
      const uint64_t at =
          shape.shards.empty() ? shape.cut(shape.bytes, r, size_) : shape.shard_offset(r);
      const uint64_t end =
          shape.shards.empty() ? shape.cut(shape.bytes, r + 1, size_) : at + shape.shard(r);
      offsets_.push_back(at);
      chunks_.push_back(end - at);
      largest = std::max(largest, end - at);
    }
    const uint64_t slot = shape.slot_bytes(), most = plan_.slots() / 2;
    const uint64_t shortest = std::max(shape.element, shape.align(slot / kMostPerSlot));
    segment_ = std::max(shortest, shape.longest_cut(largest, static_cast<int>(most)));
    segment_ = std::min(segment_, slot);
    depth_ = std::min(most, Segments{largest, segment_}.count());
    passes_ = Segments{largest, depth_ * segment_}.count();
    // Between two ranks, the other's next message says that it has consumed my last one.
    const bool credits = size_ > 2;
    const uint64_t messages = passes_ * depth_ * static_cast<uint64_t>(rounds_);
    out_ = {rank, plan_.peer(1), messages, slot, false, credits};
    in_ = {plan_.peer(-1), rank, messages, slot, false, credits};
  }

  // turn(s) takes what came in round s - 1, if any, and sends in round s, if there is one. Where
  // several segments are under way, the last of a pass are taken between the first of the next
  // one: the link is not to run dry.
  template <typename Turn>
  Plan build(Turn turn) {
    const bool overlap = depth_ > 1;
    std::vector<uint64_t> edges = {1, minus(passes_, 1)};
    for (const uint64_t chunk : chunks_) {
      const Segments passes{chunk, depth_ * segment_};
      edges.insert(edges.end(), {passes.full(), passes.count()});
      if (overlap) edges.insert(edges.end(), {passes.full() + 1, passes.count() + 1});
    }
    const auto go = [&](uint64_t pass, int round, uint64_t segment) {
      number_ = pass * depth_ + segment;
      message_ =
          (pass * static_cast<uint64_t>(rounds_) + static_cast<uint64_t>(round)) * depth_ + segment;
      turn(round);
    };
    plan_.repeat({passes_, rounds_ % 2 == 0 ? 1u : 2u, depth_ * segment_, edges}, [&](uint64_t p) {
      for (int s = 0; s < rounds_; ++s) {
        for (uint64_t g = 0; g < depth_; ++g) {
          if (overlap && s == 0 && p > 0) go(p - 1, rounds_, g);
          go(p, s, g);
        }
      }
      if (overlap && p + 1 < passes_) return;
      for (uint64_t g = 0; g < depth_; ++g) go(p, rounds_, g);
    });
    return plan_.finish();
  }

  // Round s: chunk rank - 1 - s leaves with what was added to it so far, the one before it arrives;
  // after the last round that is my own.
  void reduce_scatter(int s) {
    const Rank chunk = plan_.peer(-1 - s);
    if (s > 0) plan_.wait(in_.from);
    if (s == size_ - 1) {
      add_arrived(output(rank_), rank_, true);
    } else {
      plan_.acquire(out_, message_);
      if (s == 0)
        plan_.copy(plan_.slot(out_, message_), input(chunk), length(chunk));
      else
        add_arrived(plan_.slot(out_, message_), chunk, false);
      plan_.signal(out_.to);
    }
    if (s > 0) plan_.release(in_, message_ - depth_);
  }

  // Round s: chunk rank - s leaves, the one before it arrives. The first is `mine`.
  void all_gather(int s, Ref mine) {
    const Rank chunk = plan_.peer(-s);
    if (s > 0) {
      plan_.wait(in_.from);
      plan_.copy(output(chunk), plan_.slot(in_, message_ - depth_), length(chunk));
      plan_.release(in_, message_ - depth_);
    }
    if (s == size_ - 1) return;
    plan_.acquire(out_, message_);
    plan_.put(out_, message_, s == 0 ? mine : output(chunk), length(chunk));
  }

  void keep_mine() { plan_.copy(output(rank_), input(rank_), length(rank_)); }

  Ref input(Rank chunk) const {
    const bool only_mine = plan_.shape().collective == Collective::kAllGather;
    return plan_.input((only_mine ? 0 : offset(chunk)) + number_ * segment_);
  }
  Ref output(Rank chunk) const {
    const bool only_mine = plan_.shape().collective == Collective::kReduceScatter;
    return plan_.output((only_mine ? 0 : offset(chunk)) + number_ * segment_);
  }

 private:
  uint64_t offset(Rank chunk) const { return offsets_[static_cast<size_t>(chunk)]; }
  uint64_t length(Rank chunk) const {
    return Segments{chunks_[static_cast<size_t>(chunk)], segment_}.length(number_);
  }

  void add_arrived(Ref dst, Rank chunk, bool final) {
    plan_.reduce({dst}, {plan_.slot(in_, message_ - depth_), input(chunk)}, length(chunk), final);
  }

  PlanBuilder plan_;
  const int rounds_;
  const Rank rank_;
  const int size_;
  std::vector<uint64_t> offsets_, chunks_;
  Link out_{}, in_{};
  uint64_t segment_ = 0, depth_ = 0, passes_ = 0;  // depth: segments of a chunk under way
  uint64_t number_ = 0, message_ = 0;              // of the segment in its chunk; of the message
};

}  // namespace

Plan ring_all_reduce(const Shape& shape, Rank rank) {
  const int last = shape.size - 1;
  Ring ring(shape, rank, 2 * last);
  return ring.build([&](int s) {
    if (s <= last) ring.reduce_scatter(s);
    if (s >= last) ring.all_gather(s - last, ring.output(rank));
  });
}

Plan ring_reduce_scatter(const Shape& shape, Rank rank) {
  Ring ring(shape, rank, shape.size - 1);
  return ring.build([&](int s) { ring.reduce_scatter(s); });
}

Plan ring_all_gather(const Shape& shape, Rank rank) {
  Ring ring(shape, rank, shape.size - 1);
  return ring.build([&](int s) {
    ring.all_gather(s, ring.input(rank));
    if (s == shape.size - 1) ring.keep_mine();
  });
}

}  // namespace ringcomm
