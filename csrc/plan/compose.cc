#include "plan/compose.h"

#include <algorithm>

#include "plan/builder.h"
#include "plan/planners.h"
#include "plan/select.h"

namespace ringcomm {
namespace {

Plan empty_plan(const Shape& shape, Rank rank) {
  Plan plan{};
  plan.collective = shape.collective;
  plan.algorithm = Algorithm::kHierarchical;
  plan.size = shape.size;
  plan.rank = rank;
  return plan;
}

constexpr uint64_t kPipelinedSlots = 4;  // from here on bandwidth outweighs hops

// The two groups a rank of a hierarchy belongs to, and what it does in them.
struct Hierarchy {
  Hierarchy(const Shape& whole, Rank rank) : shape(whole), local(whole.local) {
    check_hosts(shape);
    hosts = shape.size / local;
    host = rank / local;
    index = rank % local;
    for (int i = 0; i < local; ++i) mates.push_back(host * local + i);
    for (int i = 0; i < hosts; ++i) across.push_back(i * local + index);
  }

  // What each rank of a host gets of a message, and where mine lies in the output.
  std::vector<uint64_t> shards() const {
    std::vector<uint64_t> bytes;
    for (int i = 0; i < local; ++i) bytes.push_back(cut(i + 1) - cut(i));
    return bytes;
  }
  Side mine() const { return {Space::kOutput, {{0, cut(index)}}}; }
  uint64_t cut(int part) const { return shape.cut(shape.bytes, part, local); }

  Plan inside(const Shape& part, const Placement& placement) const {
    return lift(make_plan(part, index, Algorithm::kDirect), placement);
  }
  // The ranks of a host share its link.
  Plan between(Shape part, const Placement& placement) const {
    part.costs.beta *= local;
    return lift(make_plan(part, host, select(part, {.mapped = false})), placement);
  }

