// The instruction sets of the reduce kernels, one of which a test or benchmark may choose.
#pragma once

#include <string>
#include <vector>

#include "base/error.h"
#include "reduce/kernels.h"

namespace ringcomm {

// "plain", "avx2", "avx512": those this machine can run, best last; and the one in use.
inline std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const InstructionSet& set : known_instruction_sets()) {
    if (set.available()) names.push_back(set.name);
  }
  return names;
}

inline const char* instruction_set() {
  return current_instruction_set().load(std::memory_order_relaxed)->name;
}

// Not while reductions run.
inline void use_instruction_set(const std::string& name) {
  for (const InstructionSet& set : known_instruction_sets()) {
    if (set.name != name) continue;
    RINGCOMM_CHECK(set.available(), "this machine has no ", name);
    current_instruction_set().store(&set, std::memory_order_relaxed);
    return;
  }
  throw UsageError(str("there is no instruction set called '", name, "'"));
}

}  // namespace ringcomm
