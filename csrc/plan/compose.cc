// Plans made of plans: a part is planned for a subgroup, lifted to the ranks of the whole group and
// run after another part. The parts of one plan run within one half of the shared memory, so they
// must not meet there: each pair of ranks uses lines in one part only. Windows are shared out by
// offset, and so are inboxes that two parts use.

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
  struct Seam {
    uint64_t from;
    uint64_t to;
  };
  std::vector<Seam> seams = {{0, 0}};

  uint64_t place(uint64_t offset) const {
    const Seam& seam = *--std::ranges::upper_bound(seams, offset, {}, &Seam::from);
    return seam.to + (offset - seam.from);
  }
};

// The places where a part of a composed plan finds its ranks and its memory.
struct Placement {
  std::vector<Rank> ranks;  // the whole group's number of each rank of the part
  Side input{Space::kInput};
  Side output{Space::kOutput};
  uint64_t window_offset = 0, inbox_offset = 0;
  bool partial = false;  // its reductions are not the last ones
};

constexpr uint64_t kPipelinedSlots = 4;  // from here on bandwidth outweighs hops

void append(Plan& plan, const Plan& part, const Placement& placement) {
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
  // The side that has all shards, in parts whose operands name extents.
  const bool scatters = part.collective == Collective::kReduceScatter;
  const Side& whole = scatters ? placement.input : placement.output;
  for (const auto& [offset, bytes] : part.extents) {
    plan.extents.push_back({whole.place(offset), bytes});
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
    if (ref.space == Space::kInbox) ref.offset += placement.inbox_offset;
    if (ref.space == Space::kInput || ref.space == Space::kOutput) {
      const Side& side = ref.space == Space::kInput ? placement.input : placement.output;
      ref.space = side.space;
      if (ref.extent == 0) ref.offset = side.place(ref.offset);
      ref.extent = static_cast<uint16_t>(extent(ref.extent));
    }
    plan.refs.push_back(ref);
  }
}

// The two groups a rank of a hierarchy belongs to, and its plan, which grows part by part. A host's
// ranks map one another's memory. Where hosts have one rank, or are the ranks of such a part, the
// hosts of a site take their place.
struct Hierarchy {
  Hierarchy(const Shape& whole, Rank rank)
      : shape(whole),
        mapped(whole.local > 1 || whole.site == 1),
        local(mapped ? whole.local : whole.site),
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

  void inside(Shape part, const Placement& placement) {
    part.costs = shape.near;
    append(plan, make_plan(part, index, select(part, mapped)), placement);
  }
  // The ranks of a host share its link.
  void between(Shape part, const Placement& placement) {
    if (mapped) part.costs.beta *= local, part.near.beta *= local;
    part.site = std::max(1, shape.site / local);
    append(plan, make_plan(part, host, select(part, false)), placement);
  }

  const Shape& shape;
  const bool mapped;
  int local, hosts, host = 0, index = 0;
  std::vector<Rank> mates;   // my host's ranks
  std::vector<Rank> across;  // those with my index on every host
  Plan plan;
};

Shape part_of(const Shape& shape, Collective collective, int size) {
  Shape part;
  part.collective = collective;
  part.size = size;
  part.element = shape.element;
  part.geometry = shape.geometry;
  part.geometry.size = size;
  part.costs = shape.costs;
  part.near = shape.near;
  return part;
}

// Two parts among mates share the window: each sees segments of half the size. Over a network they
// share the inboxes as well.
Shape half_part_of(const Hierarchy& at, Collective collective) {
  Shape part = part_of(at.shape, collective, at.local);
  const auto halve = [](uint64_t& bytes) { bytes = bytes >= 128 ? bytes / 128 * 64 : bytes / 2; };
  halve(part.geometry.segment_bytes);
  if (!at.mapped) halve(part.geometry.inbox_bytes);
  return part;
}