  const Shape& shape;
  int local, hosts, host = 0, index = 0;
  std::vector<Rank> mates;   // my host's ranks
  std::vector<Rank> across;  // those with my index on every host
};

Shape part_of(const Shape& shape, Collective collective, int size) {
  Shape part;
  part.collective = collective;
  part.size = size;
  part.element = shape.element;
  part.geometry = shape.geometry;
  part.geometry.size = size;
  part.costs = shape.costs;
  return part;
}

// Two parts inside a host share the window: each sees segments of half the size.
Shape half_part_of(const Shape& shape, Collective collective, int size) {
  Shape part = part_of(shape, collective, size);
  uint64_t& bytes = part.geometry.segment_bytes;
  bytes = bytes >= 128 ? bytes / 128 * 64 : bytes / 2;
  return part;
}

}  // namespace

void check_hosts(const Shape& shape) {
  RINGCOMM_CHECK(shape.local > 0 && shape.size % shape.local == 0, to_string(shape.collective),
                 ": ", shape.size, " ranks are no whole number of hosts with ", shape.local,
                 " each");
}

uint64_t Side::place(uint64_t offset) const {
  size_t i = pieces.size() - 1;
  while (i > 0 && pieces[i].from > offset) --i;
  return pieces[i].to + (offset - pieces[i].from);
}

Plan lift(const Plan& part, const Placement& placement) {
  const auto global = [&](int16_t rank) {
    return static_cast<int16_t>(placement.ranks[static_cast<size_t>(rank)]);
  };
  Plan lifted = part;
  lifted.rank = global(static_cast<int16_t>(part.rank));
  for (Ref& ref : lifted.refs) {
    ref.rank = global(ref.rank);
    ref.from = global(ref.from);
    if (ref.space == Space::kWindow) ref.offset += placement.window_offset;
    if (ref.space != Space::kInput && ref.space != Space::kOutput) continue;
    const Side& side = ref.space == Space::kInput ? placement.input : placement.output;
    ref.offset = side.place(ref.offset);
    ref.space = side.space;
  }
  for (Step& step : lifted.steps) {
    if (step.peer >= 0) step.peer = global(step.peer);
    if (placement.partial) step.final = false;
  }
  return lifted;
}

Plan concatenate(Plan whole, const std::vector<Plan>& parts) {
  for (const Plan& part : parts) {
    const uint32_t steps = static_cast<uint32_t>(whole.steps.size());
    const uint32_t refs = static_cast<uint32_t>(whole.refs.size());
    for (Block block : part.blocks) {
      block.first_step += steps;
      whole.blocks.push_back(block);
    }
    for (Step step : part.steps) {
      step.first_ref += refs;
      whole.steps.push_back(step);
    }
    whole.refs.insert(whole.refs.end(), part.refs.begin(), part.refs.end());
  }
  return whole;
}

// Reduce-scatter in the host, all-reduce of my shard between hosts, all-gather in the host: few
// hops. Where there is more than a segment a shard, as a pipeline.
Plan hierarchical_all_reduce(const Shape& shape, Rank rank) {
  const Hierarchy at(shape, rank);
  if (at.local > 1 && at.hosts > 1 && shape.bytes > kPipelinedSlots * shape.slot_bytes()) {
    return pipelined_all_reduce(shape, rank);
  }
  std::vector<Plan> parts;
  Shape inside = half_part_of(shape, Collective::kReduceScatter, at.local);
  inside.shards = at.shards();
  parts.push_back(
      at.inside(inside, {.ranks = at.mates, .output = at.mine(), .partial = at.hosts > 1}));

  Shape between = part_of(shape, Collective::kAllReduce, at.hosts);
  between.bytes = inside.shards[static_cast<size_t>(at.index)];
  parts.push_back(
      at.between(between, {.ranks = at.across, .input = at.mine(), .output = at.mine()}));

  inside.collective = Collective::kAllGather;
  inside.geometry.line_bytes = 0;  // the lines are the reduce-scatter's
  const uint64_t second_half = inside.geometry.window_bytes();
  parts.push_back(
      at.inside(inside, {.ranks = at.mates, .input = at.mine(), .window_offset = second_half}));
  return concatenate(empty_plan(shape, rank), parts);
}

// All-gather between hosts, so that each rank has the shards of its index; then, for every host, an
// all-gather of its shards in mine. These take turns with the two halves of the window: when one
// has ended, all mates have begun it, and so left the one before.
Plan hierarchical_all_gather(const Shape& shape, Rank rank) {
  const Hierarchy at(shape, rank);
  Shape between = part_of(shape, Collective::kAllGather, at.hosts);
  Side spread{Space::kOutput, {}};
  uint64_t offset = 0;
  for (const Rank r : at.across) {
    between.shards.push_back(shape.shard(r));
    spread.pieces.push_back({offset, shape.shard_offset(r)});
    offset += between.shards.back();
  }
  std::vector<Plan> parts = {at.between(between, {.ranks = at.across, .output = spread})};

  for (int host = 0; host < at.hosts; ++host) {
    const Rank first = host * at.local;
    Shape inside = half_part_of(shape, Collective::kAllGather, at.local);
    inside.geometry.line_bytes = 0;
    inside.shards.assign(shape.shards.begin() + first, shape.shards.begin() + first + at.local);
    Placement placement{at.mates};
    placement.input = {Space::kOutput, {{0, shape.shard_offset(first + at.index)}}};
    placement.output = {Space::kOutput, {{0, shape.shard_offset(first)}}};
    placement.window_offset = host % 2 == 0 ? 0 : inside.geometry.window_bytes();
    parts.push_back(at.inside(inside, placement));
  }
  return concatenate(empty_plan(shape, rank), parts);
}

// Scatter in the root's host, broadcast of my shard between hosts, all-gather in the host.
Plan hierarchical_broadcast(const Shape& shape, Rank rank) {
  const Hierarchy at(shape, rank);
  std::vector<Plan> parts;
  Shape inside = part_of(shape, Collective::kScatter, at.local);
  inside.root = shape.root % at.local;
  inside.shards = at.shards();
  inside.meets = false;
  if (at.host == shape.root / at.local)
    parts.push_back(at.inside(inside, {.ranks = at.mates, .output = at.mine()}));

  Shape between = part_of(shape, Collective::kBroadcast, at.hosts);
  between.root = shape.root / at.local;
  between.bytes = inside.shards[static_cast<size_t>(at.index)];
  parts.push_back(
      at.between(between, {.ranks = at.across, .input = at.mine(), .output = at.mine()}));

  inside.collective = Collective::kAllGather;
  inside.geometry.line_bytes = 0;  // the lines are the scatter's
  parts.push_back(at.inside(inside, {.ranks = at.mates, .input = at.mine()}));
  return concatenate(empty_plan(shape, rank), parts);
}

// Reduce to the rank of the root's index, into its window, and from there to the root; then that
// rank tells its mates that all have begun. Repeated blocks do not move in a window, but up to as
// many slots as there are nothing repeats. What is longer goes along the ring, which crosses to
// each host once.
Plan hierarchical_reduce(const Shape& shape, Rank rank) {
  const Hierarchy at(shape, rank);
  Shape inside = half_part_of(shape, Collective::kReduce, at.local);
  inside.root = shape.root % at.local;
  inside.bytes = shape.bytes;
  inside.meets = false;
  const uint64_t half = inside.geometry.window_bytes();
  if (shape.bytes > std::min(half, shape.geometry.slots * shape.slot_bytes())) {
    Plan plan = chain_plan(shape, rank);
    plan.algorithm = Algorithm::kHierarchical;
    return plan;
  }
  const Side staged{Space::kWindow, {{0, half}}};
  std::vector<Plan> parts = {
      at.inside(inside, {.ranks = at.mates, .output = staged, .partial = at.hosts > 1})};
  PlanBuilder end(shape, Algorithm::kHierarchical, rank);
  if (at.index == inside.root) {
    Shape between = part_of(shape, Collective::kReduce, at.hosts);
    between.root = shape.root / at.local;
    between.bytes = shape.bytes;
    parts.push_back(at.between(between, {.ranks = at.across, .input = staged}));
    for (const Rank mate : at.mates) {
      if (mate != rank) end.signal(mate, kCredit);
    }
  } else {
    end.wait(at.mates[static_cast<size_t>(inside.root)], kCredit);
  }
  parts.push_back(end.finish());
  return concatenate(empty_plan(shape, rank), parts);
}

// The first rank of each host hears its mates, meets the others and tells the mates.
Plan hierarchical_barrier(const Shape& shape, Rank rank) {
  const Hierarchy at(shape, rank);
  PlanBuilder plan(shape, Algorithm::kHierarchical, rank);
  const Rank first = at.mates.front();
  if (rank != first) {
    plan.signal(first);
    plan.wait(first);
    return plan.finish();
  }
  for (int i = 1; i < at.local; ++i) plan.wait(rank + i);
  for (int distance = 1; distance < at.hosts; distance *= 2) {
    plan.signal(plan.peer(distance * at.local));
    plan.wait(plan.peer(-distance * at.local));
  }
  for (int i = 1; i < at.local; ++i) plan.signal(rank + i);
  return plan.finish();
}

}  // namespace ringcomm
