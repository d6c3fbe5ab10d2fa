// Plans made of plans: a part is planned for a subgroup, lifted to the ranks of the whole group and
// run after another part. The parts of one plan run within one half of the shared memory, so they
// must not meet there: each pair of ranks uses inboxes and lines in one part only, and windows are
// shared out by offset.
#pragma once

#include <vector>

#include "plan/plan.h"
#include "plan/shape.h"

namespace ringcomm {

// A side of a part's user memory: which of the whole plan's sides it is, and where.
struct Side {
  Space space;
  // For shards that are not neighbours in the whole: the part's offset `from` stands at `to`, as
  // does all that follows, up to the next piece. In order of `from`.
  struct Piece {
    uint64_t from;
    uint64_t to;
  };
  std::vector<Piece> pieces = {{0, 0}};

  uint64_t place(uint64_t offset) const;
};

// Where a part of a composed plan finds things.
struct Placement {
  std::vector<Rank> ranks;  // the whole group's number of each rank of the part
  Side input{Space::kInput};
  Side output{Space::kOutput};
  uint64_t window_offset = 0;
  bool partial = false;  // its reductions are not the last ones
};

Plan lift(const Plan& part, const Placement& placement);

// The parts, already lifted, one after the other. `whole` says whose plan it is.
Plan concatenate(Plan whole, const std::vector<Plan>& parts);

void check_hosts(const Shape& shape);  // throws UsageError where a host would have fewer ranks

// Ranks are laid out host by host, shape.local a host. Inside a host windows are mapped; between
// hosts, ranks of equal index talk, and only put.
Plan hierarchical_all_reduce(const Shape& shape, Rank rank);
Plan pipelined_all_reduce(const Shape& shape, Rank rank);         // hierarchical.cc
Plan hierarchical_reduce_scatter(const Shape& shape, Rank rank);  // hierarchical.cc
Plan hierarchical_all_gather(const Shape& shape, Rank rank);
Plan hierarchical_broadcast(const Shape& shape, Rank rank);
Plan hierarchical_reduce(const Shape& shape, Rank rank);
Plan hierarchical_barrier(const Shape& shape, Rank rank);

}  // namespace ringcomm
