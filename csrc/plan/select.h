// Which algorithm for which shape, and the one place that turns (shape, rank, algorithm) into a
// plan.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "plan/plan.h"
#include "plan/shape.h"

namespace ringcomm {

// What connects the ranks of a group. Equal on all of them, as the choice must be.
struct Reach {
  bool mapped;  // every rank can load from every other's window
  // Ranks of each host, where all have as many and lie host by host; else 1. Shapes are given it.
  int local = 1;
};

// The algorithm of the first row of the table that fits.
Algorithm select(const Shape& shape, Reach reach);
// That row: "all_reduce, any size, mapped windows".
std::string selection_reason(const Shape& shape, Reach reach);
// The table of a group of so many hosts.
std::string selection_text(int size, const Costs& costs);

// The numbers that follow the words alpha, beta and gamma: in to_text's text, and in the object
// "network" of what `ringcomm tune` writes. Throws UsageError.
Costs parse_costs(std::string_view text);
std::string to_text(const Costs& costs);

// What a row's limit is compared with: the message, or the largest shard. Not what all_to_all's
// ranks send, which differs between them.
uint64_t message_bytes(const Shape& shape);

std::vector<Algorithm> algorithms_of(Collective collective);

// Of a shape that validate() (comm/operation.h) would have. Throws UsageError where the collective
// has no such algorithm.
Plan make_plan(const Shape& shape, Rank rank, Algorithm algorithm);

}  // namespace ringcomm
