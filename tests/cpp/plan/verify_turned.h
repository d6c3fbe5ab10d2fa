// Proves plans that are alike on all ranks: rank r's is rank 0's, turned by r. It checks that, and
// executes rank 0's alone. Each signal of rank 0 to the rank d after it stands for one from the
// rank d before it, with that rank's clock, turned. So a ring of 4,096 ranks takes as long as one
// rank.
//
// Checks all that verify.h lists, for shards of equal length, with two differences. Contributions
// are kept as expressions over the ranks, so exactly once is looked at and not a sum. A rank of an
// all_reduce adds up a shard in the order in which every other rank does, seen from the shard.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "plan/plan.h"
#include "plan/shape.h"

namespace ringcomm {

struct TurnedOptions {
  bool in_place = false;
  // For mutation tests: the index-th signal of every rank to the rank `to` after it, on that lane,
  // and the wait that it meets are left out of the operations whose bit is set.
  struct Dropped {
    Rank to;
    Lane lane;
    uint64_t index;
    uint64_t operations;
  };
  std::optional<Dropped> dropped = std::nullopt;
  bool alike = true;  // check that plans are alike; they are when a sequence is proved again
};

// Operations follow one another on one geometry. Returns the first violation, or "".
std::string verify_turned(const std::vector<Shape>& shapes, Algorithm algorithm,
                          const TurnedOptions& options = {});

}  // namespace ringcomm
