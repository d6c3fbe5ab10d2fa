#include "plan/compose.h"

#include <utility>

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

// The two groups a rank of a hierarchy belongs to.
struct Hierarchy {
  Hierarchy(const Shape& shape, Rank rank) : local(shape.local) {
    RINGCOMM_CHECK(local > 0 && shape.size % local == 0, to_string(shape.collective), ": ",
                   shape.size, " ranks are no whole number of hosts with ", local, " each");
    hosts = shape.size / local;
    host = rank / local;
    index = rank % local;
    for (int i = 0; i < local; ++i) mates.push_back(host * local + i);
    for (int i = 0; i < hosts; ++i) across.push_back(i * local + index);
  }

  int local, hosts, host = 0, index = 0;
  std::vector<Rank> mates;   // my host's ranks
  std::vector<Rank> across;  // those with my index on every host
};

// Two parts inside a host share the window: each sees segments of half the size.
Geometry half_window(const Geometry& geometry, int size) {
  Geometry half = geometry;
  half.size = size;
  half.segment_bytes = geometry.segment_bytes / 2;
  if (half.segment_bytes >= 64) half.segment_bytes = half.segment_bytes / 64 * 64;
  return half;
}

Shape part_of(const Shape& shape, Collective collective, int size) {
  Shape part;
  part.collective = collective;
  part.size = size;
  part.element = shape.element;
  part.geometry = shape.geometry;
  part.geometry.size = size;
  return part;
}

}  // namespace

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

// Reduce-scatter in the host, all-reduce of my shard between hosts, all-gather in the host.
Plan hierarchical_all_reduce(const Shape& shape, Rank rank) {
  const Hierarchy at(shape, rank);
  std::vector<uint64_t> shards;
  for (int i = 0; i < at.local; ++i) {
    shards.push_back(shape.cut(shape.bytes, i + 1, at.local) - shape.cut(shape.bytes, i, at.local));
  }
  const Side mine{Space::kOutput, {{0, shape.cut(shape.bytes, at.index, at.local)}}};

  Shape inside = part_of(shape, Collective::kReduceScatter, at.local);
  inside.geometry = half_window(shape.geometry, at.local);
  inside.shards = shards;
  Placement placement{at.mates};
  placement.output = mine;
  placement.partial = at.hosts > 1;
  const Plan reduce_scatter = lift(make_plan(inside, at.index, Algorithm::kDirect), placement);

  Shape between = part_of(shape, Collective::kAllReduce, at.hosts);
  between.bytes = shards[static_cast<size_t>(at.index)];
  const Algorithm algorithm = select(between, {.mapped = false});
  placement = {.ranks = at.across, .input = mine, .output = mine};
  const Plan all_reduce = lift(make_plan(between, at.host, algorithm), placement);

  inside.collective = Collective::kAllGather;
  inside.geometry.line_bytes = 0;  // the lines are the reduce-scatter's
  placement = {.ranks = at.mates, .input = mine};
  placement.window_offset = inside.geometry.window_bytes();
  const Plan all_gather = lift(make_plan(inside, at.index, Algorithm::kDirect), placement);
  return concatenate(empty_plan(shape, rank), {reduce_scatter, all_reduce, all_gather});
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
    between.shards.push_back(shape.shards[static_cast<size_t>(r)]);
    spread.pieces.push_back({offset, shape.shard_offset(r)});
    offset += between.shards.back();
  }
  std::vector<Plan> parts;
  const Algorithm algorithm = select(between, {.mapped = false});
  parts.push_back(
      lift(make_plan(between, at.host, algorithm), {.ranks = at.across, .output = spread}));

  for (int host = 0; host < at.hosts; ++host) {
    const uint64_t block = shape.shard_offset(host * at.local);
    const Rank first = host * at.local;
    Shape inside = part_of(shape, Collective::kAllGather, at.local);
    inside.geometry = half_window(shape.geometry, at.local);
    inside.geometry.line_bytes = 0;
    inside.shards.assign(shape.shards.begin() + first, shape.shards.begin() + first + at.local);
    Placement placement{at.mates};
    placement.input = {Space::kOutput, {{0, shape.shard_offset(first + at.index)}}};
    placement.output = {Space::kOutput, {{0, block}}};
    placement.window_offset = host % 2 == 0 ? 0 : inside.geometry.window_bytes();
    parts.push_back(lift(make_plan(inside, at.index, Algorithm::kDirect), placement));
  }
  return concatenate(empty_plan(shape, rank), parts);
}

}  // namespace ringcomm
