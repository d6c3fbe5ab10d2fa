// Algorithms that the program has registered by name (ringcomm/algorithms/registry.py), in addition
// to those of the library. make_plan asks for their scripts.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "plan/script.h"

namespace ringcomm {

// Called on the thread that makes the plan. Throws UsageError.
using Author = std::function<Script(const Shape&, Rank)>;

// They have numbers from here on, by their names: the same on every rank.
inline constexpr int kFirstRegistered = 16;
static_assert(kNamed <= kFirstRegistered);
inline bool is_registered(Algorithm algorithm) {
  return static_cast<int>(algorithm) >= kFirstRegistered;
}

// Registers an algorithm. Throws UsageError where the name is taken.
Algorithm register_algorithm(const std::string& name, std::vector<Collective> collectives,
                             Author author);
bool serves(Algorithm registered, Collective collective);
// Returns the name, or "unknown" where only a peer may have registered the algorithm.
const char* registered_name(Algorithm algorithm);
std::optional<Algorithm> registered_called(const std::string& name);
Plan registered_plan(const Shape& shape, Rank rank, Algorithm algorithm);

}  // namespace ringcomm
