// Checks of a sequence of programs before any of it is run, and one run of it.
#pragma once

#include <vector>

#include "verify/verify.h"

namespace ringcomm::verify_detail {

// Throws Violation: another number of ranks, geometries that differ, signals that no wait takes.
void check_sequence(const std::vector<Program>& sequence);

// Runs the sequence once, and notes events. Seed 0 has each rank go on until it waits; others draw
// turns.
Finding found_by(const std::vector<Program>& sequence, uint64_t seed);

}  // namespace ringcomm::verify_detail
