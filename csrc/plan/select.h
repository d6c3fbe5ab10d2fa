// Chooses the algorithm for a shape. This is the one place that turns (shape, rank, algorithm) into
// a plan.
#pragma once

#include "plan/plan.h"
#include "plan/shape.h"

namespace ringcomm {

inline constexpr uint64_t kAnySize = UINT64_MAX;  // a row without a limit
// Bytes that come from all ranks at once took up to a fifth longer on full links than a ring's. So
// much longer is assumed.
inline constexpr double kIncast = 0.1;

// The connections between the ranks of a group. All ranks have the same, as they must choose alike.
struct Reach : Levels {
  bool mapped = false;  // every rank can load from every other's window
};

// Returns the algorithm of the first row of the table that fits.
Algorithm select(const Shape& shape, bool mapped);
// Returns that row in words: "all_reduce, any size, mapped windows".
std::string selection_reason(const Shape& shape, bool mapped);

// A row of the table as it is for one group.
struct SelectionRow {
  Collective collective;
  Algorithm algorithm;
  uint64_t limit;     // the largest message_bytes() for which the row is chosen, or kAnySize
  const char* needs;  // of the group: "mapped", "hosts", "few_hosts", "sites", "few",
                      // "many", or "" for nothing
  bool fits;          // the group has it
  std::string text;   // as selection_reason() says it
};
// Returns the table of a group of so many ranks. The first row that fits, and whose limit is no
// smaller than the message, decides.
std::vector<SelectionRow> selection(int size, const Reach& reach);

// Returns the bytes to compare with a row's limit: the message, or the largest shard. In all_to_all
// the bytes that ranks send differ between them, so they do not count.
uint64_t message_bytes(const Shape& shape);

std::vector<Algorithm> algorithms_of(Collective collective);

// Makes the rank's plan. The shape must be one that validate() (report/operation.h) accepts. Throws
// UsageError if the collective has no such algorithm.
Plan make_plan(const Shape& shape, Rank rank, Algorithm algorithm);

}  // namespace ringcomm
