// What a sequence of programs must be before any of it is run.
#pragma once

#include <vector>

#include "verify/verify.h"

namespace ringcomm::verify_detail {

// Throws Violation: another number of ranks, geometries that differ, signals that no wait takes.
void check_sequence(const std::vector<Program>& sequence);

}  // namespace ringcomm::verify_detail
