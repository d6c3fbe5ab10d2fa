// Proves the plans of scripts: alone, in place, after themselves, and between all plans that the
// library has. And it says which of their signals nobody needs.
#pragma once

#include <string>
#include <vector>

#include "plan/script.h"
#include "verify/verify.h"

namespace ringcomm {

// The plans of all ranks by their scripts, and the operation of the script that each step is of.
struct Scripted {
  Program program;
  std::vector<std::vector<uint32_t>> origins;
};
// Makes the plans. `shape` is rank 0's; in an all_to_all, all ranks have the same.
Scripted scripted(const Shape& shape, const std::vector<Script>& scripts, bool in_place);

// The first violation, and when it came: "alone", "in place", "after itself", "between two
// broadcast tree".
struct Verdict {
  Finding finding;
  std::string when;
  size_t own = 0;  // the operations of the sequence that are the script's: from this one on
  size_t count = 0;
};
Verdict prove(const Shape& shape, const std::vector<Script>& scripts);

// A signal without which all is as right as before.
struct Spare {
  Rank from, to;
  Lane lane;
  uint64_t index;  // among the signals of the lane
  uint32_t step;   // of the sender's plan
};
struct Mutants {
  uint64_t dropped = 0;
  std::vector<Spare> spare;
};
Mutants mutants(const Shape& shape, const std::vector<Script>& scripts);

}  // namespace ringcomm
