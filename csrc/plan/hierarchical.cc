// A long all-reduce on several hosts with several ranks each: a reduce-scatter in which the ranks
// of a host add up what a rank of their own index is to get and put it there, and the all-gather
// that takes the results back the same way. So each host sends 2 (h - 1) / h of the message, h
// hosts, which is the least there can be (Patarasuk and Yuan 2009), and every rank carries its
// share of it. The phases run as a pipeline: while one segment is inside the host, others are
// between hosts.
#include <vector>

#include "plan/builder.h"
#include "plan/compose.h"
#include "plan/planners.h"

namespace ringcomm {
namespace {

// Pass c adds up and sends segment c of all shards; takes the sums of c - lag of mine and sends the
// result back; takes the results of c - 2 lag and passes them on to my mates. Half the slots are
// under way in each direction. Whoever sends me message c has consumed all before my c - lag, so
// there are no credits. One signal a pass tells my mates that I have published segment c + 1 and
// the results of c - 2 lag, and so have consumed what they published before: two turns of the
// window suffice.
class Pipeline {
 public:
  Pipeline(const Shape& shape, Rank rank)
      : plan_(shape, Algorithm::kHierarchical, rank),
        rank_(rank),
        local_(shape.local),
        hosts_(shape.size / shape.local),
        first_(rank / shape.local * shape.local) {
    const auto areas = static_cast<uint64_t>(shape.size + hosts_);
    const uint64_t turn = shape.align(shape.geometry.window_bytes() / 2);
    unit_ = std::min(shape.align(shape.slot_bytes() / 2), shape.align(turn / areas));
    RINGCOMM_CHECK(unit_ > 0, "a window of ", 2 * turn, " bytes has no room for ", areas, " parts");
    turn_ = areas * unit_;
    for (Rank r = 0; r < shape.size; ++r) {
      const uint64_t at = shape.cut(shape.bytes, r, shape.size);
      offsets_.push_back(at);
      shards_.push_back({shape.cut(shape.bytes, r + 1, shape.size) - at, unit_});
    }
    count_ = Segments{shape.longest_cut(shape.bytes, shape.size), unit_}.count();
    lag_ = std::min(plan_.slots() / 2 - 1, count_ - 1);
  }

  Plan build() {
    const uint64_t last = count_ + 2 * lag_;
    std::vector<uint64_t> edges = {lag_, 2 * lag_, 2 * lag_ + 1};
    for (const Segments& shard : shards_) {
      for (const uint64_t end : {shard.full(), shard.count(), count_}) {
        edges.insert(edges.end(), {minus(end, 1), end, end + lag_, end + 2 * lag_});
        edges.push_back(end + 2 * lag_ + 1);
      }
    }
    publish_input(0);
    tell_mates();
    plan_.repeat({last + 1, plan_.slots(), unit_, edges}, [&](uint64_t c) {
      const bool told = c == 0 || tells(c - 1);
      if (told) each_mate([&](Rank mate) { plan_.wait(mate); });
      if (c < count_) send_sums(c);
      if (c > 2 * lag_) load_results(c - 1 - 2 * lag_, c);
      if (c + 1 < count_) publish_input(c + 1);
      if (c >= lag_ && c < count_ + lag_) take_sums(c - lag_);
      if (c >= 2 * lag_ && c < last) take_results(c - 2 * lag_, c + 1);
      if (tells(c)) tell_mates();
    });
    return plan_.finish();
  }

 private:
  // In pass c there is something for my mates.
  bool tells(uint64_t c) const {
    return c + 1 < count_ || (c >= 2 * lag_ && c < count_ + 2 * lag_);
  }
  template <typename Do>
  void each_mate(Do act) {
    for (int i = 1; i < local_; ++i) act(first_ + (rank_ - first_ + i) % local_);
  }
  template <typename Do>  // with the rank of my index there
  void each_host(Do act) {
    for (int i = 1; i < hosts_; ++i) act(plan_.peer(i * local_));
  }
  void tell_mates() {
    each_mate([&](Rank mate) { plan_.signal(mate); });
  }

