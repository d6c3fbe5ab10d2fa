// Reduce-scatter with one hop between hosts: the ranks of a host add up what each host's rank of
// their own index is to get, and put it there. Inside the host they read one another's windows.
#include <vector>

#include "plan/builder.h"
#include "plan/compose.h"
#include "plan/planners.h"

namespace ringcomm {
namespace {

// Pass c sends segment c of all shards and ends segment c - lag of mine: half the slots are under
// way. Whoever sends me message c has consumed all before my c - lag, so there are no credits. My
// mates signal that they have published c, and so consumed c - 1: two turns of the window suffice.
class ReduceScatter {
 public:
  ReduceScatter(const Shape& shape, Rank rank, Algorithm algorithm, int local)
      : plan_(shape, algorithm, rank),
        local_(local),
        hosts_(shape.size / local),
        rank_(rank),
        lag_(plan_.slots() / 2 - 1) {
    const uint64_t turn = shape.align(shape.geometry.window_bytes() / 2);
    const uint64_t piece = shape.align(turn / static_cast<uint64_t>(shape.size));
    unit_ = std::min(shape.slot_bytes(), piece);
    RINGCOMM_CHECK(unit_ > 0, "a window of ", 2 * turn, " bytes has no room for ", shape.size,
                   " ranks");
    count_ = Segments{shape.largest_shard(), unit_}.count();
    line_ = count_ == 1 && shape.largest_shard() <= shape.geometry.line_bytes;
  }

  Plan build() {
    std::vector<uint64_t> edges = {lag_, minus(count_, 1), count_};
    for (const uint64_t bytes : plan_.shape().shards) {
      const Segments shard{bytes, unit_};
      for (const uint64_t end : {shard.full(), shard.count()}) {
        edges.insert(edges.end(), {minus(end, 1), end, end + lag_});
      }
    }
    publish(0);
    plan_.repeat({count_ + lag_, plan_.slots(), unit_, edges}, [&](uint64_t c) {
      if (c < count_) {
        each_mate([&](Rank mate) { plan_.wait(mate); });
        each_host([&](Rank r) { send(r, c); });
        const uint64_t mine = local_ > 1 ? shard(rank_).length(c) : 0;
        plan_.reduce({output(c)}, pieces(rank_, c), mine, hosts_ == 1);
        if (c + 1 < count_) publish(c + 1);
      }
      if (c >= lag_ && hosts_ > 1) take(c - lag_);
    });
    return plan_.finish();
  }

 private:
  template <typename Do>
  void each_mate(Do act) {
    for (int i = 1; i < local_; ++i) act(mate(i));
  }
  template <typename Do>  // with the rank of my index there
  void each_host(Do act) {
    for (int i = 1; i < hosts_; ++i) act(plan_.peer(i * local_));
  }
  Rank mate(int steps) const { return rank_ / local_ * local_ + (rank_ % local_ + steps) % local_; }

  Segments shard(Rank r) const { return {plan_.shape().shards[static_cast<size_t>(r)], unit_}; }
  Ref input(Rank r, uint64_t c) const {
    return plan_.input(plan_.shape().shard_offset(r) + shard(r).offset(c));
  }
  Ref output(uint64_t c) const { return plan_.output(shard(rank_).offset(c)); }
  Ref published(Rank by, Rank r, uint64_t c) const {
    const uint64_t turn = unit_ * static_cast<uint64_t>(plan_.shape().size);
    return plan_.window(by, c % 2 * turn + static_cast<uint64_t>(r) * unit_);
  }
  Ref slot(Rank from, Rank to, uint64_t c) const {
    return plan_.slot({from, to, count_, plan_.shape().slot_bytes(), line_, false}, c);
  }

  void publish(uint64_t c) {
    for (Rank r = 0; local_ > 1 && r < plan_.shape().size; ++r) {
      if ((r - rank_) % local_ != 0) {
        plan_.copy(published(rank_, r, c), input(r, c), shard(r).length(c));
      }
    }
    each_mate([&](Rank mate) { plan_.signal(mate); });
  }

  // What my host has for rank r.
  std::vector<Ref> pieces(Rank r, uint64_t c) const {
    std::vector<Ref> from;
    for (int i = 0; i < local_; ++i) {
      const Rank by = rank_ / local_ * local_ + i;
      from.push_back(by == rank_ ? input(r, c) : published(by, r, c));
    }
    return from;
  }

  void send(Rank r, uint64_t c) {
    const uint64_t bytes = shard(r).length(c);
    if (local_ > 1)
      plan_.reduce({slot(rank_, r, c)}, pieces(r, c), bytes, false);
    else
      plan_.copy(slot(rank_, r, c), input(r, c), bytes);
    plan_.signal(r);
  }

  void take(uint64_t c) {
    std::vector<Ref> from = {local_ > 1 ? output(c) : input(rank_, c)};
    each_host([&](Rank r) {
      plan_.wait(r);
      from.push_back(slot(r, rank_, c));
    });
    plan_.reduce({output(c)}, from, shard(rank_).length(c), true);
  }

  PlanBuilder plan_;
  const int local_, hosts_;
  const Rank rank_;
  const uint64_t lag_;
  uint64_t unit_ = 0, count_ = 0;  // bytes and number of segments
  bool line_ = false;
};

}  // namespace

Plan hierarchical_reduce_scatter(const Shape& shape, Rank rank) {
  check_hosts(shape);
  return ReduceScatter(shape, rank, Algorithm::kHierarchical, shape.local).build();
}

Plan pairwise_reduce_scatter(const Shape& shape, Rank rank) {
  return ReduceScatter(shape, rank, Algorithm::kPairwise, 1).build();
}

}  // namespace ringcomm
