// Rings: every rank sends to the next one and hears from the previous one, and never loads from
// another's memory. Reduce-scatter and all-gather are the two halves of the bandwidth-optimal
// all-reduce (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
// workstations", 2009). Long messages go round in passes, one slot's worth of each chunk at a time.
#include <vector>

#include "plan/builder.h"
#include "plan/planners.h"

namespace ringcomm {
namespace {

class Ring {
 public:
  Ring(const Shape& shape, Rank rank, int messages_per_pass)
      : plan_(shape, Algorithm::kRing, rank),
        per_pass_(static_cast<uint64_t>(messages_per_pass)),
        rank_(rank),
        size_(shape.size) {
    uint64_t largest = 0;
    for (Rank r = 0; r < size_; ++r) {
      const uint64_t at =
          shape.shards.empty() ? shape.cut(shape.bytes, r, size_) : shape.shard_offset(r);
      const uint64_t end = shape.shards.empty() ? shape.cut(shape.bytes, r + 1, size_)
                                                : at + shape.shards[static_cast<size_t>(r)];
      offsets_.push_back(at);
      chunks_.push_back({end - at, shape.slot_bytes()});
      largest = std::max(largest, end - at);
    }
    passes_ = Segments{largest, shape.slot_bytes()}.count();
    // Between two ranks, the other's next message says that it has consumed my last one.
    const bool credits = size_ > 2;
    out_ = {rank, plan_.peer(1), passes_ * per_pass_, shape.slot_bytes(), false, credits};
    in_ = {plan_.peer(-1), rank, passes_ * per_pass_, shape.slot_bytes(), false, credits};
  }

  template <typename Pass>
  Plan build(Pass pass) {
    std::vector<uint64_t> edges = {1, minus(passes_, 1)};
    for (const Segments& chunk : chunks_) {
      edges.insert(edges.end(), {chunk.full(), chunk.count()});
    }
    plan_.repeat({passes_, per_pass_ % 2 == 0 ? 1u : 2u, in_.slot_bytes, edges}, [&](uint64_t p) {
      pass_ = p;
      message_ = p * per_pass_;
      pass();
    });
    return plan_.finish();
  }

  // Step s: chunk rank - 1 - s leaves with what was added to it so far, the one before it arrives;
  // after the last step that is my own.
  void reduce_scatter() {
    for (int s = 0; s < size_ - 1; ++s) {
      const Rank chunk = plan_.peer(-1 - s);
      plan_.acquire(out_, message_);
      if (s == 0)
        plan_.copy(plan_.slot(out_, message_), input(chunk), length(chunk));
      else
        add_arrived(plan_.slot(out_, message_), chunk, false);
      plan_.signal(out_.to);
      if (s > 0) plan_.release(in_, message_ - 1);
      plan_.wait(in_.from);
      ++message_;
    }
    add_arrived(output(rank_), rank_, true);
    plan_.release(in_, message_ - 1);
  }

  // Step s: chunk rank - s leaves, the one before it arrives. The first is `mine`.
  void all_gather(Ref mine) {
    for (int s = 0; s < size_ - 1; ++s) {
      const Rank chunk = plan_.peer(-s), arriving = plan_.peer(-s - 1);
      plan_.acquire(out_, message_);
      plan_.put(out_, message_, s == 0 ? mine : output(chunk), length(chunk));
      plan_.wait(in_.from);
      plan_.copy(output(arriving), plan_.slot(in_, message_), length(arriving));
      plan_.release(in_, message_);
      ++message_;
    }
  }

  void keep_mine() { plan_.copy(output(rank_), input(rank_), length(rank_)); }

  Ref input(Rank chunk) const {
    const bool only_mine = plan_.shape().collective == Collective::kAllGather;
    return plan_.input((only_mine ? 0 : offset(chunk)) + at());
  }
  Ref output(Rank chunk) const {
    const bool only_mine = plan_.shape().collective == Collective::kReduceScatter;
    return plan_.output((only_mine ? 0 : offset(chunk)) + at());
  }

 private:
  uint64_t at() const { return pass_ * in_.slot_bytes; }
  uint64_t offset(Rank chunk) const { return offsets_[static_cast<size_t>(chunk)]; }
  uint64_t length(Rank chunk) const { return chunks_[static_cast<size_t>(chunk)].length(pass_); }

  void add_arrived(Ref dst, Rank chunk, bool final) {
    plan_.reduce({dst}, {plan_.slot(in_, message_ - 1), input(chunk)}, length(chunk), final);
  }

  PlanBuilder plan_;
  const uint64_t per_pass_;
  const Rank rank_;
  const int size_;
  std::vector<uint64_t> offsets_;
  std::vector<Segments> chunks_;
  Link out_{}, in_{};
  uint64_t passes_ = 0;
  uint64_t pass_ = 0;
  uint64_t message_ = 0;
};

}  // namespace

Plan ring_all_reduce(const Shape& shape, Rank rank) {
  Ring ring(shape, rank, 2 * (shape.size - 1));
  return ring.build([&] {
    ring.reduce_scatter();
    ring.all_gather(ring.output(rank));
  });
}

Plan ring_reduce_scatter(const Shape& shape, Rank rank) {
  Ring ring(shape, rank, shape.size - 1);
  return ring.build([&] { ring.reduce_scatter(); });
}

Plan ring_all_gather(const Shape& shape, Rank rank) {
  Ring ring(shape, rank, shape.size - 1);
  return ring.build([&] {
    ring.all_gather(ring.input(rank));
    ring.keep_mine();
  });
}

}  // namespace ringcomm
