// Plans made of plans: a part is planned for a subgroup, lifted to the ranks of the whole group and
// run after another part. The parts of one plan run within one half of the shared memory, so they
// must not meet there: each pair of ranks uses inboxes and lines in one part only, and windows are
// shared out by offset.

#include "plan/builder.h"
#include "plan/planners.h"
#include "plan/select.h"

namespace ringcomm {
namespace {

// A side of a part's user memory: which of the whole plan's sides it is, and where.
struct Side {
  Space space;
  // Shards may not be neighbours in the whole. Then the part's offset `from` stands at `to`, and so
  // do the bytes after it, up to the next piece. Pieces are in order of `from`.
  struct Piece {
    uint64_t from;
    uint64_t to;
  };
  std::vector<Piece> pieces = {{0, 0}};

  uint64_t place(uint64_t offset) const {
    size_t i = pieces.size() - 1;
    while (i > 0 && pieces[i].from > offset) --i;
    return pieces[i].to + (offset - pieces[i].from);
  }
};

// The places where a part of a composed plan finds its ranks and its memory.
struct Placement {
  std::vector<Rank> ranks;  // the whole group's number of each rank of the part
  Side input{Space::kInput};
  Side output{Space::kOutput};
  uint64_t window_offset = 0;
  bool partial = false;  // its reductions are not the last ones
};

constexpr uint64_t kPipelinedSlots = 4;  // from here on bandwidth outweighs hops

// The two groups a rank of a hierarchy belongs to, and its plan, which grows part by part.
struct Hierarchy {
  Hierarchy(const Shape& whole, Rank rank)
      : shape(whole),
        local(whole.local),
        plan(PlanBuilder(whole, Algorithm::kHierarchical, rank).finish()) {
    hosts = shape.size / local;
    host = rank / local;
    index = rank % local;
    for (int i = 0; i < local; ++i) mates.push_back(host * local + i);
    for (int i = 0; i < hosts; ++i) across.push_back(i * local + index);
  }

  // Each rank's shard of a message, within a host.
  std::vector<uint64_t> shards() const {
    std::vector<uint64_t> bytes;
    for (int i = 0; i < local; ++i) bytes.push_back(cut(i + 1) - cut(i));
    return bytes;
  }
  Side mine() const { return {Space::kOutput, {{0, cut(index)}}}; }
  uint64_t cut(int part) const { return shape.cut(shape.bytes, part, local); }

  void inside(const Shape& part, const Placement& placement) {
    append(make_plan(part, index, Algorithm::kDirect), placement);
  }
  // The ranks of a host share its link.
  void between(Shape part, const Placement& placement) {
    part.costs.beta *= local;
    append(make_plan(part, host, select(part, {.mapped = false})), placement);
  }
  void append(const Plan& part, const Placement& placement);