  const Segments& shard(Rank r) const { return shards_[static_cast<size_t>(r)]; }
  uint64_t bytes(Rank r, uint64_t c) const { return shard(r).length(c); }
  uint64_t place(Rank r, uint64_t c) const {
    return offsets_[static_cast<size_t>(r)] + shard(r).offset(c);
  }
  Ref input(Rank r, uint64_t c) const { return plan_.input(place(r, c)); }
  Ref output(Rank r, uint64_t c) const { return plan_.output(place(r, c)); }
  // Of the window, in turn c: what I have of rank r's segment; the result of `host`'s rank.
  Ref published(Rank by, Rank r, uint64_t c) const {
    return plan_.window(by, c % 2 * turn_ + static_cast<uint64_t>(r) * unit_);
  }
  Ref result(Rank by, int host, uint64_t c) const {
    return plan_.window(by,
                        c % 2 * turn_ + static_cast<uint64_t>(plan_.shape().size + host) * unit_);
  }
  // Sums go into the first half of a slot, results into the second.
  Ref slot(Rank from, Rank to, uint64_t c, bool is_result) const {
    const uint64_t bytes = plan_.shape().slot_bytes();
    Ref ref = plan_.slot({from, to, count_, bytes}, c);
    ref.offset += is_result ? unit_ : 0;
    return ref;
  }

  void publish_input(uint64_t c) {
    for (Rank r = 0; r < plan_.shape().size; ++r) {
      if ((r - rank_) % local_ != 0) plan_.copy(published(rank_, r, c), input(r, c), bytes(r, c));
    }
  }

  // What my host has for rank r.
  std::vector<Ref> pieces(Rank r, uint64_t c) const {
    std::vector<Ref> from;
    for (Rank by = first_; by < first_ + local_; ++by) {
      from.push_back(by == rank_ ? input(r, c) : published(by, r, c));
    }
    return from;
  }

  void send_sums(uint64_t c) {
    each_host([&](Rank r) {
      plan_.reduce({slot(rank_, r, c, false)}, pieces(r, c), bytes(r, c), false);
      plan_.signal(r);
    });
    plan_.reduce({output(rank_, c)}, pieces(rank_, c), bytes(rank_, c), false);
  }

  void take_sums(uint64_t c) {
    std::vector<Ref> from = {output(rank_, c)};
    each_host([&](Rank r) {
      plan_.wait(r);
      from.push_back(slot(r, rank_, c, false));
    });
    plan_.reduce({output(rank_, c)}, from, bytes(rank_, c), true);
    each_host([&](Rank r) {
      plan_.copy(slot(rank_, r, c, true), output(rank_, c), bytes(rank_, c));
      plan_.signal(r);
    });
  }

  void take_results(uint64_t c, uint64_t turn) {
    each_host([&](Rank r) {
      plan_.wait(r);
      plan_.copy(output(r, c), slot(r, rank_, c, true), bytes(r, c));
    });
    for (int host = 0; host < hosts_; ++host) {
      const Rank r = host * local_ + rank_ - first_;
      plan_.copy(result(rank_, host, turn), output(r, c), bytes(r, c));
    }
  }

  void load_results(uint64_t c, uint64_t turn) {
    each_mate([&](Rank mate) {
      for (int host = 0; host < hosts_; ++host) {
        const Rank r = host * local_ + mate - first_;
        plan_.copy(output(r, c), result(mate, host, turn), bytes(r, c));
      }
    });
  }

  PlanBuilder plan_;
  const Rank rank_;
  const int local_, hosts_;
  const Rank first_;               // of my host
  uint64_t unit_ = 0, turn_ = 0;   // bytes of a segment, of a turn of the window
  std::vector<uint64_t> offsets_;  // of each rank's shard
  std::vector<Segments> shards_;
  uint64_t count_ = 0, lag_ = 0;
};

}  // namespace

Plan pipelined_all_reduce(const Shape& shape, Rank rank) {
  check_hosts(shape);
  return Pipeline(shape, rank).build();
}

}  // namespace ringcomm
