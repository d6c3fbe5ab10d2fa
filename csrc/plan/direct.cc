// The direct family, for windows that every rank can load from: publish in my own window, tell all,
// load theirs. Reductions run in rank order, so that a result depends on the inputs alone, not on
// size, segments or timing. Small messages ride in lines, whose bytes need no window at all.

#include "plan/builder.h"
#include "plan/planners.h"

namespace ringcomm {
namespace {

constexpr uint64_t kSlots = 4;  // of a segment each, used in turn

bool fits_line(const Shape& shape, uint64_t bytes) { return bytes <= shape.geometry.line_bytes; }

// One source a rank, in rank order: `mine` for the planner's own rank.
template <typename Theirs>
std::vector<Ref> in_rank_order(const PlanBuilder& plan, Ref mine, Theirs theirs) {
  std::vector<Ref> sources;
  for (Rank r = 0; r < plan.shape().size; ++r) {
    sources.push_back(r == plan.rank() ? mine : theirs(r));
  }
  return sources;
}

// Everybody gives everybody its part, and reduces for itself.
Plan one_shot(const Shape& shape, Rank rank, bool lines) {
  PlanBuilder plan(shape, Algorithm::kDirect, rank);
  const std::vector<Extent> chunks = shape.chunks();
  const auto part_of = [&](Rank r) {  // of the inputs, which rank r adds up
    const bool all = shape.collective == Collective::kAllReduce;
    return all ? Extent{0, shape.bytes} : chunks[static_cast<size_t>(r)];
  };
  const auto [offset, bytes] = part_of(rank);
  if (!lines) plan.copy(plan.window(rank, 0), plan.input(0), bytes);
  for (int i = 1; i < shape.size; ++i) {
    const Rank peer = plan.peer(i);
    const Extent theirs = part_of(peer);
    if (lines) plan.copy(plan.line(peer, rank), plan.input(theirs.offset), theirs.bytes);
    plan.signal(peer);
  }
  plan.wait_all();
  const std::vector<Ref> sources = in_rank_order(plan, plan.input(offset), [&](Rank r) {
    return lines ? plan.line(rank, r) : plan.window(r, 0);
  });
  plan.reduce({plan.output(0)}, sources, Stretch{bytes}, true);
  return plan.finish();
}

// Segment c: publish it, reduce my shard of it by load, publish that, load the others'. One signal
// says both "my result of c is there" and "my publish of c + 1 is there". Two publish and two
// result slots, at offsets that no size changes, keep it closed. In place is safe: a reduce
// or load overwrites only published bytes, or this rank's own shard, which no other rank reads.
Plan two_shot_all_reduce(const Shape& shape, Rank rank) {
  PlanBuilder plan(shape, Algorithm::kDirect, rank);
  const Segments segments{shape.bytes, shape.geometry.segment_bytes};
  const uint64_t count = segments.count();
  const auto cut = [&](uint64_t c, int part) {
    return shape.cut(segments.length(c), part, shape.size);
  };
  const auto published = [&](Rank r, uint64_t c, uint64_t at) {
    return plan.in_turn(plan.window(r, at), {segments.unit, 2}, c);
  };
  const auto result = [&](Rank r, uint64_t c, uint64_t at) {
    return published(r, c, 2 * segments.unit + at);
  };
  const auto publish = [&](uint64_t c) {  // all but my own shard
    const uint64_t at = segments.offset(c), low = cut(c, rank), high = cut(c, rank + 1);
    plan.copy(published(rank, c, 0), plan.input(at), low);
    plan.copy(published(rank, c, high), plan.input(at + high), segments.length(c) - high);
  };
  const auto reduce = [&](uint64_t c) {
    const uint64_t low = cut(c, rank), at = segments.offset(c) + low;
    const std::vector<Ref> sources =
        in_rank_order(plan, plan.input(at), [&](Rank r) { return published(r, c, low); });
    const Stretch mine{cut(c, rank + 1) - low};
    plan.reduce({result(rank, c, low), plan.output(at)}, sources, mine, true);
  };
  const auto load = [&](uint64_t c) {
    for (int i = 1; i < shape.size; ++i) {
      const Rank r = plan.peer(i);
      const uint64_t low = cut(c, r);
      plan.copy(plan.output(segments.offset(c) + low), result(r, c, low), cut(c, r + 1) - low);
    }
  };

  publish(0);
  plan.signal_all();
  plan.repeat({count, segments.unit, {1, minus(count, 2), minus(count, 1)}}, [&](uint64_t c) {
    plan.wait_all();
    if (c > 0) load(c - 1);
    if (c + 1 < count) publish(c + 1);
    reduce(c);
    plan.signal_all();
  });
  plan.wait_all();
  load(count - 1);
  return plan.finish();
}

// The frame of reduce_scatter and all_gather. Signal c says "c is published and c - 2 consumed":
// so while I consume c, c + 1 may be written, and a peer may still read c - 1.
template <typename Publish, typename Consume>
void exchange(PlanBuilder& plan, uint64_t count, uint64_t stride, Publish publish,
              Consume consume) {
  publish(0);
  plan.signal_all();
  plan.repeat({count, stride, {count - 1}}, [&](uint64_t c) {
    plan.wait_all();
    if (c + 1 < count) {
      publish(c + 1);
      plan.signal_all();
    }
    consume(c);
  });
}

// Collectives with a root. All data comes from or goes to it, so nothing in the data tells a rank
// that the others have begun: a roll call does (planners.h says why). If data leaves the root,
// every rank calls the root before the root's last signal. If data comes in, the root calls every
// rank once it has heard all. If a message takes more segments than there are slots, the credits
// say as much.
Passes passes_of(const Segments& segments) {
  const uint64_t count = segments.count();
  if (count <= kSlots) return {count, segments.unit, {1, count - 1}};
  return {count, segments.unit, {kSlots, count - kSlots}};
}

}  // namespace

Plan direct_all_reduce(const Shape& shape, Rank rank) {
  const uint64_t loaded = shape.bytes * static_cast<uint64_t>(shape.size - 1);
  const bool lines = fits_line(shape, shape.bytes);
  const bool short_enough =
      loaded <= shape.geometry.one_shot_bytes && shape.bytes <= shape.geometry.segment_bytes;
  if (lines || short_enough) return one_shot(shape, rank, lines);
  return two_shot_all_reduce(shape, rank);
}

Plan direct_reduce_scatter(const Shape& shape, Rank rank) {
  if (fits_line(shape, shape.largest_shard())) return one_shot(shape, rank, true);
  PlanBuilder plan(shape, Algorithm::kDirect, rank);
  const uint64_t segment = shape.geometry.segment_bytes;
  const uint64_t slice = shape.align(segment / static_cast<uint64_t>(shape.size));
  RINGCOMM_CHECK(slice > 0, "a segment of ", segment, " bytes has no room for ", shape.size,
                 " ranks");
  const std::vector<Extent> chunks = shape.chunks();
  const auto at = [&](Rank r) { return chunks[static_cast<size_t>(r)].offset; };
  const auto shard = [&](Rank r) { return Segments{shape.shard(r), slice}; };
  const auto published = [&](Rank by, uint64_t c, Rank r) {
    const Ref first = plan.window(by, static_cast<uint64_t>(r) * slice);
    return plan.in_turn(first, {segment, kSlots}, c);
  };
  const auto publish = [&](uint64_t c) {
    for (int i = 1; i < shape.size; ++i) {
      const Rank r = plan.peer(i);
      plan.copy(published(rank, c, r), plan.input(at(r) + shard(r).offset(c)), shard(r).stretch(c));
    }
  };
  const auto reduce = [&](uint64_t c) {
    const Ref mine = plan.input(at(rank) + shard(rank).offset(c));
    const std::vector<Ref> sources =
        in_rank_order(plan, mine, [&](Rank r) { return published(r, c, rank); });
    plan.reduce({plan.output(shard(rank).offset(c))}, sources, shard(rank).stretch(c), true);
  };
  const uint64_t count = Segments{shape.largest_shard(), slice}.count();
  exchange(plan, count, slice, publish, reduce);
  return plan.finish();
}

Plan direct_all_gather(const Shape& shape, Rank rank) {
  if (fits_line(shape, shape.largest_shard())) {
    Plan plan = pairwise_all_gather(shape, rank);  // each line at once
    plan.algorithm = Algorithm::kDirect;
    return plan;
  }
  PlanBuilder plan(shape, Algorithm::kDirect, rank);
  const uint64_t segment = shape.geometry.segment_bytes;
  const std::vector<Extent> chunks = shape.chunks();
  const auto at = [&](Rank r) { return chunks[static_cast<size_t>(r)].offset; };
  const auto shard = [&](Rank r) { return Segments{shape.shard(r), segment}; };
  const auto published = [&](Rank by, uint64_t c) {
    return plan.in_turn(plan.window(by, 0), {segment, kSlots}, c);
  };
  const auto publish = [&](uint64_t c) {
    plan.copy(published(rank, c), plan.input(shard(rank).offset(c)), shard(rank).stretch(c));
  };
  const auto load = [&](uint64_t c) {
    for (int i = 0; i < shape.size; ++i) {
      const Rank r = plan.peer(i);
      const Ref source = i == 0 ? plan.input(shard(r).offset(c)) : published(r, c);
      plan.copy(plan.output(at(r) + shard(r).offset(c)), source, shard(r).stretch(c));
    }
  };
  const uint64_t count = Segments{shape.largest_shard(), segment}.count();
  exchange(plan, count, segment, publish, load);
  return plan.finish();
}

// The root publishes, all load: the message crosses memory once.
Plan direct_broadcast(const Shape& shape, Rank rank) {
  PlanBuilder plan(shape, Algorithm::kDirect, rank);
  const Rank root = shape.root;
  const Segments segments{shape.bytes, shape.geometry.segment_bytes};
  const uint64_t count = segments.count();
  const bool line = count == 1 && shape.bytes <= shape.geometry.line_bytes;
  const bool roll_call = shape.meets && count <= kSlots;
  const bool others = shape.size > 2;  // a single receiver need not wait for the roll call
  const auto published = [&](uint64_t c) {
    return line && rank != root ? plan.line(rank, root)
                                : plan.in_turn(plan.window(root, 0), {segments.unit, kSlots}, c);
  };
  const auto publish = [&](uint64_t c) {
    const uint64_t at = segments.offset(c);
    const Stretch bytes = segments.stretch(c);
    if (c >= kSlots) plan.wait_all(kCredit);
    if (!line) plan.copy(published(c), plan.input(at), bytes);
    for (int i = 1; line && i < shape.size; ++i) {
      plan.copy(plan.line(plan.peer(i), root), plan.input(at), bytes);
    }
    if (roll_call && others && c + 1 == count) plan.wait_all(kCredit);
    plan.signal_all();
    plan.copy(plan.output(at), plan.input(at), bytes);
  };
  const auto load = [&](uint64_t c) {
    plan.wait(root);
    plan.copy(plan.output(segments.offset(c)), published(c), segments.stretch(c));
    if (c + kSlots < count) plan.signal(root, kCredit);
  };
  if (roll_call && rank != root) plan.signal(root, kCredit);
  plan.repeat(passes_of(segments), [&](uint64_t c) { rank == root ? publish(c) : load(c); });
  if (roll_call && !others && rank == root) plan.wait_all(kCredit);
  return plan.finish();
}

// All publish, the root reduces in rank order straight into its output.
Plan direct_reduce(const Shape& shape, Rank rank) {
  PlanBuilder plan(shape, Algorithm::kDirect, rank);
  const Rank root = shape.root;
  const Segments segments{shape.bytes, shape.geometry.segment_bytes};
  const uint64_t count = segments.count();
  const bool line = count == 1 && shape.bytes <= shape.geometry.line_bytes;
  const bool roll_call = shape.meets && count <= kSlots;
  const auto published = [&](Rank r, uint64_t c) {
    return line ? plan.line(root, r) : plan.in_turn(plan.window(r, 0), {segments.unit, kSlots}, c);
  };
  const auto publish = [&](uint64_t c) {
    if (c >= kSlots) plan.wait(root, kCredit);
    plan.copy(published(rank, c), plan.input(segments.offset(c)), segments.stretch(c));
    plan.signal(root);
  };
  const auto reduce = [&](uint64_t c) {
    plan.wait_all();
    if (roll_call && c == 0) plan.signal_all(kCredit);
    const uint64_t at = segments.offset(c);
    const std::vector<Ref> sources =
        in_rank_order(plan, plan.input(at), [&](Rank r) { return published(r, c); });
    plan.reduce({plan.output(at)}, sources, segments.stretch(c), true);
    if (c + kSlots < count) plan.signal_all(kCredit);
  };
  plan.repeat(passes_of(segments), [&](uint64_t c) { rank == root ? reduce(c) : publish(c); });
  if (roll_call && rank != root) plan.wait(root, kCredit);
  return plan.finish();
}

}  // namespace ringcomm