  const Shape& shape;
  int local, hosts, host = 0, index = 0;
  std::vector<Rank> mates;   // my host's ranks
  std::vector<Rank> across;  // those with my index on every host
  Plan plan;
};

void Hierarchy::append(const Plan& part, const Placement& placement) {
  const auto global = [&](int16_t rank) {
    return static_cast<int16_t>(placement.ranks[static_cast<size_t>(rank)]);
  };
  const auto blocks = static_cast<uint32_t>(plan.blocks.size());
  const auto steps = static_cast<uint32_t>(plan.steps.size());
  const auto refs = static_cast<uint32_t>(plan.refs.size());
  const auto extents = static_cast<uint16_t>(plan.extents.size());
  const auto extent = [&](uint16_t number) { return number > 0 ? number + extents : 0; };
  const auto motion = [&](uint8_t number) {
    return number > 0 ? plan.motion(part.motions[number - 1u]) : uint8_t{0};
  };
  for (const Extent& one : part.extents) {  // of the output, in parts whose operands name them
    plan.extents.push_back({placement.output.place(one.offset), one.bytes});
  }
  for (Loop loop : part.loops) {
    loop.first_block += blocks;
    plan.loops.push_back(loop);
  }
  for (Block block : part.blocks) {
    block.first_step += steps;
    plan.blocks.push_back(block);
  }
  for (Step step : part.steps) {
    step.first_ref += refs;
    step.extent = static_cast<uint16_t>(extent(step.extent));
    step.motion = motion(step.motion);
    if (step.peer >= 0) step.peer = global(step.peer);
    if (placement.partial) step.final = false;
    plan.steps.push_back(step);
  }
  for (Ref ref : part.refs) {
    ref.rank = global(ref.rank);
    ref.from = global(ref.from);
    ref.motion = motion(ref.motion);
    if (ref.space == Space::kWindow) ref.offset += placement.window_offset;
    if (ref.space == Space::kInput || ref.space == Space::kOutput) {
      const Side& side = ref.space == Space::kInput ? placement.input : placement.output;
      ref.space = side.space;
      if (ref.extent == 0) ref.offset = side.place(ref.offset);
      ref.extent = static_cast<uint16_t>(extent(ref.extent));
    }
    plan.refs.push_back(ref);
  }
}

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

// Reduce-scatter in the host, all-reduce of my shard between hosts, all-gather in the host: few
// hops. If shards are longer than a segment, it is a pipeline.
Plan hierarchical_all_reduce(const Shape& shape, Rank rank) {
  Hierarchy at(shape, rank);
  if (at.local > 1 && at.hosts > 1 && shape.bytes > kPipelinedSlots * shape.slot_bytes()) {
    return pipelined_all_reduce(shape, rank);
  }
  Shape inside = half_part_of(shape, Collective::kReduceScatter, at.local);
  inside.shards = at.shards();
  at.inside(inside, {.ranks = at.mates, .output = at.mine(), .partial = at.hosts > 1});

  Shape between = part_of(shape, Collective::kAllReduce, at.hosts);
  between.bytes = inside.shards[static_cast<size_t>(at.index)];
  at.between(between, {.ranks = at.across, .input = at.mine(), .output = at.mine()});

  inside.collective = Collective::kAllGather;
  inside.geometry.line_bytes = 0;  // the lines are the reduce-scatter's
  const uint64_t second_half = inside.geometry.window_bytes();
  at.inside(inside, {.ranks = at.mates, .input = at.mine(), .window_offset = second_half});
  return std::move(at.plan);
}

// All-gather between hosts, so that each rank has the shards of its index; then, for every host, an
// all-gather of its shards in mine. These take turns with the two halves of the window: when one
// has ended, all mates have begun it, and so left the one before.
Plan hierarchical_all_gather(const Shape& shape, Rank rank) {
  Hierarchy at(shape, rank);
  Shape between = part_of(shape, Collective::kAllGather, at.hosts);
  Side spread{Space::kOutput, {}};
  uint64_t offset = 0;
  for (const Rank r : at.across) {
    between.shards.push_back(shape.shard(r));
    spread.pieces.push_back({offset, shape.shard_offset(r)});
    offset += between.shards.back();
  }
  at.between(between, {.ranks = at.across, .output = spread});

  for (int host = 0; host < at.hosts; ++host) {
    const Rank first = host * at.local;
    Shape inside = half_part_of(shape, Collective::kAllGather, at.local);
    inside.geometry.line_bytes = 0;
    inside.shards.assign(shape.shards.begin() + first, shape.shards.begin() + first + at.local);
    Placement placement{at.mates};
    placement.input = {Space::kOutput, {{0, shape.shard_offset(first + at.index)}}};
    placement.output = {Space::kOutput, {{0, shape.shard_offset(first)}}};
    placement.window_offset = host % 2 == 0 ? 0 : inside.geometry.window_bytes();
    at.inside(inside, placement);
  }
  return std::move(at.plan);
}

// Scatter in the root's host, broadcast of my shard between hosts, all-gather in the host.
Plan hierarchical_broadcast(const Shape& shape, Rank rank) {
  Hierarchy at(shape, rank);
  Shape inside = part_of(shape, Collective::kScatter, at.local);
  inside.root = shape.root % at.local;
  inside.shards = at.shards();
  inside.meets = false;
  if (at.host == shape.root / at.local) at.inside(inside, {.ranks = at.mates, .output = at.mine()});

  Shape between = part_of(shape, Collective::kBroadcast, at.hosts);
  between.root = shape.root / at.local;
  between.bytes = inside.shards[static_cast<size_t>(at.index)];
  at.between(between, {.ranks = at.across, .input = at.mine(), .output = at.mine()});

  inside.collective = Collective::kAllGather;
  inside.geometry.line_bytes = 0;  // the lines are the scatter's
  at.inside(inside, {.ranks = at.mates, .input = at.mine()});
  return std::move(at.plan);
}

// Reduce to the rank of the root's index, into its window, and from there to the root; then that
// rank tells its mates that all have begun. A message longer than half the window or the slots
// goes along the ring, which crosses to each host once.
Plan hierarchical_reduce(const Shape& shape, Rank rank) {
  Hierarchy at(shape, rank);
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
  at.inside(inside, {.ranks = at.mates, .output = staged, .partial = at.hosts > 1});
  PlanBuilder end(inside, Algorithm::kHierarchical, at.index);
  if (at.index == inside.root) {
    Shape between = part_of(shape, Collective::kReduce, at.hosts);
    between.root = shape.root / at.local;
    between.bytes = shape.bytes;
    at.between(between, {.ranks = at.across, .input = staged});
    for (int mate = 0; mate < at.local; ++mate) {
      if (mate != at.index) end.signal(mate, kCredit);
    }
  } else {
    end.wait(inside.root, kCredit);
  }
  at.append(end.finish(), {.ranks = at.mates});
  return std::move(at.plan);
}

// The first rank of each host hears its mates, meets the others and tells the mates.
Plan hierarchical_barrier(const Shape& shape, Rank rank) {
  Hierarchy at(shape, rank);
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
