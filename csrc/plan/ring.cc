// Rings: every rank sends to the next one and hears from the previous one, and never loads from
// another's memory. Reduce-scatter and all-gather are the two halves of the bandwidth-optimal
// all-reduce (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
// workstations", 2009). Long messages go round in passes, a few segments of each chunk at a time:
// half the slots are under way on every link, while the credits of the other half come back.

#include "plan/builder.h"
#include "plan/planners.h"

namespace ringcomm {
namespace {

constexpr uint64_t kMostPerSlot = 8;  // segments; shorter ones cost more than they hide

class Ring {
 public:
  Ring(const Shape& shape, Rank rank, int rounds)
      : plan_(shape, Algorithm::kRing, rank), rounds_(rounds), size_(shape.size) {
    const std::vector<Extent> chunks = shape.chunks();
    for (int s = 0; s <= rounds; ++s) {
      const Rank r = plan_.peer(shape.collective == Collective::kAllGather ? -s : -1 - s);
      chunks_.push_back(chunks[static_cast<size_t>(r)]);
    }
    plan_.extents(chunks_);
    const uint64_t largest =
        std::ranges::max(chunks_, {}, [](const Extent& chunk) { return chunk.bytes; }).bytes;
    const uint64_t slot = shape.slot_bytes(), most = plan_.slots() / 2;
    const uint64_t shortest = std::max(shape.element, shape.align(slot / kMostPerSlot));
    segment_ = std::max(shortest, shape.longest_cut(largest, static_cast<int>(most)));
    segment_ = std::min(segment_, slot);
    depth_ = std::min(most, Segments{largest, segment_}.count());
    passes_ = Segments{largest, depth_ * segment_}.count();
    // Between two ranks, the other's next message says that it has consumed my last one.
    const bool credits = size_ > 2;
    const uint64_t pass = depth_ * static_cast<uint64_t>(rounds_);
    out_ = {rank, plan_.peer(1), passes_ * pass, slot, false, credits, pass, depth_};
    in_ = {plan_.peer(-1), rank, passes_ * pass, slot, false, credits, pass, depth_};
  }

  // turn(s) takes the message of round s - 1, if any, and sends in round s, if there is one. If
  // several segments are under way, the last of a pass are taken between the first of the next
  // one, so that the link does not run dry.
  template <typename Turn>
  Plan build(Turn turn) {
    const bool overlap = depth_ > 1;
    const auto go = [&](uint64_t pass, int round, uint64_t segment) {
      number_ = pass * depth_ + segment;
      message_ =
          (pass * static_cast<uint64_t>(rounds_) + static_cast<uint64_t>(round)) * depth_ + segment;
      turn(round);
    };
    const auto go_all = [&](uint64_t pass, int round) {
      for (uint64_t g = 0; g < depth_; ++g) go(pass, round, g);
    };
    plan_.repeat({passes_, depth_ * segment_, {1, passes_ - 1}}, [&](uint64_t p) {
      for (uint64_t g = 0; g < depth_; ++g) {
        if (overlap && p > 0) go(p - 1, rounds_, g);
        go(p, 0, g);
      }
      plan_.rounds(1, rounds_, edges(), [&](int s) { go_all(p, s); });
      if (!overlap || p + 1 == passes_) go_all(p, rounds_);
    });
    return plan_.finish();
  }

  // Round s: chunk rank - 1 - s leaves with the sum so far, and the chunk before it arrives. After
  // the last round that chunk is my own.
  void reduce_scatter(int s) {
    if (s > 0) plan_.wait(in_.from);
    if (s == size_ - 1) {
      add_arrived(output(s), s, true);
    } else {
      plan_.acquire(out_, message_);
      if (s == 0)
        plan_.copy(plan_.slot(out_, message_), input(s), stretch(s));
      else
        add_arrived(plan_.slot(out_, message_), s, false);
      plan_.signal(out_.to);
    }
    if (s > 0) plan_.release(in_, message_ - depth_);
  }

  // Rounds s from `first` on: chunk rank - (s - first) leaves, the one before it arrives. The first
  // is `mine`.
  void all_gather(int s, int first, Ref mine) {
    if (s > first) {
      plan_.wait(in_.from);
      plan_.copy(output(s), plan_.slot(in_, message_ - depth_), stretch(s));
      plan_.release(in_, message_ - depth_);
    }
    if (s == rounds_) return;
    plan_.acquire(out_, message_);
    plan_.put(out_, message_, s == first ? mine : output(s), stretch(s));
  }

  void keep_mine() { plan_.copy(output(0), input(0), stretch(0)); }

  // The input, or output, of the chunk that leaves in round s.
  Ref input(int s) {
    const bool only_mine = plan_.shape().collective == Collective::kAllGather;
    return only_mine ? plan_.input(offset()) : plan_.input(offset(), chunk(s));
  }
  Ref output(int s) {
    const bool only_mine = plan_.shape().collective == Collective::kReduceScatter;
    return only_mine ? plan_.output(offset()) : plan_.output(offset(), chunk(s));
  }

 private:
  uint64_t offset() const { return number_ * segment_; }
  uint16_t chunk(int s) const { return static_cast<uint16_t>(1 + s); }
  Stretch stretch(int s) const {
    return {segment_, offset(), chunks_[static_cast<size_t>(s)].bytes, chunk(s)};
  }

  // The rounds that differ from the one before: the first and the last that need a credit or give
  // one. An all-reduce also turns from adding up to handing round.
  std::vector<uint64_t> edges() const {
    const auto rounds = static_cast<uint64_t>(rounds_), last = static_cast<uint64_t>(size_ - 1);
    std::vector<uint64_t> edges = {last, last + 1};
    for (const uint64_t beyond : {uint64_t{0}, depth_ - 1}) {
      const uint64_t credits = (plan_.slots() + beyond) / depth_;
      edges.insert(edges.end(), {credits, minus(rounds + 1, credits)});
    }
    return edges;
  }

  void add_arrived(Ref dst, int s, bool final) {
    plan_.reduce({dst}, {plan_.slot(in_, message_ - depth_), input(s)}, stretch(s), final);
  }

  PlanBuilder plan_;
  const int rounds_;
  const int size_;
  // Chunks are in the order in which they leave, and come to stay. They are the plan's extents.
  std::vector<Extent> chunks_;
  Feed out_{}, in_{};
  uint64_t segment_ = 0, depth_ = 0, passes_ = 0;  // depth: segments of a chunk under way
  uint64_t number_ = 0, message_ = 0;              // of the segment in its chunk; of the message
};

}  // namespace

Plan ring_all_reduce(const Shape& shape, Rank rank) {
  const int last = shape.size - 1;
  Ring ring(shape, rank, 2 * last);
  return ring.build([&](int s) {
    if (s <= last) ring.reduce_scatter(s);
    if (s >= last) ring.all_gather(s, last, ring.output(s));
  });
}

Plan ring_reduce_scatter(const Shape& shape, Rank rank) {
  Ring ring(shape, rank, shape.size - 1);
  return ring.build([&](int s) { ring.reduce_scatter(s); });
}

Plan ring_all_gather(const Shape& shape, Rank rank) {
  Ring ring(shape, rank, shape.size - 1);
  return ring.build([&](int s) {
    ring.all_gather(s, 0, ring.input(0));
    if (s == shape.size - 1) ring.keep_mine();
  });
}

}  // namespace ringcomm
