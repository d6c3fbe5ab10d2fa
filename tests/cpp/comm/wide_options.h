// The command line of the program `wide`.
#pragma once

#include <map>
#include <sstream>

#include "cpp/comm/wide_store.h"

namespace ringcomm::testing {

inline constexpr const char* kWideUsage =
    R"(wide: ranks as processes, without torch; prints one object of JSON

  --ranks N        4 unless told; --hosts A,B and --local L: L ranks in each of these network
                   namespaces; --tcp: on this host, as if each were on one of its own
  --timeout S      of the group (60); --deadline S of the whole program (120)
  --sizes B,C      bytes of messages (8,4096,262144); --calls N in each of three batches (3)
  --random N       so many random collectives more; --seed S draws them, and groups
  --only X,Y       these collectives, and `messages`; --no-checks: none

Then one of these, or none:
  --kill R         rank R is killed in a loop of all_reduces
  --mismatch R     R calls another collective; --missing R: R calls nothing; --absent R: R never
                   starts; --differ R: R believes that there is one rank more
  --groups S       for S seconds, each second a group of 16; then three groups a rank, as a mesh has
  --loop S         sums for S seconds, while connections are reset, say; prints `looping` at first
  --idle G         so many idle groups: what they wake

Bad input:
  --told N         all ranks tell that many ranks; --nofile N: so many descriptors
  --room MIB       so much address space beyond what a rank has
  --store-delay MS of each answer; --store-loss R: a request of rank R fails, once
)";

struct WideOptions {
  int ranks = 4, local = 0;
  std::vector<std::string> hosts;
  bool tcp = false, checks = true;
  double timeout = 60, deadline = 120;
  std::vector<uint64_t> sizes{8, 4096, 262144};
  std::vector<std::string> only;  // none: all
  int calls = 3;
  uint64_t random = 0, seed = 1;
  std::string scenario;  // without dashes
  int value = -1;        // its rank, seconds, or groups
  int told = 0;
  uint64_t nofile = 0, room_mib = 0;
  int store_delay_ms = 0;
  Rank store_loss = -1;

  bool checked(const std::string& name) const {
    return only.empty() || std::ranges::find(only, name) != only.end();
  }
  bool is(const std::string& name) const { return scenario == name; }
  bool chosen(const std::string& name, Rank rank) const { return is(name) && value == rank; }
};

inline std::vector<std::string> split(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ',');) parts.push_back(part);
  return parts;
}

inline WideOptions parse_wide(int argc, char** argv) {
  WideOptions options;
  const std::map<std::string, std::function<void(const std::string&)>> with_value{
      {"--ranks", [&](const auto& v) { options.ranks = std::stoi(v); }},
      {"--hosts", [&](const auto& v) { options.hosts = split(v); }},
      {"--local", [&](const auto& v) { options.local = std::stoi(v); }},
      {"--only", [&](const auto& v) { options.only = split(v); }},
      {"--timeout", [&](const auto& v) { options.timeout = std::stod(v); }},
      {"--deadline", [&](const auto& v) { options.deadline = std::stod(v); }},
      {"--calls", [&](const auto& v) { options.calls = std::stoi(v); }},
      {"--random", [&](const auto& v) { options.random = std::stoull(v); }},
      {"--seed", [&](const auto& v) { options.seed = std::stoull(v); }},
      {"--told", [&](const auto& v) { options.told = std::stoi(v); }},
      {"--nofile", [&](const auto& v) { options.nofile = std::stoull(v); }},
      {"--room", [&](const auto& v) { options.room_mib = std::stoull(v); }},
      {"--store-delay", [&](const auto& v) { options.store_delay_ms = std::stoi(v); }},
      {"--store-loss", [&](const auto& v) { options.store_loss = std::stoi(v); }},
      {"--sizes",
       [&](const auto& v) {
         options.sizes.clear();
         for (const auto& part : split(v)) options.sizes.push_back(std::stoull(part));
       }},
  };
  const std::vector<std::string> scenarios{"kill",   "mismatch", "missing", "absent",
                                           "differ", "groups",   "loop",    "idle"};
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "--tcp") {
      options.tcp = true;
    } else if (word == "--no-checks") {
      options.checks = false;
    } else {
      const std::string name = word.substr(std::min<size_t>(2, word.size()));
      const bool scenario = std::ranges::find(scenarios, name) != scenarios.end();
      require((scenario || with_value.contains(word)) && i + 1 < argc, "no option ", word);
      const std::string value = argv[++i];
      if (!scenario) {
        with_value.at(word)(value);
        continue;
      }
      options.scenario = name;
      options.value = std::stoi(value);
    }
  }
  if (!options.hosts.empty()) {
    require(options.local > 0, "--hosts goes with --local");
    options.ranks = static_cast<int>(options.hosts.size()) * options.local;
  }
  require(options.ranks >= 1 && options.ranks <= 4096, "--ranks takes 1 to 4096");
  return options;
}

}  // namespace ringcomm::testing
