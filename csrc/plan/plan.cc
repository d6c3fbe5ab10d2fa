#include "plan/plan.h"

#include <algorithm>
#include <array>
#include <limits>

#include "plan/registry.h"

namespace ringcomm {
namespace {

using enum Collective;

constexpr std::array<const char*, kCollectives> kCollectiveNames = {
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce",
    "scatter",    "gather",         "all_to_all", "barrier"};
constexpr std::array<const char*, kNamed> kAlgorithmNames = {
    "direct",       "ring",     "tree",        "pairwise",    "dissemination",
    "hierarchical", "doubling", "bruck",       "hand_over",   "graph",
    "two_shot",     "one_shot", "low_latency", "device_ring", "copy_engines"};

template <typename Number, typename Entry>
Number number_in(std::vector<Entry>& table, const Entry& entry) {
  const auto at = std::ranges::find(table, entry) - table.begin() + 1;
  if (at > std::ssize(table)) table.push_back(entry);
  RINGCOMM_CHECK(at <= std::numeric_limits<Number>::max(), "a plan's table of ", table.size(),
                 " entries is too long");
  return static_cast<Number>(at);
}

}  // namespace

uint8_t Plan::motion(const Motion& motion) { return number_in<uint8_t>(motions, motion); }
uint16_t Plan::extent(const Extent& extent) { return number_in<uint16_t>(extents, extent); }

uint64_t Plan::memory_bytes() const {
  const auto bytes = [](const auto&... table) {
    return (sizeof(Plan) + ... + (table.capacity() * sizeof(table[0])));
  };
  return std::apply(bytes, tables());
}

bool reduces(Collective collective) {
  return collective == kAllReduce || collective == kReduceScatter || collective == kReduce;
}

bool rooted(Collective collective) {
  return collective == kBroadcast || collective == kReduce || collective == kScatter ||
         collective == kGather;
}

bool sharded(Collective collective) {
  return collective == kReduceScatter || collective == kAllGather || collective == kScatter ||
         collective == kGather;
}

const char* to_string(Collective collective) {
  return kCollectiveNames[static_cast<size_t>(collective)];
}
const char* to_string(Algorithm algorithm) {
  if (is_registered(algorithm)) return registered_name(algorithm);
  return kAlgorithmNames[static_cast<size_t>(algorithm)];
}

std::span<const char* const> algorithm_names() { return kAlgorithmNames; }

// Ranks do not know what two others send one another, so none chooses by it.
bool kernel_serves(Algorithm kernel, Collective collective) {
  const bool moves = !reduces(collective) && collective != kBarrier;
  if (kernel == kByCopies) return moves;
  if (kernel == kByRing) return collective <= kReduce;
  return kernel == kHandOver || collective != kAllToAll;
}

std::optional<Collective> collective_called(const std::string& name) {
  const auto at = std::ranges::find(kCollectiveNames, name) - kCollectiveNames.begin();
  return at < kCollectives ? std::optional(static_cast<Collective>(at)) : std::nullopt;
}

Algorithm algorithm_called(const std::string& name) {
  const auto place = std::ranges::find(kAlgorithmNames, name);
  const auto algorithm = static_cast<Algorithm>(place - kAlgorithmNames.begin());
  if (place != kAlgorithmNames.end() && algorithm != kByGraph) return algorithm;
  if (const auto registered = registered_called(name)) return *registered;
  const std::span known(kAlgorithmNames.data(), kAlgorithms);  // kernels are for devices alone
  throw UsageError(str("there is no algorithm '", name, "': use one of ", joined(known)));
}

}  // namespace ringcomm
