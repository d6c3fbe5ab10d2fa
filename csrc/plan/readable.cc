// The direct family where every rank can load from the others' tensors, because they lie in memory
// that all have mapped (transport/arena.h): nothing is copied into a window and out again. Sums run
// in rank order, as in direct.cc, so the results have the same bits.
//
// When such a plan begins, all ranks have called: they have just told one another where their
// tensors lie (host/tensor_places.h). When it ends on a rank, nobody reads that rank's memory any
// more. No rank ever writes another's tensor: one that gives up has its own to itself at once.

#include "plan/builder.h"
#include "plan/planners.h"

namespace ringcomm {
namespace {

class ReadablePlan {
 public:
  ReadablePlan(const Shape& shape, Rank rank)
      : plan_(shape, Algorithm::kDirect, rank), shape_(shape), rank_(rank) {}

  Plan build() {
    switch (shape_.collective) {
      case Collective::kAllReduce:
        all_reduce();
        break;
      case Collective::kReduceScatter:
        add_up(shape_.shard_offset(rank_), shape_.shard(rank_));
        break;
      case Collective::kReduce:
        if (rank_ == shape_.root) add_up(0, shape_.bytes);
        break;
      case Collective::kAllGather:
        gather();
        break;
      case Collective::kGather:
        if (rank_ == shape_.root) gather();
        break;
      case Collective::kBroadcast:
        load(0, shape_.root, 0, shape_.bytes);
        break;
      case Collective::kScatter:
        load(0, shape_.root, shape_.shard_offset(rank_), shape_.shard(rank_));
        break;
      default:
        throw UsageError(str(to_string(shape_.collective), " has no plan for readable tensors"));
    }
    plan_.signal_all();  // I read nobody's memory any more
    plan_.wait_all();
    return plan_.finish();
  }

 private:
  Ref input_of(Rank owner, uint64_t offset) {
    Ref ref = plan_.input(offset);
    ref.rank = ref.from = static_cast<int16_t>(owner);
    return ref;
  }
  Ref output_of(Rank owner, uint64_t offset) {
    Ref ref = plan_.output(offset);
    ref.rank = ref.from = static_cast<int16_t>(owner);
    return ref;
  }
  std::vector<Ref> inputs_at(uint64_t offset) {
    std::vector<Ref> sources;
    for (Rank r = 0; r < shape_.size; ++r) sources.push_back(input_of(r, offset));
    return sources;
  }

  // Puts the sum of all inputs from `offset` on into my output.
  void add_up(uint64_t offset, uint64_t bytes) {
    each_stretch(bytes, [&](uint64_t at, Stretch stretch) {
      plan_.reduce({plan_.output(at)}, inputs_at(offset + at), stretch, true);
    });
  }
  void gather() {
    for (int i = 0; i < shape_.size; ++i) {
      const Rank from = plan_.peer(i);
      load(shape_.shard_offset(from), from, 0, shape_.shard(from));
    }
  }
  void load(uint64_t to, Rank from, uint64_t offset, uint64_t bytes) {
    each_stretch(bytes, [&](uint64_t at, Stretch stretch) {
      plan_.copy(plan_.output(to + at), input_of(from, offset + at), stretch);
    });
  }
  void each_stretch(uint64_t bytes, auto&& move) {
    const Segments segments{bytes, shape_.geometry.segment_bytes};
    const uint64_t count = segments.count();
    plan_.repeat({count, segments.unit, {minus(count, 1)}},
                 [&](uint64_t c) { move(segments.offset(c), segments.stretch(c)); });
  }

  // Pass c: add up my share of segment c, say so, and load the others' shares of c - 1. In place a
  // load writes where its owner has read before its signal.
  void all_reduce() {
    const uint64_t unit = shape_.geometry.segment_bytes * static_cast<uint64_t>(shape_.size);
    const Segments segments{shape_.bytes, unit};
    const uint64_t count = segments.count();
    const auto cut = [&](uint64_t c, int part) {
      return shape_.cut(segments.length(c), part, shape_.size);
    };
    const auto add = [&](uint64_t c) {
      const uint64_t low = cut(c, rank_), at = segments.offset(c) + low;
      plan_.reduce({plan_.output(at)}, inputs_at(at), Stretch{cut(c, rank_ + 1) - low}, true);
    };
    const auto load_others = [&](uint64_t c) {
      plan_.wait_all();
      for (int i = 1; i < shape_.size; ++i) {
        const Rank r = plan_.peer(i);
        const uint64_t low = cut(c, r), at = segments.offset(c) + low;
        plan_.copy(plan_.output(at), output_of(r, at), cut(c, r + 1) - low);
      }
    };
    plan_.repeat({count, unit, {1, minus(count, 2), minus(count, 1)}}, [&](uint64_t c) {
      add(c);
      plan_.signal_all();
      if (c > 0) load_others(c - 1);
    });
    load_others(count - 1);
  }

  PlanBuilder plan_;
  const Shape& shape_;
  const Rank rank_;
};

}  // namespace

Plan readable_plan(const Shape& shape, Rank rank) { return ReadablePlan(shape, rank).build(); }

}  // namespace ringcomm