// The second of two such parts.
Placement second_half(const Hierarchy& at, const Shape& part) {
  return {.ranks = at.mates,
          .window_offset = part.geometry.window_bytes(),
          .inbox_offset = at.mapped ? 0 : part.geometry.inbox_bytes};
}

}  // namespace

// The steps name the ranks at their places, and shards lie in the order of the ranks.
Plan ordered_plan(const Shape& shape, Rank rank, Algorithm algorithm) {
  const std::vector<Rank>& order = *shape.order;
  const auto place = [&](Rank r) {
    return static_cast<Rank>(std::ranges::find(order, r) - order.begin());
  };
  Shape by_place = shape;
  by_place.order.reset();
  by_place.root = place(shape.root);
  std::vector<Side::Seam> seams = {{0, 0}};
  if (sharded(shape.collective)) {
    const std::vector<Extent> chunks = shape.chunks();
    by_place.shards.clear();
    seams.clear();
    uint64_t offset = 0;
    for (const Rank r : order) {
      const Extent& chunk = chunks[static_cast<size_t>(r)];
      by_place.shards.push_back(chunk.bytes);
      seams.push_back({offset, chunk.offset});
      offset += chunk.bytes;
    }
  }
  Placement placement{order};
  const bool gathers = shape.collective == Collective::kAllGather;
  (gathers ? placement.output : placement.input).seams = std::move(seams);
  Plan plan = PlanBuilder(shape, algorithm, rank).finish();
  append(plan, make_plan(by_place, place(rank), algorithm), placement);
  return plan;
}

// Reduce-scatter in the host, all-reduce of my shard between hosts, all-gather in the host: few
// hops. If shards are longer than a segment, it is a pipeline between few hosts: there every host
// talks to every other. All of these go by sites, too.
Plan hierarchical_all_reduce(const Shape& shape, Rank rank) {
  Hierarchy at(shape, rank);
  const bool one_level = shape.site == 1 && at.local > 1 && at.hosts > 1;
  if (one_level && shape.few_hosts() && shape.bytes > kPipelinedSlots * shape.slot_bytes()) {
    return pipelined_all_reduce(shape, rank);
  }
  Shape inside = half_part_of(at, Collective::kReduceScatter);
  inside.shards = at.shards();
  at.inside(inside, {.ranks = at.mates, .output = at.mine(), .partial = at.hosts > 1});

  Shape between = part_of(shape, Collective::kAllReduce, at.hosts);
  between.bytes = inside.shards[static_cast<size_t>(at.index)];
  at.between(between, {.ranks = at.across, .input = at.mine(), .output = at.mine()});

  inside.collective = Collective::kAllGather;
  inside.geometry.line_bytes = 0;  // the lines are the reduce-scatter's
  Placement placement = second_half(at, inside);
  placement.input = at.mine();
  at.inside(inside, placement);
  return std::move(at.plan);
}

