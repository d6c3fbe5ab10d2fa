// Plans of algorithms that are written outside the library. A script says what one rank does with
// one segment of every chunk, in terms of chunks, links and messages. This planner, as others, has
// PlanBuilder make the slots, credits and loops of it. ringcomm/algorithms/schedule.py writes them.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "plan/plan.h"
#include "plan/shape.h"

namespace ringcomm {

// The words of a script. It may have an inbox in more and smaller slots than other plans do.
// These are the words, each section of operations after its number:
//   parts, slots, pieces, links; of each link: from, to, pieces, messages, needs_credit of each
//   message operations before the passes; of each pass; after the passes
// An operation is one of
//   move chunk final adds dst_count src_count operand...    operand: space place message piece
//   signal peer lane | wait peer lane | acquire link message | release link message
// Spaces are input and output, whose place is a chunk, and slot, whose place is a link.
struct Script {
  std::vector<int64_t> words;
  uint64_t code = 0;  // hash of all ranks' scripts
};

// Makes the plan. `origins`, if given, gets the number of the operation to which each step of the
// plan belongs, from 0 on. Throws UsageError where a message has no room in a slot, or the words
// make no sense.
Plan scripted_plan(const Shape& shape, Rank rank, Algorithm algorithm, const Script& script,
                   std::vector<uint32_t>* origins = nullptr);

// Tells whether the shape looks the same to all ranks. That of an uneven all_to_all does not.
bool same_on_all_ranks(const Shape& shape);

}  // namespace ringcomm
