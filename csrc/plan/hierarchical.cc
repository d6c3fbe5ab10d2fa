// Collectives between hosts. Each rank adds up its host's inputs for the rank of its own index on
// another host, and puts the sum there: one hop between hosts. Inside a host, ranks read one
// another's windows.
//
// A long all-reduce is such a reduce-scatter, and the all-gather that takes the results back the
// same way. So each host sends 2 (h - 1) / h of the message, h hosts, which is the least there can
// be (Patarasuk and Yuan 2009), and every rank carries its share of it. The phases run as a
// pipeline: while one segment is inside the host, others are between hosts.

#include "plan/builder.h"
#include "plan/planners.h"

namespace ringcomm {
namespace {

// The common part of both planners: segment c of every rank's shard.
struct HostPlan {
  HostPlan(const Shape& shape, Rank rank, Algorithm algorithm, int local)
      : plan(shape, algorithm, rank),
        rank(rank),
        local(local),
        hosts(shape.size / local),
        first(rank / local * local),
        chunks(shape.chunks()) {}

  // Segments of at most `most` bytes, of which `areas` fit into a turn: half the window.
  void divide(uint64_t most, int areas, const char* of_what) {
    const Shape& shape = plan.shape();
    const auto count = static_cast<uint64_t>(areas);
    const uint64_t half = shape.align(shape.geometry.window_bytes() / 2);
    unit = std::min(most, shape.align(half / count));
    RINGCOMM_CHECK(unit > 0, "a window of ", 2 * half, " bytes has no room for ", areas, of_what);
    turn = count * unit;
  }

  template <typename Do>
  void each_mate(Do act) {
    for (int i = 1; i < local; ++i) act(first + (rank - first + i) % local);
  }
  template <typename Do>  // with the rank of my index there
  void each_host(Do act) {
    for (int i = 1; i < hosts; ++i) act(plan.peer(i * local));
  }
  void tell_mates() {
    each_mate([&](Rank mate) { plan.signal(mate); });
  }
  void hear_mates() {
    each_mate([&](Rank mate) { plan.wait(mate); });
  }

  const Extent& chunk(Rank r) const { return chunks[static_cast<size_t>(r)]; }
  Segments shard(Rank r) const { return {chunk(r).bytes, unit}; }
  Stretch bytes(Rank r, uint64_t c) const { return shard(r).stretch(c); }
  uint64_t place(Rank r, uint64_t c) const { return chunk(r).offset + shard(r).offset(c); }
  Ref input(Rank r, uint64_t c) { return plan.input(place(r, c)); }
  // An area of the window, in turn c. The first ones hold my part of each rank's segment.
  Ref area(Rank by, int index, uint64_t c) {
    return plan.in_turn(plan.window(by, static_cast<uint64_t>(index) * unit), {turn, 2}, c);
  }

  void publish_input(uint64_t c) {
    for (Rank r = 0; r < plan.shape().size; ++r) {
      if ((r - rank) % local != 0) plan.copy(area(rank, r, c), input(r, c), bytes(r, c));
    }
  }

  // The pieces that my host has for rank r.
  std::vector<Ref> pieces(Rank r, uint64_t c) {
    std::vector<Ref> from;
    for (Rank by = first; by < first + local; ++by) {
      from.push_back(by == rank ? input(r, c) : area(by, r, c));
    }
    return from;
  }

  PlanBuilder plan;
  const Rank rank;
  const int local, hosts;
  const Rank first;  // of my host
  const std::vector<Extent> chunks;
  uint64_t unit = 0, turn = 0;  // bytes of a segment, of a turn of the window
};

// Pass c sends segment c of all shards and ends segment c - lag of mine: half the slots are under
// way. The sender of message c has consumed all before my c - lag, so there are no credits. My
// mates signal that they have published c, and so consumed c - 1: two turns of the window suffice.
class ReduceScatter : HostPlan {
 public:
  ReduceScatter(const Shape& shape, Rank rank, Algorithm algorithm, int local)
      : HostPlan(shape, rank, algorithm, local), lag_(plan.slots() / 2 - 1) {
    divide(shape.slot_bytes(), shape.size, " ranks");
    count_ = Segments{shape.largest_shard(), unit}.count();
    line_ = count_ == 1 && shape.largest_shard() <= shape.geometry.line_bytes;
  }

  Plan build() {
    publish_input(0);
    tell_mates();
    plan.repeat({count_ + lag_, unit, {lag_, count_ - 1, count_}}, [&](uint64_t c) {
      if (c < count_) {
        hear_mates();
        each_host([&](Rank r) { send(r, c); });
        const Stretch mine = local > 1 ? bytes(rank, c) : Stretch{0};
        plan.reduce({output(c)}, pieces(rank, c), mine, hosts == 1);
        if (c + 1 < count_) {
          publish_input(c + 1);
          tell_mates();
        }
      }
      if (c >= lag_ && hosts > 1) take(c - lag_);
    });
    return plan.finish();
  }

 private:
  Ref output(uint64_t c) { return plan.output(shard(rank).offset(c)); }
  Ref slot(Rank from, Rank to, uint64_t c) {
    return plan.slot({from, to, count_, plan.shape().slot_bytes(), line_, false}, c);
  }