namespace {

// The shards of every host in turn, from the mates that have them in their outputs, through
// windows. A signal says that one turn is published and the one two turns before it is consumed.
Plan gather_from_mates(const Hierarchy& at) {
  constexpr uint64_t kSlots = 4;  // of a segment each
  const Shape part = part_of(at.shape, Collective::kAllGather, at.local);
  PlanBuilder plan(part, Algorithm::kHierarchical, at.index);
  const std::vector<Extent> chunks = at.shape.chunks();
  std::vector<Extent> extents;  // mate by mate, from me on, and host by host
  for (int i = 0; i < at.local; ++i) {
    for (int host = 0; host < at.hosts; ++host) {
      extents.push_back(chunks[static_cast<size_t>(host * at.local + plan.peer(i))]);
    }
  }
  plan.extents(extents);
  const uint64_t segment = part.geometry.segment_bytes, hosts = static_cast<uint64_t>(at.hosts);
  const uint64_t count = Segments{at.shape.largest_shard(), segment}.count();
  // Segment c of the shard of that host's rank, and its place in the window of the i-th mate.
  const auto move = [&](int i, uint64_t c, int host, bool publish) {
    const int index = i * at.hosts + host;
    const auto extent = static_cast<uint16_t>(1 + index);
    const Ref mine = plan.output(c * segment, extent);
    const Ref shared = plan.in_turn(plan.window(plan.peer(i), 0), {segment, kSlots, hosts, 1},
                                    c * hosts + static_cast<uint64_t>(host));
    const uint64_t bytes = extents[static_cast<size_t>(index)].bytes;
    plan.copy(publish ? shared : mine, publish ? mine : shared,
              {segment, c * segment, bytes, extent});
  };
  move(0, 0, 0, true);
  plan.signal_all();
  plan.repeat({count, segment, {count - 1}}, [&](uint64_t c) {
    plan.rounds(0, at.hosts, {hosts - 1}, [&](int host) {
      const bool last = host + 1 == at.hosts;
      plan.wait_all();
      if (!last || c + 1 < count) {
        move(0, c + last, last ? 0 : host + 1, true);
        plan.signal_all();
      }
      for (int i = 1; i < at.local; ++i) move(i, c, host, false);
    });
  });
  return plan.finish();
}

}  // namespace

// All-gather between hosts, so that each rank has the shards of its index; then those of the others
// in my host. Hosts of a site do the latter with an all-gather for each site, which take turns with
// the two halves of the memory: when one has ended, all mates have begun it, and so left the one
// before.
Plan hierarchical_all_gather(const Shape& shape, Rank rank) {
  Hierarchy at(shape, rank);
  Shape between = part_of(shape, Collective::kAllGather, at.hosts);
  Side spread{Space::kOutput, {}};
  const std::vector<Extent> chunks = shape.chunks();
  uint64_t offset = 0;
  for (const Rank r : at.across) {
    const Extent& chunk = chunks[static_cast<size_t>(r)];
    between.shards.push_back(chunk.bytes);
    spread.seams.push_back({offset, chunk.offset});
    offset += chunk.bytes;
  }
  at.between(between, {.ranks = at.across, .output = spread});
  if (at.mapped) {
    if (at.local > 1) append(at.plan, gather_from_mates(at), {.ranks = at.mates});
    return std::move(at.plan);
  }

  for (int host = 0; host < at.hosts; ++host) {
    const Rank first = host * at.local;
    Shape inside = half_part_of(at, Collective::kAllGather);
    inside.geometry.line_bytes = 0;
    inside.shards.assign(shape.shards.begin() + first, shape.shards.begin() + first + at.local);
    Placement placement = host % 2 == 0 ? Placement{at.mates} : second_half(at, inside);
    placement.input = {Space::kOutput, {{0, shape.shard_offset(first + at.index)}}};
    placement.output = {Space::kOutput, {{0, shape.shard_offset(first)}}};
    at.inside(inside, placement);
  }
  return std::move(at.plan);
}

// Scatter in the root's host, broadcast of my shard between hosts, all-gather in the host.
Plan hierarchical_broadcast(const Shape& shape, Rank rank) {
  Hierarchy at(shape, rank);
  Shape inside = at.mapped ? part_of(shape, Collective::kScatter, at.local)
                           : half_part_of(at, Collective::kScatter);
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
  Placement placement = second_half(at, inside);
  placement.input = at.mine();
  if (at.mapped) placement.window_offset = 0;  // the scatter leaves the window alone
  at.inside(inside, placement);
  return std::move(at.plan);
}

// Reduce to the rank of the root's index, into its window, and from there to the root; then that
// rank tells its mates that all have begun. A message longer than half the window or the slots
// goes along the ring, which crosses to each host once.
Plan hierarchical_reduce(const Shape& shape, Rank rank) {
  Hierarchy at(shape, rank);
  Shape inside = half_part_of(at, Collective::kReduce);
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
  append(at.plan, end.finish(), {.ranks = at.mates});
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
