#include "plan/select.h"

#include <array>
#include <bit>
#include <limits>
#include <sstream>

#include "plan/builder.h"
#include "plan/compose.h"
#include "plan/planners.h"

namespace ringcomm {
namespace {

using Planner = Plan (*)(const Shape&, Rank);

struct Entry {
  Collective collective;
  Algorithm algorithm;
  Planner planner;
};

constexpr std::array kPlanners = {
    Entry{Collective::kAllReduce, Algorithm::kDirect, direct_all_reduce},
    Entry{Collective::kAllReduce, Algorithm::kRing, ring_all_reduce},
    Entry{Collective::kAllReduce, Algorithm::kDoubling, doubling_all_reduce},
    Entry{Collective::kAllReduce, Algorithm::kHierarchical, hierarchical_all_reduce},
    Entry{Collective::kReduceScatter, Algorithm::kDirect, direct_reduce_scatter},
    Entry{Collective::kReduceScatter, Algorithm::kRing, ring_reduce_scatter},
    Entry{Collective::kReduceScatter, Algorithm::kPairwise, pairwise_reduce_scatter},
    Entry{Collective::kReduceScatter, Algorithm::kHierarchical, hierarchical_reduce_scatter},
    Entry{Collective::kAllGather, Algorithm::kDirect, direct_all_gather},
    Entry{Collective::kAllGather, Algorithm::kRing, ring_all_gather},
    Entry{Collective::kAllGather, Algorithm::kPairwise, pairwise_all_gather},
    Entry{Collective::kAllGather, Algorithm::kHierarchical, hierarchical_all_gather},
    Entry{Collective::kBroadcast, Algorithm::kDirect, direct_broadcast},
    Entry{Collective::kBroadcast, Algorithm::kRing, ring_broadcast},
    Entry{Collective::kBroadcast, Algorithm::kTree, tree_broadcast},
    Entry{Collective::kBroadcast, Algorithm::kHierarchical, hierarchical_broadcast},
    Entry{Collective::kReduce, Algorithm::kDirect, direct_reduce},
    Entry{Collective::kReduce, Algorithm::kRing, ring_reduce},
    Entry{Collective::kReduce, Algorithm::kTree, tree_reduce},
    Entry{Collective::kReduce, Algorithm::kHierarchical, hierarchical_reduce},
    Entry{Collective::kScatter, Algorithm::kDirect, direct_scatter},
    Entry{Collective::kScatter, Algorithm::kRing, ring_scatter},
    Entry{Collective::kGather, Algorithm::kDirect, direct_gather},
    Entry{Collective::kGather, Algorithm::kRing, ring_gather},
    Entry{Collective::kAllToAll, Algorithm::kPairwise, pairwise_all_to_all},
    Entry{Collective::kBarrier, Algorithm::kDissemination, dissemination_barrier},
    Entry{Collective::kBarrier, Algorithm::kHierarchical, hierarchical_barrier},
};

// What a row asks of the group.
enum Needs { kNothing, kMapped, kHosts, kPair };
constexpr std::array kNeedNames = {"", "mapped windows", "several ranks on each of several hosts",
                                   "two ranks"};

struct Row {
  Collective collective;
  uint64_t max_bytes;
  Needs needs;
  Algorithm algorithm;
};

constexpr uint64_t kAny = std::numeric_limits<uint64_t>::max();
constexpr uint64_t kTreeBytes = 64 * 1024;  // beyond it a chain's bandwidth outweighs its depth
// A ring takes 2 (n - 1) hops of this network, doubling log2 n, each with the whole message.
constexpr uint64_t kDoublingBytes = 16 * 1024;
constexpr uint64_t kPairwiseBytes = 64 * 1024;  // one hop; beyond, a ring's n - 1 matter no more

// The first row that fits decides. Direct plans whose messages ride in lines or inboxes load from
// nobody, so they serve a network as well.
constexpr std::array kTable = {
    Row{Collective::kAllReduce, kAny, kMapped, Algorithm::kDirect},
    Row{Collective::kAllReduce, kAny, kHosts, Algorithm::kHierarchical},
    Row{Collective::kAllReduce, kLineBytes, kNothing, Algorithm::kDirect},
    Row{Collective::kAllReduce, kAny, kPair, Algorithm::kDoubling},
    Row{Collective::kAllReduce, kDoublingBytes, kNothing, Algorithm::kDoubling},
    Row{Collective::kAllReduce, kAny, kNothing, Algorithm::kRing},
    Row{Collective::kReduceScatter, kAny, kMapped, Algorithm::kDirect},
    Row{Collective::kReduceScatter, kAny, kHosts, Algorithm::kHierarchical},
    Row{Collective::kReduceScatter, kLineBytes, kNothing, Algorithm::kDirect},
    Row{Collective::kReduceScatter, kPairwiseBytes, kNothing, Algorithm::kPairwise},
    Row{Collective::kReduceScatter, kAny, kNothing, Algorithm::kRing},
    Row{Collective::kAllGather, kAny, kMapped, Algorithm::kDirect},
    Row{Collective::kAllGather, kAny, kHosts, Algorithm::kHierarchical},
    Row{Collective::kAllGather, kLineBytes, kNothing, Algorithm::kDirect},
    Row{Collective::kAllGather, kPairwiseBytes, kNothing, Algorithm::kPairwise},
    Row{Collective::kAllGather, kAny, kNothing, Algorithm::kRing},
    Row{Collective::kBroadcast, kAny, kMapped, Algorithm::kDirect},
    Row{Collective::kBroadcast, kAny, kHosts, Algorithm::kHierarchical},
    Row{Collective::kBroadcast, kTreeBytes, kNothing, Algorithm::kTree},
    Row{Collective::kBroadcast, kAny, kNothing, Algorithm::kRing},
    Row{Collective::kReduce, kAny, kMapped, Algorithm::kDirect},
    Row{Collective::kReduce, kTreeBytes, kHosts, Algorithm::kHierarchical},
    Row{Collective::kReduce, kTreeBytes, kNothing, Algorithm::kTree},
    Row{Collective::kReduce, kAny, kNothing, Algorithm::kRing},
    Row{Collective::kScatter, kAny, kNothing, Algorithm::kDirect},
    Row{Collective::kGather, kAny, kNothing, Algorithm::kDirect},
    Row{Collective::kAllToAll, kAny, kNothing, Algorithm::kPairwise},
    Row{Collective::kBarrier, kAny, kHosts, Algorithm::kHierarchical},
    Row{Collective::kBarrier, kAny, kNothing, Algorithm::kDissemination},
};

bool fits(const Row& row, const Shape& shape, Reach reach) {
  const bool hosts = !reach.mapped && reach.local > 1 && shape.size > reach.local;
  return row.needs == kNothing || (row.needs == kMapped && reach.mapped) ||
         (row.needs == kHosts && hosts) || (row.needs == kPair && shape.size == 2);
}

// Tests make lines shorter than they can be.
uint64_t limit_of(const Row& row, const Shape& shape) {
  return row.max_bytes == kLineBytes ? shape.geometry.line_bytes : row.max_bytes;
}

std::string names_of(Collective collective) {
  std::string names;
  for (const Algorithm algorithm : algorithms_of(collective)) {
    names += (names.empty() ? "" : ", ") + std::string(to_string(algorithm));
  }
  return names;
}

bool rooted(Collective collective) {
  return collective == Collective::kBroadcast || collective == Collective::kReduce ||
         collective == Collective::kScatter || collective == Collective::kGather;
}

bool sharded(Collective collective) {
  return collective == Collective::kReduceScatter || collective == Collective::kAllGather ||
         collective == Collective::kScatter || collective == Collective::kGather;
}

void check_parts(const Shape& shape, const char* what, const std::vector<uint64_t>& parts) {
  RINGCOMM_CHECK(parts.size() == static_cast<size_t>(shape.size), to_string(shape.collective), ": ",
                 what, " has ", parts.size(), " entries for ", shape.size, " ranks");
  for (const uint64_t part : parts) {
    RINGCOMM_CHECK(part % shape.element == 0, to_string(shape.collective), ": ", part,
                   " bytes are no whole number of elements of ", shape.element, " bytes");
  }
}

void check(const Shape& shape, Rank rank) {
  const Geometry& geometry = shape.geometry;
  const char* name = to_string(shape.collective);
  RINGCOMM_CHECK(shape.size > 0 && rank >= 0 && rank < shape.size, name, ": no rank ", rank,
                 " in a group of ", shape.size);
  RINGCOMM_CHECK(!rooted(shape.collective) || (shape.root >= 0 && shape.root < shape.size), name,
                 ": no root ", shape.root, " in a group of ", shape.size);
  RINGCOMM_CHECK(shape.element > 0 && shape.bytes % shape.element == 0, name, ": ", shape.bytes,
                 " bytes are no whole number of elements of ", shape.element, " bytes");
  RINGCOMM_CHECK(geometry.slots >= 2 && std::has_single_bit(geometry.slots), "an inbox has ",
                 geometry.slots, " slots: not two, or another power of two");
  RINGCOMM_CHECK(shape.size == 1 || (geometry.segment_bytes >= shape.element &&
                                     geometry.segment_bytes % shape.element == 0 &&
                                     geometry.inbox_bytes >= geometry.slots * shape.element),
                 name, ": a window with segments of ", geometry.segment_bytes, " and inboxes of ",
                 geometry.inbox_bytes, " bytes has no room for elements of ", shape.element);
  RINGCOMM_CHECK(geometry.line_bytes <= kLineBytes, "a line holds at most ", kLineBytes, " bytes");
  if (sharded(shape.collective)) check_parts(shape, "shards", shape.shards);
  if (shape.collective == Collective::kAllToAll) {
    check_parts(shape, "send", shape.send);
    check_parts(shape, "recv", shape.recv);
    RINGCOMM_CHECK(shape.send[static_cast<size_t>(rank)] == shape.recv[static_cast<size_t>(rank)],
                   name, ": rank ", rank, " sends itself what it does not receive");
  }
}

Plan copy_alone(const Shape& shape, Algorithm algorithm) {
  PlanBuilder plan(shape, algorithm, 0);
  plan.copy(plan.output(0), plan.input(0), shape.input_bytes(0));
  return plan.finish();
}

std::string text_of(const Row& row) {
  return str(to_string(row.collective), ", ",
             row.max_bytes == kAny ? "any size" : str("up to ", row.max_bytes, " B"),
             row.needs == kNothing ? "" : ", ", kNeedNames[row.needs]);
}

const Row& row_for(const Shape& shape, Reach reach) {
  const uint64_t bytes = message_bytes(shape);
  for (const Row& row : kTable) {
    if (row.collective == shape.collective && bytes <= limit_of(row, shape) &&
        fits(row, shape, reach)) {
      return row;
    }
  }
  throw UsageError(str("no algorithm for ", to_string(shape.collective)));
}

}  // namespace

uint64_t message_bytes(const Shape& shape) {
  return sharded(shape.collective) ? shape.largest_shard() : shape.bytes;
}

Algorithm select(const Shape& shape, Reach reach) { return row_for(shape, reach).algorithm; }

std::string selection_reason(const Shape& shape, Reach reach) {
  return text_of(row_for(shape, reach));
}

std::string selection_text() {
  std::ostringstream out;
  for (const Row& row : kTable) {
    out << text_of(row) << ": " << to_string(row.algorithm) << '\n';
  }
  return out.str();
}

std::string selection_json() {
  std::ostringstream out;
  for (const Row& row : kTable) {
    out << (out.tellp() == 0 ? "[" : ",") << "{\"collective\":\"" << to_string(row.collective)
        << "\",\"max_bytes\":";
    if (row.max_bytes == kAny)
      out << "null";
    else
      out << row.max_bytes;
    out << ",\"needs\":\"" << kNeedNames[row.needs] << "\",\"algorithm\":\""
        << to_string(row.algorithm) << "\"}";
  }
  out << ']';
  return out.str();
}

std::vector<Algorithm> algorithms_of(Collective collective) {
  std::vector<Algorithm> algorithms;
  for (const Entry& entry : kPlanners) {
    if (entry.collective == collective) algorithms.push_back(entry.algorithm);
  }
  return algorithms;
}

std::optional<Algorithm> algorithm_named(Collective collective, std::string_view name) {
  if (name.empty()) return std::nullopt;
  for (const Algorithm algorithm : algorithms_of(collective)) {
    if (name == to_string(algorithm)) return algorithm;
  }
  throw UsageError(str(to_string(collective), " has no algorithm \"", name, "\"; it has ",
                       names_of(collective)));
}

Plan make_plan(const Shape& shape, Rank rank, Algorithm algorithm) {
  check(shape, rank);
  for (const Entry& entry : kPlanners) {
    if (entry.collective != shape.collective || entry.algorithm != algorithm) continue;
    return shape.size == 1 ? copy_alone(shape, algorithm) : entry.planner(shape, rank);
  }
  throw UsageError(str(to_string(shape.collective), " has no algorithm \"", to_string(algorithm),
                       "\"; it has ", names_of(shape.collective)));
}

}  // namespace ringcomm
