// For plan_proofs.cc: plans of up to 4,096 ranks. Plans that are alike on all ranks are proved by
// one of them (verify_turned.h). The others have few steps, or are proved for few bytes.
#pragma once

#include <bit>
#include <chrono>
#include <cstdio>
#include <set>

#include "plan/cache.h"
#include "plan_cases.h"
#include "verify_turned.h"

namespace ringcomm::cases {

inline bool is_bruck(const Planner& planner) { return planner.algorithm == Algorithm::kBruck; }

// Slots of two elements each: as many as it takes for a Bruck plan to take one at a time.
inline Case wide_case(const Planner& planner, int size, uint64_t elements, int local = 0) {
  Case c{planner, size, elements, size / 3};
  c.local = local > 0 ? local : local_of(size);
  const auto half = static_cast<uint64_t>(std::max(size / 2, 1));
  c.slots = is_bruck(planner) ? std::bit_ceil(half) : 4;
  return c;
}

// Every planner whole, twice in a row.
inline void wide_groups(Group& group) {
  for (const Planner& planner : all_planners()) {
    for (const int size : {64, 256}) {
      if (size > 64 && !group.long_mode()) continue;
      const auto n = static_cast<uint64_t>(size);
      for (const uint64_t elements : {uint64_t{0}, uint64_t{5}, n, 3 * n + 1}) {
        if (planner.sharded() && elements >= n) continue;
        if (planner.collective == Collective::kAllToAll && elements >= n) continue;
        if (!group.takes(planner.name(), 2)) continue;
        const Case c = wide_case(planner, size, elements);
        const Program once = program(c);
        group.prove({once, once}, describe(c));
      }
    }
  }
}

// All ranks have a whole message, or few of them a shard: so the verifier's memory stays small.
inline void wide_shards(Group& group) {
  std::mt19937_64 random(8);
  for (const int size : {1024, 4096}) {
    if (size > 1024 && !group.long_mode()) continue;
    for (const Planner& planner : all_planners()) {
      const bool direct = planner.algorithm == Algorithm::kDirect && !planner.rooted();
      const bool talks_to_all = direct || planner.algorithm == Algorithm::kPairwise;
      const bool flat_ring = planner.algorithm == Algorithm::kRing && !planner.rooted();
      if (talks_to_all || flat_ring) continue;         // n^2 messages: see wide_and_alike
      if (size > 1024 && is_bruck(planner)) continue;  // large inboxes: see there, too
      if (size > 1024 && planner.algorithm == Algorithm::kDirect) continue;
      for (const int local : {8, 64}) {
        const bool hosts = planner.algorithm == Algorithm::kHierarchical;
        if (local != 8 && (!hosts || !group.long_mode())) continue;
        if (hosts && planner.collective == Collective::kReduceScatter) continue;  // of few hosts
        Case c = wide_case(planner, size, planner.sharded() ? 0 : 7, hosts ? local : 1);
        Shape shape = shape_of(c);
        if (planner.sharded()) {
          for (int i = 0; i < 9; ++i) shape.shards[random() % shape.shards.size()] = random() % 4;
        }
        const std::string violation =
            verify({program_of(shape, planner.algorithm, false)}, {.interleavings = 1});
        group.expect(violation.empty(), describe(c) + ": " + violation);
      }
    }
  }
}

inline Shape alike(const Planner& planner, int size, uint64_t shard) {
  Case c = wide_case(planner, size, shard);
  if (!planner.sharded()) c.elements *= static_cast<uint64_t>(size);
  Shape shape = shape_of(c);
  if (!is_bruck(planner)) return shape;
  shape.geometry.inbox_bytes *= 2;  // two elements at a time
  return shape;
}

inline std::vector<Planner> alike_planners() {
  std::vector<Planner> planners;
  for (const Planner& planner : all_planners()) {
    const bool ring = planner.algorithm == Algorithm::kRing && !planner.rooted();
    const bool flat = ring || is_bruck(planner);
    if (flat || planner.algorithm == Algorithm::kDissemination) planners.push_back(planner);
  }
  return planners;
}

// Three times in a row: short shards, and such as go round in passes.
inline void wide_and_alike(Group& group) {
  for (const Planner& planner : alike_planners()) {
    for (const int size : {2, 3, 7, 16, 63, 64, 255, 256, 1000, 1024, 4095, 4096}) {
      for (const uint64_t shard : {uint64_t{0}, uint64_t{1}, uint64_t{2}, uint64_t{9}}) {
        const bool large = size > 1024;
        if (!group.takes(planner.name() + (large ? ", large" : ""), 8)) continue;
        for (const bool in_place : {false, true}) {
          const Shape shape = alike(planner, size, shard);
          const std::string violation = verify_turned(
              {shape, shape, shape}, planner.algorithm,
              {.in_place = in_place, .alike = !in_place && (size <= 1024 || group.long_mode())});
          group.expect(violation.empty(), str(planner.name(), ", ", size, " ranks, ", shard,
                                              " elements each: ", violation));
        }
      }
    }
  }
}

// Signals that are dropped with the waits that they meet, in groups of 64 and more: some of them.
inline void wide_mutations(Group& group) {
  std::mt19937_64 random(9);
  for (const Planner& planner : all_planners()) {
    uint64_t caught = 0;
    const bool alone = planner.sharded() || planner.collective == Collective::kAllToAll;
    const Program once = program(wide_case(planner, 64, alone ? 3 : 192));
    const std::vector<Dropped> pairs = pairs_of(once, 3);
    for (int i = 0; i < (group.long_mode() ? 40 : 3); ++i) {
      const Dropped& pair = pairs[random() % pairs.size()];
      const bool barrier = planner.collective == Collective::kBarrier;
      group.expect(!verify({once, once, once},
                           {1, barrier, Dropped{pair.from, pair.to, pair.lane, pair.index, 7}})
                        .empty(),
                   str(planner.name(), ", 64 ranks: signal ", pair.index, " from ", pair.from,
                       " to ", pair.to, " on lane ", int{pair.lane}, " is not missed"));
      ++caught;
    }
    std::printf("   %-28s caught %4lu of 64 ranks\n", planner.name().c_str(), caught);
  }
  for (const Planner& planner : alike_planners()) {
    for (const int size : {256, 1024}) {
      const Shape shape = alike(planner, size, 8);  // no segment is empty
      std::map<std::pair<Rank, uint8_t>, uint64_t> sent;
      const Plan plan = make_plan(shape, 0, planner.algorithm);
      for (PlanCursor step(plan); step; step.next()) {
        if (step->verb == Verb::kSignal) ++sent[{step->peer, step->lane}];
      }
      for (const auto& [channel, count] : sent) {
        for (int i = 0; i < (group.long_mode() ? 8 : 1); ++i) {
          const TurnedOptions options{
              .dropped = {{channel.first, static_cast<Lane>(channel.second), random() % count, 7}},
              .alike = false};
          group.expect(!verify_turned({shape, shape, shape}, planner.algorithm, options).empty(),
                       str(planner.name(), ", ", size, " ranks: signal ", options.dropped->index,
                           " of ", count, " to the rank ", channel.first, " after on lane ",
                           int{channel.second}, " is not missed"));
        }
      }
    }
  }
}

// The ranks of other hosts that a rank exchanges signals with.
inline size_t peers_of(const Plan& plan, int local) {
  std::set<Rank> peers;
  for (const Step& step : plan.steps) {
    if (step.peer >= 0 && step.peer / local != plan.rank / local) peers.insert(step.peer);
  }
  return peers.size();
}

// The plans that the table chooses are short, soon made, and talk to few ranks of other hosts, and
// a pair that sharded training repeats stays in the cache.
inline void wide_sizes(Group& group) {
  const auto each_collective = [](auto act) {
    for (int c = 0; c < kCollectives; ++c) act(static_cast<Collective>(c));
  };
  for (const int size : {64, 256, 1024, 4096}) {
    for (const int local : {1, 8, 64}) {
      if (local == size) continue;
      each_collective([&](Collective collective) {
        const Planner planner{collective, Algorithm::kRing};
        const bool to_all = collective == Collective::kAllToAll ||
                            collective == Collective::kScatter || collective == Collective::kGather;
        size_t peers = 0, most = 0;
        double slowest = 0;
        std::string algorithms;
        for (const uint64_t bytes : {64u, 1u << 10, 64u << 10, 1u << 20, 64u << 20}) {
          const uint64_t n = static_cast<uint64_t>(size);
          const uint64_t shard = std::max<uint64_t>(bytes / n / 4, 1);
          Shape shape = shape_of(
              {planner, size, planner.sharded() || to_all ? shard : bytes / 4, 0, false, 4, local});
          shape.geometry = Geometry::across_hosts(size, 0, local);
          const Algorithm chosen = select(shape, false);
          if (algorithms.find(to_string(chosen)) == std::string::npos) {
            algorithms += str(algorithms.empty() ? "" : ", ", to_string(chosen));
          }
          for (const Rank rank : {0, size / 3, size - 1}) {
            const auto begin = std::chrono::steady_clock::now();
            const Plan plan = make_plan(shape, rank, chosen);
            const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
            slowest = std::max(slowest, taken.count());
            peers = std::max(peers, peers_of(plan, local));
            most = std::max(most, plan.memory_bytes());
            group.expect(make_plan(shape, rank, chosen) == plan, "a pure function");
          }
        }
        std::printf("   %4d ranks, %2d a host %-14s %8.1f KiB %4zu peers %8.0f us  %s\n", size,
                    local, to_string(collective), static_cast<double>(most) / 1024, peers,
                    slowest * 1e6, algorithms.c_str());
        const auto hosts = static_cast<size_t>(size / local);
        const size_t few = 2 * static_cast<size_t>(std::bit_width(static_cast<unsigned>(size))) + 2;
        group.expect(to_all || peers <= std::max(few, std::min<size_t>(hosts, kFewEnds)),
                     str(to_string(collective), " of ", size, " ranks, ", local, " a host, has ",
                         peers, " peers"));
        group.expect(
            most <= (to_all ? size_t{1024} * static_cast<size_t>(size) : size_t{256} << 10),
            str(to_string(collective), " of ", size, " ranks, ", local, " a host, takes ", most,
                " bytes"));
      });
    }
  }
}

}  // namespace ringcomm::cases
