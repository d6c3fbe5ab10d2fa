#include "plan/select.h"

#include <array>
#include <cmath>

#include "plan/builder.h"
#include "plan/planners.h"
#include "plan/registry.h"

namespace ringcomm {
namespace {

using enum Collective;
using enum Algorithm;
using Planner = Plan (*)(const Shape&, Rank);

// The needs of a row: the group must have them.
enum Needs { kNothing, kMapped, kHosts, kFewHosts, kSites, kFew, kMany };
struct NeedNames {
  const char* key;   // for programs
  const char* text;  // for people
};
constexpr std::array kNeedNames = {
    NeedNames{"", ""},
    NeedNames{"mapped", "mapped windows"},
    NeedNames{"hosts", "several ranks on each of several hosts"},
    NeedNames{"few_hosts", "several ranks, 256 in all, on each of 16 hosts at most"},
    NeedNames{"sites", "several hosts at each of several sites"},
    NeedNames{"few", "at most 16 ranks"},
    NeedNames{"many", "more than 16 ranks"}};
static_assert(kFewEnds == 16);

// The largest message for which a row is chosen. `size` is the number of ranks, or of hosts if
// plans are composed. The limits are from the model of Hockney (1994): a message of m bytes takes
// alpha + m beta seconds, and adding m bytes up takes m gamma (docs/plans.md).
using Limit = uint64_t (*)(const Shape&, double size);

struct Row {
  Collective collective;
  Limit limit;
  Needs needs;
  Algorithm algorithm;
  Planner planner;
};

// The size in bytes at which `steps` seconds equal `slope` seconds a byte.
uint64_t crossing(double steps, double slope) {
  if (steps <= 0) return 0;
  return slope * 1e18 <= steps ? kAnySize : static_cast<uint64_t>(steps / slope);
}

uint64_t any_size(const Shape&, double) { return kAnySize; }
uint64_t line(const Shape& shape, double) { return shape.geometry.line_bytes; }

// There is one round instead of n - 1, with as many bytes. But they come from all ranks at once:
// see kIncast. A ring hides most of its rounds in shards of several segments (kMostPerSlot in
// ring.cc).
uint64_t pairwise(const Shape& shape, double size) {
  const double saved = (size - 2) / (size - 1) * shape.costs.alpha;
  const uint64_t one_segment =
      std::min(crossing(saved, kIncast * shape.costs.beta), shape.slot_bytes() / 8);
  return std::max(one_segment, crossing(saved, 0.75 * shape.costs.beta));
}

// Each pass has log2 n rounds, and a ring n - 1, or one for each host that it comes through. A ring
// hides them in shards of several segments. Where ranks share a link, all of them send over it.
uint64_t bruck(const Shape& shape, double size) {
  const double ranks = shape.size, rounds = std::ceil(std::log2(ranks));
  if (rounds >= size - 1) return 0;
  const double passes = std::floor((size - 1) / rounds);
  const uint64_t shared = crossing((size - 1 - rounds) * shape.costs.alpha,
                                   (ranks / size - 1) * ranks * shape.costs.beta);
  const uint64_t shard = std::min(
      {static_cast<uint64_t>(passes) * shape.bruck_bytes(), shape.slot_bytes() / 8, shared});
  return shape.collective == kAllReduce ? shard * static_cast<uint64_t>(size) : shard;
}

// Seconds a byte of a copy, of memory that no cache holds.
constexpr double kCopy = 0.1e-9;

// Doubling has fewer rounds than Bruck's ways there and back, or than a ring, and each has the
// whole message, which it copies before it is sent. A ring copies its shards when they have come.
// Ranks beyond a power of two add a round before, one after if they are many, and messages that
// share a link with others.
uint64_t doubling(const Shape& shape, double size) {
  const double rounds = std::floor(std::log2(size)), within = std::exp2(rounds);
  const double before = size > within, after = 2 * (size - within) > within;
  const double ring = 2 * (size - 1), sent = rounds + 3 * before - ring / size;
  const double reduced = rounds + before - ring / 2 / size;
  const auto cheaper_than = [&](double others) {
    return crossing((others - rounds - before - after) * shape.costs.alpha,
                    sent * shape.costs.beta + reduced * (shape.costs.gamma + kCopy));
  };
  const uint64_t limit = cheaper_than(2 * std::ceil(std::log2(size)));
  return size > kFewEnds || limit < bruck(shape, size) ? limit : cheaper_than(ring);
}

// The tree's root sends everything to log2 n others. A chain's sends it once, and its last rank
// waits for a segment to pass through all others.
uint64_t tree(const Shape& shape, double size) {
  const double deep = std::floor(std::log2(size)), children = std::ceil(std::log2(size));
  const double passed = (size - 2) * static_cast<double>(shape.slot_bytes()) * shape.costs.beta;
  return crossing((size - 1 - deep) * shape.costs.alpha + passed,
                  (children - 1) * shape.costs.beta);
}

// The first row that fits decides. Direct plans whose messages ride in lines or inboxes load from
// nobody, so they serve a network as well.
constexpr std::array kTable = {
    Row{kAllReduce, any_size, kMapped, kDirect, direct_all_reduce},
    Row{kAllReduce, any_size, kHosts, kHierarchical, hierarchical_all_reduce},
    Row{kAllReduce, line, kFew, kDirect, direct_all_reduce},
    Row{kAllReduce, any_size, kSites, kHierarchical, hierarchical_all_reduce},
    Row{kAllReduce, doubling, kNothing, kDoubling, doubling_all_reduce},
    Row{kAllReduce, bruck, kNothing, kBruck, bruck_all_reduce},
    Row{kAllReduce, any_size, kNothing, kRing, ring_all_reduce},
    Row{kReduceScatter, any_size, kMapped, kDirect, direct_reduce_scatter},
    Row{kReduceScatter, any_size, kFewHosts, kHierarchical, hierarchical_reduce_scatter},
    Row{kReduceScatter, line, kFew, kDirect, direct_reduce_scatter},
    Row{kReduceScatter, pairwise, kFew, kPairwise, pairwise_reduce_scatter},
    Row{kReduceScatter, bruck, kMany, kBruck, bruck_reduce_scatter},
    Row{kReduceScatter, any_size, kNothing, kRing, ring_reduce_scatter},
    Row{kAllGather, any_size, kMapped, kDirect, direct_all_gather},
    Row{kAllGather, any_size, kHosts, kHierarchical, hierarchical_all_gather},
    Row{kAllGather, line, kFew, kDirect, direct_all_gather},
    Row{kAllGather, any_size, kSites, kHierarchical, hierarchical_all_gather},
    Row{kAllGather, pairwise, kFew, kPairwise, pairwise_all_gather},
    Row{kAllGather, bruck, kMany, kBruck, bruck_all_gather},
    Row{kAllGather, any_size, kNothing, kRing, ring_all_gather},
    Row{kBroadcast, any_size, kMapped, kDirect, direct_broadcast},
    Row{kBroadcast, any_size, kHosts, kHierarchical, hierarchical_broadcast},
    Row{kBroadcast, any_size, kSites, kHierarchical, hierarchical_broadcast},
    Row{kBroadcast, tree, kNothing, kTree, tree_plan},
    Row{kBroadcast, any_size, kNothing, kRing, chain_plan},
    Row{kReduce, any_size, kMapped, kDirect, direct_reduce},
    Row{kReduce, tree, kHosts, kHierarchical, hierarchical_reduce},
    Row{kReduce, tree, kSites, kHierarchical, hierarchical_reduce},
    Row{kReduce, tree, kNothing, kTree, tree_plan},
    Row{kReduce, any_size, kNothing, kRing, chain_plan},
    Row{kScatter, any_size, kNothing, kDirect, star_plan},
    Row{kGather, any_size, kNothing, kDirect, star_plan},
    Row{kAllToAll, any_size, kNothing, kPairwise, pairwise_all_to_all},
    Row{kBarrier, any_size, kHosts, kHierarchical, hierarchical_barrier},
    Row{kBarrier, any_size, kSites, kHierarchical, hierarchical_barrier},
    Row{kBarrier, any_size, kNothing, kDissemination, dissemination_barrier},
};

bool fits(const Row& row, const Shape& shape, bool mapped) {
  const auto several = [&](int per_place) {
    return !mapped && per_place > 1 && shape.size > per_place;
  };
  const std::array<bool, kNeedNames.size()> holds = {true,
                                                     mapped,
                                                     several(shape.local),
                                                     several(shape.local) && shape.few_hosts(),
                                                     several(shape.site),
                                                     shape.few(),
                                                     !shape.few()};
  return holds[row.needs];
}

Plan copy_alone(const Shape& shape, Algorithm algorithm) {
  PlanBuilder plan(shape, algorithm, 0);
  const bool split = shape.collective == Collective::kAllToAll;
  plan.copy(plan.output(0), plan.input(0), split ? shape.send[0] : message_bytes(shape));
  return plan.finish();
}

std::string text_of(const Row& row, uint64_t limit) {
  return str(to_string(row.collective), ", ",
             limit == kAnySize ? "any size" : str("up to ", limit, " B"),
             row.needs == kNothing ? "" : ", ", kNeedNames[row.needs].text);
}

const Row& row_for(const Shape& shape, bool mapped) {
  const uint64_t bytes = message_bytes(shape);
  const int ends = shape.size / shape.local;
  for (const Row& row : kTable) {
    if (row.collective == shape.collective && fits(row, shape, mapped) &&
        bytes <= row.limit(shape, ends)) {
      return row;
    }
  }
  throw UsageError(str("no algorithm for ", to_string(shape.collective)));
}

}  // namespace

uint64_t message_bytes(const Shape& shape) {
  return sharded(shape.collective) ? shape.largest_shard() : shape.bytes;
}

Algorithm select(const Shape& shape, bool mapped) { return row_for(shape, mapped).algorithm; }

std::string selection_reason(const Shape& shape, bool mapped) {
  const Row& row = row_for(shape, mapped);
  const int ends = shape.size / shape.local;
  return text_of(row, row.limit(shape, ends));
}

std::vector<SelectionRow> selection(int size, const Reach& reach) {
  Shape shape;
  static_cast<Levels&>(shape) = static_cast<const Levels&>(reach);
  shape.size = size;
  shape.geometry = Geometry::across_hosts(size);
  const int hosts = size / shape.local;
  std::vector<SelectionRow> rows;
  for (const Row& row : kTable) {
    shape.collective = row.collective;
    const uint64_t limit = row.limit(shape, hosts);
    const char* const needs = kNeedNames[row.needs].key;
    rows.push_back({row.collective, row.algorithm, limit, needs, fits(row, shape, reach.mapped),
                    text_of(row, limit)});
  }
  return rows;
}

std::vector<Algorithm> algorithms_of(Collective collective) {
  std::vector<Algorithm> algorithms;
  for (const Row& row : kTable) {
    const bool listed = std::ranges::find(algorithms, row.algorithm) != algorithms.end();
    if (row.collective == collective && !listed) algorithms.push_back(row.algorithm);
  }
  return algorithms;
}

Plan make_plan(const Shape& shape, Rank rank, Algorithm algorithm) {
  RINGCOMM_CHECK(rank >= 0 && rank < shape.size, to_string(shape.collective), ": no rank ", rank,
                 " in a group of ", shape.size);
  if (is_registered(algorithm)) {
    return shape.size == 1 ? copy_alone(shape, algorithm) : registered_plan(shape, rank, algorithm);
  }
  for (const Row& row : kTable) {
    if (row.collective != shape.collective || row.algorithm != algorithm) continue;
    // Where every rank talks to every other there is no order.
    const bool ordered = shape.order && algorithm != kDirect && algorithm != kPairwise;
    Plan plan = shape.size == 1  ? copy_alone(shape, algorithm)
                : shape.readable ? readable_plan(shape, rank)
                : ordered        ? ordered_plan(shape, rank, algorithm)
                                 : row.planner(shape, rank);
    std::apply([](auto&... table) { (table.shrink_to_fit(), ...); }, plan.tables());
    return plan;
  }
  throw UsageError(str(to_string(shape.collective), " has no algorithm \"", to_string(algorithm),
                       "\"; it has ",
                       joined(algorithms_of(shape.collective),
                              [](Algorithm offered) { return to_string(offered); })));
}

}  // namespace ringcomm
