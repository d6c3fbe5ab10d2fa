// The command line of a simulator: its checks, `--seeds FIRST COUNT`, or `--without RULE COUNT`.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "harness.h"

namespace ringcomm::testing {

// `simulate(seed, rules, totals)` throws what it finds. `without` switches a rule off and tells
// whether some seed finds that: of `COUNT`, after the one that may be named.
template <typename Rules, typename Totals>
int run_simulator(int argc, char** argv, const std::vector<Check>& checks,
                  void (*simulate)(uint64_t, const Rules&, Totals&),
                  void (*print)(uint64_t, const Totals&),
                  int (*without)(const std::string&, uint64_t, uint64_t)) {
  const std::string first = argc > 1 ? argv[1] : "";
  if (first == "--without" && argc >= 4) {
    return without(argv[2], std::stoull(argv[3]), argc > 4 ? std::stoull(argv[4]) : 0);
  }
  if (first != "--seeds" || argc != 4) return run_checks(checks, argc, argv);
  Totals totals;
  const uint64_t begin = std::stoull(argv[2]), count = std::stoull(argv[3]);
  try {
    for (uint64_t seed = begin; seed < begin + count; ++seed) simulate(seed, {}, totals);
  } catch (const std::exception& error) {
    std::printf("FAILED %s\n", error.what());
    return 1;
  }
  print(count, totals);
  return 0;
}

}  // namespace ringcomm::testing
