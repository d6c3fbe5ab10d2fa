// Chooses the algorithm for a shape. This is the one place that turns (shape, rank, algorithm) into
// a plan.
#pragma once

#include "plan/plan.h"
#include "plan/shape.h"

namespace ringcomm {

// The connections between the ranks of a group. All ranks have the same, as they must choose alike.
struct Reach : Levels {
  bool mapped = false;  // every rank can load from every other's window
};

// The algorithm of the first row of the table that fits.
Algorithm select(const Shape& shape, bool mapped);
// That row: "all_reduce, any size, mapped windows".
std::string selection_reason(const Shape& shape, bool mapped);
// The table of a group of so many ranks, `local` on each host.
std::string selection_text(int size, const Costs& costs, int local = 1);

// The bytes to compare with a row's limit: the message, or the largest shard. In all_to_all the
// bytes that ranks send differ between them, so they do not count.
uint64_t message_bytes(const Shape& shape);

std::vector<Algorithm> algorithms_of(Collective collective);

// The shape must be one that validate() (report/operation.h) accepts. Throws UsageError if the
// collective has no such algorithm.
Plan make_plan(const Shape& shape, Rank rank, Algorithm algorithm);

}  // namespace ringcomm
