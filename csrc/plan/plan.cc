#include "plan/plan.h"

#include <array>

namespace ringcomm {
namespace {

constexpr std::array<const char*, kCollectives> kCollectiveNames = {
    "all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce",
    "scatter",    "gather",         "all_to_all", "barrier"};
constexpr std::array<const char*, kAlgorithms> kAlgorithmNames = {
    "direct", "ring", "tree", "pairwise", "dissemination", "hierarchical", "doubling"};

}  // namespace

uint64_t Plan::memory_bytes() const {
  return sizeof(Plan) + blocks.capacity() * sizeof(Block) + steps.capacity() * sizeof(Step) +
         refs.capacity() * sizeof(Ref);
}

bool reduces(Collective collective) {
  return collective == Collective::kAllReduce || collective == Collective::kReduceScatter ||
         collective == Collective::kReduce;
}

bool rooted(Collective collective) {
  return collective == Collective::kBroadcast || collective == Collective::kReduce ||
         collective == Collective::kScatter || collective == Collective::kGather;
}

bool sharded(Collective collective) {
  return collective == Collective::kReduceScatter || collective == Collective::kAllGather ||
         collective == Collective::kScatter || collective == Collective::kGather;
}

const char* to_string(Collective collective) {
  return kCollectiveNames[static_cast<size_t>(collective)];
}
const char* to_string(Algorithm algorithm) {
  return kAlgorithmNames[static_cast<size_t>(algorithm)];
}

Algorithm algorithm_called(const std::string& name) {
  for (int i = 0; i < kAlgorithms; ++i) {
    const auto algorithm = static_cast<Algorithm>(i);
    if (name == to_string(algorithm)) return algorithm;
  }
  throw UsageError(str("there is no algorithm '", name, "': use one of ", joined(kAlgorithmNames)));
}

}  // namespace ringcomm
