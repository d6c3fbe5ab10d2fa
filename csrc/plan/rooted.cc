// Direct collectives with a root. All data comes from or goes to the root, so nothing in it tells
// a rank that the others have begun: a roll call does (planners.h says why). Where data leaves the
// root, every rank calls the root before the root's last signal; where it comes in, the root calls
// every rank once it has heard all. If a message takes more segments than there are slots, the
// credits say as much.
#include <vector>

#include "plan/builder.h"
#include "plan/planners.h"

namespace ringcomm {
namespace {

constexpr uint64_t kSlots = 4;  // of a segment each, in the window of the rank that publishes

// The largest shard that travels.
uint64_t largest_moved(const Shape& shape) {
  uint64_t largest = 0;
  for (Rank r = 0; r < shape.size; ++r) {
    if (r != shape.root) largest = std::max(largest, shape.shards[static_cast<size_t>(r)]);
  }
  return largest;
}

Passes passes_of(const Segments& segments, uint64_t slots) {
  const uint64_t count = segments.count();
  return {count, slots, segments.unit, {1, slots, minus(count, slots), minus(count, 1)}};
}

// Each rank's shard has its own end.
Passes passes_of(const Shape& shape, const Segments& largest) {
  Passes passes = passes_of(largest, shape.geometry.slots);
  for (const uint64_t shard : shape.shards) {
    const Segments segments{shard, largest.unit};
    passes.edges.insert(passes.edges.end(), {segments.full(), segments.count()});
  }
  return passes;
}

}  // namespace

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
                                : plan.window(root, c % kSlots * segments.unit);
  };
  const auto publish = [&](uint64_t c) {
    const uint64_t at = segments.offset(c), bytes = segments.length(c);
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
    plan.copy(plan.output(segments.offset(c)), published(c), segments.length(c));
    if (c + kSlots < count) plan.signal(root, kCredit);
  };
  if (roll_call && rank != root) plan.signal(root, kCredit);
  plan.repeat(passes_of(segments, kSlots),
              [&](uint64_t c) { rank == root ? publish(c) : load(c); });
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
    return line ? plan.line(root, r) : plan.window(r, c % kSlots * segments.unit);
  };
  const auto publish = [&](uint64_t c) {
    if (c >= kSlots) plan.wait(root, kCredit);
    plan.copy(published(rank, c), plan.input(segments.offset(c)), segments.length(c));
    plan.signal(root);
  };
  const auto reduce = [&](uint64_t c) {
    plan.wait_all();
    if (roll_call && c == 0) plan.signal_all(kCredit);
    const uint64_t at = segments.offset(c);
    std::vector<Ref> sources;
    for (Rank r = 0; r < shape.size; ++r) {
      sources.push_back(r == root ? plan.input(at) : published(r, c));
    }
    plan.reduce({plan.output(at)}, sources, segments.length(c), true);
    if (c + kSlots < count) plan.signal_all(kCredit);
  };
  plan.repeat(passes_of(segments, kSlots),
              [&](uint64_t c) { rank == root ? reduce(c) : publish(c); });
  if (roll_call && rank != root) plan.wait(root, kCredit);
  return plan.finish();
}

// The root puts into everybody's inbox, a piece of each shard in turn, so that none starves.
Plan direct_scatter(const Shape& shape, Rank rank) {
  PlanBuilder plan(shape, Algorithm::kDirect, rank);
  const Rank root = shape.root;
  const uint64_t largest = largest_moved(shape);
  const auto link_to = [&](Rank r) { return plan.link(root, r, largest); };
  const auto shard = [&](Rank r) {
    return Segments{shape.shards[static_cast<size_t>(r)], shape.slot_bytes()};
  };
  const uint64_t count = link_to(root).messages;
  const bool roll_call = shape.meets && count <= plan.slots();
  const auto give = [&](uint64_t c) {
    for (int i = 1; i < shape.size; ++i) plan.acquire(link_to(plan.peer(i)), c);
    if (roll_call && c + 1 == count) plan.wait_all(kCredit);
    for (int i = 1; i < shape.size; ++i) {
      const Rank r = plan.peer(i);
      plan.put(link_to(r), c, plan.input(shape.shard_offset(r) + shard(r).offset(c)),
               shard(r).length(c));
    }
  };
  const auto take = [&](uint64_t c) {
    plan.wait(root);
    plan.copy(plan.output(shard(rank).offset(c)), plan.slot(link_to(rank), c),
              shard(rank).length(c));
    plan.release(link_to(rank), c);
  };
  if (roll_call && rank != root) plan.signal(root, kCredit);
  plan.repeat(passes_of(shape, {largest, shape.slot_bytes()}),
              [&](uint64_t c) { rank == root ? give(c) : take(c); });
  const Ref mine = plan.input(shape.shard_offset(root));
  if (rank == root) plan.copy(plan.output(0), mine, shard(root).total);
  return plan.finish();
}

// Everybody puts into its inbox at the root.
Plan direct_gather(const Shape& shape, Rank rank) {
  PlanBuilder plan(shape, Algorithm::kDirect, rank);
  const Rank root = shape.root;
  const uint64_t largest = largest_moved(shape);
  const auto link_from = [&](Rank r) { return plan.link(r, root, largest); };
  const auto shard = [&](Rank r) {
    return Segments{shape.shards[static_cast<size_t>(r)], shape.slot_bytes()};
  };
  const uint64_t count = link_from(root).messages;
  const bool roll_call = shape.meets && count <= plan.slots();
  const auto give = [&](uint64_t c) {
    plan.acquire(link_from(rank), c);
    plan.put(link_from(rank), c, plan.input(shard(rank).offset(c)), shard(rank).length(c));
  };
  const auto take = [&](uint64_t c) {
    plan.wait_all();
    if (roll_call && c == 0) plan.signal_all(kCredit);
    for (int i = 1; i < shape.size; ++i) {
      const Rank r = plan.peer(i);
      plan.copy(plan.output(shape.shard_offset(r) + shard(r).offset(c)), plan.slot(link_from(r), c),
                shard(r).length(c));
      plan.release(link_from(r), c);
    }
  };
  const Ref mine = plan.output(shape.shard_offset(root));
  if (rank == root) plan.copy(mine, plan.input(0), shard(root).total);
  plan.repeat(passes_of(shape, {largest, shape.slot_bytes()}),
              [&](uint64_t c) { rank == root ? take(c) : give(c); });
  if (roll_call && rank != root) plan.wait(root, kCredit);
  return plan.finish();
}

}  // namespace ringcomm