  void send(Rank r, uint64_t c) {
    if (local > 1)
      plan.reduce({slot(rank, r, c)}, pieces(r, c), bytes(r, c), false);
    else
      plan.copy(slot(rank, r, c), input(r, c), bytes(r, c));
    plan.signal(r);
  }

  void take(uint64_t c) {
    std::vector<Ref> from = {local > 1 ? output(c) : input(rank, c)};
    each_host([&](Rank r) {
      plan.wait(r);
      from.push_back(slot(r, rank, c));
    });
    plan.reduce({output(c)}, from, bytes(rank, c), true);
  }

  const uint64_t lag_;
  uint64_t count_ = 0;  // of segments
  bool line_ = false;
};

// Pass c adds up and sends segment c of all shards; takes the sums of c - lag of mine and sends the
// result back; takes the results of c - 2 lag and passes them on to my mates. Half the slots are
// under way in each direction. The sender of message c has consumed all before my c - lag, so
// there are no credits. One signal a pass tells my mates that I have published segment c + 1 and
// the results of c - 2 lag, and so have consumed what they published before: two turns of the
// window suffice.
class Pipeline : HostPlan {
 public:
  Pipeline(const Shape& shape, Rank rank)
      : HostPlan(shape, rank, Algorithm::kHierarchical, shape.local) {
    divide(shape.align(shape.slot_bytes() / 2), shape.size + hosts, " parts");
    count_ = Segments{shape.longest_cut(shape.bytes, shape.size), unit}.count();
    lag_ = std::min(plan.slots() / 2 - 1, count_ - 1);
  }

  Plan build() {
    const uint64_t last = count_ + 2 * lag_;
    const std::vector<uint64_t> edges = {1,          lag_,   2 * lag_,      2 * lag_ + 1,
                                         count_ - 1, count_, count_ + lag_, last};
    publish_input(0);
    tell_mates();
    plan.repeat({last + 1, unit, edges}, [&](uint64_t c) {
      const bool told = c == 0 || tells(c - 1);
      if (told) hear_mates();
      if (c < count_) send_sums(c);
      if (c > 2 * lag_) load_results(c - 1 - 2 * lag_, c);
      if (c + 1 < count_) publish_input(c + 1);
      if (c >= lag_ && c < count_ + lag_) take_sums(c - lag_);
      if (c >= 2 * lag_ && c < last) take_results(c - 2 * lag_, c + 1);
      if (tells(c)) tell_mates();
    });
    return plan.finish();
  }

 private:
  // Is there something for my mates in pass c?
  bool tells(uint64_t c) const {
    return c + 1 < count_ || (c >= 2 * lag_ && c < count_ + 2 * lag_);
  }
  Ref output(Rank r, uint64_t c) { return plan.output(place(r, c)); }
  // The place for the result of `host`'s rank, in turn c of the window.
  Ref result(Rank by, int host, uint64_t c) { return area(by, plan.shape().size + host, c); }
  // Sums go into the first half of a slot, results into the second.
  Ref slot(Rank from, Rank to, uint64_t c, bool is_result) {
    const uint64_t bytes = plan.shape().slot_bytes();
    Ref ref = plan.slot({from, to, count_, bytes}, c);
    ref.offset += is_result ? unit : 0;
    return ref;
  }

  void send_sums(uint64_t c) {
    each_host([&](Rank r) {
      plan.reduce({slot(rank, r, c, false)}, pieces(r, c), bytes(r, c), false);
      plan.signal(r);
    });
    plan.reduce({output(rank, c)}, pieces(rank, c), bytes(rank, c), false);
  }

  void take_sums(uint64_t c) {
    std::vector<Ref> from = {output(rank, c)};
    each_host([&](Rank r) {
      plan.wait(r);
      from.push_back(slot(r, rank, c, false));
    });
    plan.reduce({output(rank, c)}, from, bytes(rank, c), true);
    each_host([&](Rank r) {
      plan.copy(slot(rank, r, c, true), output(rank, c), bytes(rank, c));
      plan.signal(r);
    });
  }

  void take_results(uint64_t c, uint64_t pass) {
    each_host([&](Rank r) {
      plan.wait(r);
      plan.copy(output(r, c), slot(r, rank, c, true), bytes(r, c));
    });
    for (int host = 0; host < hosts; ++host) {
      const Rank r = host * local + rank - first;
      plan.copy(result(rank, host, pass), output(r, c), bytes(r, c));
    }
  }

  void load_results(uint64_t c, uint64_t pass) {
    each_mate([&](Rank mate) {
      for (int host = 0; host < hosts; ++host) {
        const Rank r = host * local + mate - first;
        plan.copy(output(r, c), result(mate, host, pass), bytes(r, c));
      }
    });
  }

  uint64_t count_ = 0, lag_ = 0;
};

}  // namespace

Plan pipelined_all_reduce(const Shape& shape, Rank rank) { return Pipeline(shape, rank).build(); }

Plan hierarchical_reduce_scatter(const Shape& shape, Rank rank) {
  return ReduceScatter(shape, rank, Algorithm::kHierarchical, shape.local).build();
}

Plan pairwise_reduce_scatter(const Shape& shape, Rank rank) {
  return ReduceScatter(shape, rank, Algorithm::kPairwise, 1).build();
}

}  // namespace ringcomm
