// Large groups by simulation: collectives of up to 4,096 ranks over sessions in virtual time, as
// they are shipped but for sockets and threads. Every result is compared with its definition.
//
//   wide_sim [filter]                        the checks
//   wide_sim --call COLLECTIVE BYTES RANKS LOCAL [ALGORITHM]   one collective, as a line of JSON
//   wide_sim --long                          a table of them, from 2 ranks to 4,096
//   wide_sim --cuts RANKS SEED COUNT         connections are cut all the time
//   wide_sim --death RANKS LOCAL SEED        a rank stops; --deaf: ranks tell nobody what they hear
#include <cstdio>

#include "wide_death.h"
#include "wide_world.h"

namespace ringcomm::testing {
namespace {

using enum Collective;

constexpr std::array kCalls = {kAllReduce, kReduceScatter, kAllGather, kBroadcast, kBarrier};

Collective collective_called(const std::string& name) {
  for (const Collective call : kCalls) {
    if (name == to_string(call)) return call;
  }
  throw Failure(str("no collective '", name, "' here"));
}

// Figures of all ranks, for a text with the largest and the median.
struct Uses {
  std::vector<uint64_t> values;
  std::string text(const char* name) {
    std::ranges::sort(values);
    return str(", \"", name, "_max\": ", values.back(), ", \"", name,
               "_median\": ", values[values.size() / 2]);
  }
};

struct Counts {
  uint64_t frames = 0, sent = 0;
};

Counts counts_of(WideWorld& world, Rank rank) {
  Counts counts;
  for (WidePair* pair : world.member(rank).pairs) {
    counts.frames += world.end(*pair, rank).session.posted();
    counts.sent += pair->sent[at(WideWorld::side(*pair, rank))];
  }
  return counts;
}

// The call twice: at first it has to connect. Of long calls of many ranks there is but one, between
// connected ranks, for the memory's sake.
std::string measure(const WideSetup& setup, Collective collective, uint64_t bytes) {
  const WideCall call(collective, bytes, setup);
  WideWorld world(setup, {call});
  const bool once = call.bytes() * static_cast<uint64_t>(setup.ranks) > (64 << 20);
  std::string first = "null";
  if (once) {
    world.connect_all();
  } else {
    first = str(world.run(call));
  }
  std::vector<Counts> before;
  for (Rank rank = 0; rank < setup.ranks; ++rank) before.push_back(counts_of(world, rank));
  const double seconds = world.run(call);
  Uses sessions, connections, memory, frames, sent;
  for (Rank rank = 0; rank < setup.ranks; ++rank) {
    uint64_t used = 0, up = 0;
    for (WidePair* pair : world.member(rank).pairs) {
      used += pair->used() ? 1 : 0;
      up += pair->used() && pair->up() ? 1 : 0;
    }
    const Counts now = counts_of(world, rank);
    sessions.values.push_back(used);
    connections.values.push_back(up);
    memory.values.push_back(world.memory(rank));
    frames.values.push_back(now.frames - before[at(rank)].frames);
    sent.values.push_back(now.sent - before[at(rank)].sent);
  }
  return str("{\"collective\": \"", to_string(collective), "\", \"algorithm\": \"",
             to_string(world.algorithm(call)), "\", \"bytes\": ", call.bytes(),
             ", \"ranks\": ", setup.ranks, ", \"local\": ", setup.local,
             ", \"alpha\": ", setup.costs.alpha, ", \"beta\": ", setup.costs.beta,
             ", \"seconds\": ", seconds, ", \"first_seconds\": ", first, sessions.text("sessions"),
             connections.text("connections"), memory.text("memory"), frames.text("frames"),
             sent.text("sent"), "}");
}

// Where plans talk to too many ranks for this simulation, the line says so.
void print_measured(const WideSetup& setup, Collective collective, uint64_t bytes) {
  std::string line;
  try {
    line = measure(setup, collective, bytes);
  } catch (const TooManyPeers& error) {
    line = str("{\"collective\": \"", to_string(collective), "\", \"bytes\": ", bytes,
               ", \"ranks\": ", setup.ranks, ", \"local\": ", setup.local,
               ", \"seconds\": null, \"peers\": ", error.peers, "}");
  }
  std::printf("%s\n", line.c_str());
  std::fflush(stdout);
}

// Random calls one after the other, while connections are cut. The same is computed as without.
uint64_t simulate_cuts(int ranks, uint64_t seed) {
  WideSetup setup{.ranks = ranks, .seed = seed, .skew = std::chrono::microseconds(200)};
  Random random(seed);
  std::vector<WideCall> calls;
  for (int i = 0; i < 6; ++i) {
    calls.emplace_back(kCalls[random.below(kCalls.size())], 1 + random.below(60'000), setup);
  }
  WideWorld world(setup, calls);
  world.cut_every(std::chrono::nanoseconds(500 + random.below(20'000)));
  for (const WideCall& call : calls) world.run(call);
  uint64_t cuts = 0;
  for (const auto& pair : world.pairs()) cuts += pair->cuts;
  return cuts;
}

uint64_t run_cuts(int ranks, uint64_t first, uint64_t count) {
  uint64_t cuts = 0;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    try {
      cuts += simulate_cuts(ranks, seed);
    } catch (const std::exception& error) {
      throw Failure(
          str("seed ", seed, ": ", error.what(), " (wide_sim --cuts ", ranks, " ", seed, " 1)"));
    }
  }
  return cuts;
}

std::vector<Check> all_checks() {
  return {{"collectives",
           [] {
             for (const int local : {1, 8}) {
               for (const Collective call : kCalls) {
                 print_measured({.ranks = 64, .local = local}, call, 1024);
               }
             }
             print_measured({.ranks = 256}, kAllReduce, 64 << 10);
           }},
          {"cuts",
           [] {
             const uint64_t cuts = run_cuts(32, 0, 6);
             require(cuts > 100, "too few cuts to prove anything: ", cuts);
           }},
          {"death", [] {
             const WideDeath heard = stop_one({.ranks = 256}, true);
             std::printf("%s\n", heard.text().c_str());
             require(heard.know == 255, "a rank stopped, and ", heard.know, " of 255 know");
             require(heard.last < 1, "the last rank knows after ", heard.last, " s");
             const WideDeath deaf = stop_one({.ranks = 256}, false);
             require(deaf.know < 255, "all know of a death though nobody passes it on");
           }}};
}

int run(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  const std::string first = words.empty() ? "" : words[0];
  if (first == "--call" && words.size() >= 5) {
    WideSetup setup{.ranks = std::stoi(words[3]), .local = std::stoi(words[4])};
    if (words.size() > 5) setup.algorithm = algorithm_called(words[5]);
    print_measured(setup, collective_called(words[1]), std::stoull(words[2]));
    return 0;
  }
  if (first == "--long") {
    for (const int ranks : {2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096}) {
      for (const int local : {1, 8}) {
        if (ranks <= local) continue;
        for (const Collective call : kCalls) {
          for (const uint64_t bytes : {8, 1 << 10, 64 << 10}) {
            if (call != kBarrier || bytes == 8)
              print_measured({.ranks = ranks, .local = local}, call, bytes);
          }
        }
      }
    }
    return 0;
  }
  if (first == "--cuts" && words.size() == 4) {
    const uint64_t seeds = std::stoull(words[3]);
    const uint64_t cuts = run_cuts(std::stoi(words[1]), std::stoull(words[2]), seeds);
    std::printf("{\"ranks\": %s, \"seeds\": %lu, \"cuts\": %lu}\n", words[1].c_str(), seeds, cuts);
    return 0;
  }
  if (first == "--death" && words.size() >= 4) {
    const bool deaf = words.size() > 4 && words[4] == "--deaf";
    const WideSetup setup{
        .ranks = std::stoi(words[1]), .local = std::stoi(words[2]), .seed = std::stoull(words[3])};
    std::printf("%s\n", stop_one(setup, !deaf).text().c_str());
    return 0;
  }
  return run_checks(all_checks(), argc, argv);
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  try {
    return ringcomm::testing::run(argc, argv);
  } catch (const std::exception& error) {
    std::printf("FAILED %s\n", error.what());
    return 1;
  }
}
