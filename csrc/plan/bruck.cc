// log2 n rounds for any number n of ranks, each with half as many shards as the one before: the
// all-gather of Bruck, Ho, Kipnis, Upfal, Weathersby, "Efficient Algorithms for All-to-All
// Communications in Multiport Message-Passing Systems", 1997, and its mirror, the reduce-scatter of
// Traeff, "Optimal, Non-pipelined Reduce-scatter and Allreduce Algorithms", 2024. All-reduce is one
// after the other. So a rank sends as many bytes as in a ring, and talks to 2 log2 n others at
// most.
//
// Distances are s(0) = n, s(k) = ceil(s(k - 1) / 2), to 1. Shard i is that of the i-th rank after
// mine. In round k of a reduce-scatter, shards s(k) … s(k - 1) - 1 go to the rank s(k) after me, as
// its shards 0 and on, with all that has arrived for them. An all-gather takes the same way back.
//
// A pass takes so much of every shard that a round's message fits into half an inbox, where it
// stays: messages are added up from the inboxes. There are no credits. A rank that has ended a
// pass has heard of every rank's, and that began when the rank had read all messages of the pass
// before. So passes take turns with the two halves, and so do the two ways of an all-reduce.
#include <bit>

#include "plan/builder.h"
#include "plan/planners.h"

namespace ringcomm {
namespace {

class Bruck {
 public:
  Bruck(const Shape& shape, Rank rank) : plan_(shape, Algorithm::kBruck, rank), rank_(rank) {
    for (int s = shape.size; s > 1; s = (s + 1) / 2) before_.push_back(s);
    const std::vector<Extent> chunks = shape.chunks();
    for (int i = 0; i < shape.size; ++i) {
      chunks_.push_back(chunks[static_cast<size_t>(plan_.peer(i))]);
    }
    plan_.extents(chunks_);
    const uint64_t largest = std::ranges::max(chunks_, {}, &Extent::bytes).bytes;
    unit_ = std::min(largest, shape.bruck_bytes());
    slots_ = std::bit_ceil(static_cast<uint64_t>(shape.size / 2));
    passes_ = largest == 0 ? 1 : Segments{largest, unit_}.count();
  }

  template <typename Pass>
  Plan build(Pass pass) {
    plan_.repeat({passes_, unit_, {}}, [&](uint64_t c) {
      offset_ = c * unit_;
      turn_ = both_ways() ? 0 : c * slots_;
      pass();
    });
    return plan_.finish();
  }

  void reduce_scatter() {
    for (size_t k = 0; k < before_.size(); ++k) {
      const int distance = after(k);
      const Rank to = plan_.peer(distance);
      // The message of the round before may be a shard short.
      const int short_at = k > 0 ? sent(k - 1) : 0;
      plan_.rounds(distance, before_[k], {static_cast<uint64_t>(short_at)},
                   [&](int i) { add_up(slot(to, rank_, i - distance), i, k, false); });
      plan_.signal(to);
      plan_.wait(plan_.peer(-distance));
    }
    add_up(only_mine() ? plan_.output(offset_) : output(0), 0, before_.size(), true);
  }

  void all_gather() {
    if (both_ways()) turn_ = slots_;
    for (size_t k = before_.size(); k-- > 0;) {
      const int distance = after(k);
      const Rank to = plan_.peer(-distance), from = plan_.peer(distance);
      plan_.rounds(0, sent(k), {},
                   [&](int i) { plan_.copy(slot(to, rank_, i), output(i), stretch(i)); });
      plan_.signal(to);
      plan_.wait(from);
      plan_.rounds(distance, before_[k], {}, [&](int i) {
        plan_.copy(output(i), slot(rank_, from, i - distance), stretch(i));
      });
    }
  }

  void keep_mine() { plan_.copy(output(0), plan_.input(offset_), stretch(0)); }

 private:
  int after(size_t k) const { return (before_[k] + 1) / 2; }
  int sent(size_t k) const { return before_[k] - after(k); }  // shards in round k
  bool both_ways() const { return plan_.shape().collective == Collective::kAllReduce; }
  bool only_mine() const { return plan_.shape().collective == Collective::kReduceScatter; }

  uint16_t chunk(int i) const { return static_cast<uint16_t>(1 + i); }
  Ref input(int i) { return plan_.input(offset_, chunk(i)); }
  Ref output(int i) { return plan_.output(offset_, chunk(i)); }
  Stretch stretch(int i) const {
    return {unit_, offset_, chunks_[static_cast<size_t>(i)].bytes, chunk(i)};
  }
  Ref slot(Rank owner, Rank from, int i) {
    const Turns turns{unit_, 2 * slots_, both_ways() ? 0 : slots_, 1};
    const Ref first = plan_.inbox(owner, from, 0);
    return plan_.in_turn(first, turns, turn_ + static_cast<uint64_t>(i));
  }

  // My input of shard i, and what has arrived for it in so many rounds.
  void add_up(Ref to, int i, size_t rounds, bool final) {
    std::vector<Ref> from = {input(i)};
    for (size_t k = 0; k < rounds; ++k) {
      if (i < sent(k)) from.push_back(slot(rank_, plan_.peer(-after(k)), i));
    }
    if (from.size() == 1) return plan_.copy(to, from.front(), stretch(i));
    plan_.reduce({to}, from, stretch(i), final);
  }

  PlanBuilder plan_;
  const Rank rank_;
  std::vector<int> before_;     // s(k - 1) for k = 1 and on
  std::vector<Extent> chunks_;  // of each rank from mine on
  uint64_t unit_ = 0, slots_ = 0, passes_ = 0;
  uint64_t offset_ = 0, turn_ = 0;  // of this pass: in a shard; the first slot
};

// Where not even an element of half the shards fits into an inbox.
Plan instead(Plan ring) {
  ring.algorithm = Algorithm::kBruck;
  return ring;
}

}  // namespace

Plan bruck_all_reduce(const Shape& shape, Rank rank) {
  if (shape.bruck_bytes() == 0) return instead(ring_all_reduce(shape, rank));
  Bruck bruck(shape, rank);
  return bruck.build([&] {
    bruck.reduce_scatter();
    bruck.all_gather();
  });
}

Plan bruck_reduce_scatter(const Shape& shape, Rank rank) {
  if (shape.bruck_bytes() == 0) return instead(ring_reduce_scatter(shape, rank));
  Bruck bruck(shape, rank);
  return bruck.build([&] { bruck.reduce_scatter(); });
}

Plan bruck_all_gather(const Shape& shape, Rank rank) {
  if (shape.bruck_bytes() == 0) return instead(ring_all_gather(shape, rank));
  Bruck bruck(shape, rank);
  return bruck.build([&] {
    bruck.keep_mine();
    bruck.all_gather();
  });
}

}  // namespace ringcomm
