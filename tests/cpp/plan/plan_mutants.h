// For plan_proofs.cc: plans that are wrong in one thing, which the verifier must reject.
#pragma once

#include <cstdio>
#include <functional>
#include <utility>

#include "plan_cases.h"

namespace ringcomm::cases {

// Leaves out the credits of a plan without repetitions.
inline Program without_credits(Program program) {
  for (Plan& plan : program.plans) {
    std::erase_if(plan.steps, [](const Step& step) { return step.lane == kCredit; });
    plan.blocks = {{0, static_cast<uint32_t>(plan.steps.size()), 1}};
    plan.loops = {{0, 1, 1}};
  }
  return program;
}

using Edit = std::function<void(Plan&, Step&)>;

inline Program edited(Planner planner, uint64_t count, const Edit& edit) {
  Program wrong = program({planner, 3, count});
  for (Plan& plan : wrong.plans) {
    for (Step& step : plan.steps) edit(plan, step);
  }
  return wrong;
}

inline Ref& operand(Plan& plan, const Step& step, uint32_t index) {
  return plan.refs[step.first_ref + index];
}

// A slot at an offset that depends on the size: of 29 elements the last segment, of 5, would be
// published at 1 * 5 instead of 1 * 8, where others still read the segment before.
inline void offset_by_size(Plan& plan, Step& step) {
  if (step.bytes == 0) return;
  const uint32_t count = step.dst_count + uint32_t{step.src_count};
  bool last = false;
  for (uint32_t i = 0; i < count; ++i) {
    const Ref& ref = operand(plan, step, i);
    last = last || (ref.space != Space::kWindow && ref.offset >= 24);
  }
  for (uint32_t i = 0; last && i < count; ++i) {
    Ref& ref = operand(plan, step, i);
    if (ref.space == Space::kWindow && ref.offset >= 8 && ref.offset < 16) ref.offset -= 3;
  }
}

// A rank of a chain that forwards from its inbox, which it has given back already.
inline void forward_from_inbox(Plan& plan, Step& step) {
  if (step.verb != Verb::kCopy || plan.rank != 1 || operand(plan, step, 0).rank == 1) return;
  operand(plan, step, 1) = operand(plan, step, 0);
  operand(plan, step, 1).rank = 1;
  operand(plan, step, 1).from = 0;
}

// The verifier must object to plans that are wrong in one thing.
inline void wrong_plans(Group& group) {
  const Planner all_reduce{Collective::kAllReduce, Algorithm::kDirect};
  group.reject({edited(all_reduce, 29, offset_by_size)}, "offsets by size", "may still be");
  const Edit swap = [](Plan& plan, Step& step) {
    if (step.verb == Verb::kReduce) std::swap(operand(plan, step, 1), operand(plan, step, 2));
  };
  group.reject({edited(all_reduce, 5, swap)}, "another order", "rank order");
  const Edit never_final = [](Plan&, Step& step) { step.final = false; };
  group.reject({edited(all_reduce, 5, never_final)}, "no final reduction", "final 0");
  const Edit trespass = [](Plan& plan, Step& step) {
    if (step.verb == Verb::kCopy) operand(plan, step, 0).rank = plan.rank == 0 ? 1 : 0;
  };
  group.reject({edited(all_reduce, 5, trespass)}, "a second writer", "not its own");
  const Edit beyond = [](Plan& plan, Step& step) {
    if (step.verb == Verb::kCopy) operand(plan, step, 0).offset += 30;
  };
  group.reject({edited(all_reduce, 5, beyond)}, "an operand too far", "leaves its memory");
  const Edit surplus = [](Plan& plan, Step& step) {
    if (plan.rank == 0 && step.verb == Verb::kWait && step.peer == 2) step.peer = 1;
  };
  group.reject({edited(all_reduce, 5, surplus)}, "a signal too many", "left over");
  const Edit wait_first = [](Plan&, Step& step) {
    if (step.verb == Verb::kSignal || step.verb == Verb::kWait) {
      step.verb = step.verb == Verb::kWait ? Verb::kSignal : Verb::kWait;
    }
  };
  group.reject({edited(all_reduce, 5, wait_first)}, "all wait first", "deadlock");
  const Edit mine_first = [](Plan& plan, Step& step) {
    if (step.src_count == 2 && plan.rank == 1) {
      std::swap(operand(plan, step, step.dst_count), operand(plan, step, step.dst_count + 1u));
    }
  };
  const Planner doubling{Collective::kAllReduce, Algorithm::kDoubling};
  group.reject({edited(doubling, 5, mine_first)}, "mine first", "another order");
  Program sum_as_input = program({doubling, 4, 5, 0, true});
  for (Plan& plan : sum_as_input.plans) {
    for (const Step& step : plan.steps) {
      for (uint32_t i = step.dst_count; i < step.dst_count + uint32_t{step.src_count}; ++i) {
        Ref& source = operand(plan, step, i);
        if (source.space == Space::kOutput) source.space = Space::kInput;
      }
    }
  }
  group.reject({sum_as_input}, "a sum that is read as the input", "where it has written");
  const Planner chain{Collective::kBroadcast, Algorithm::kRing};
  group.reject({edited(chain, 20, forward_from_inbox)}, "an inbox given back", "overwrites");
  // A broadcast without its roll call: a rank may pass it, and then the next operation meets one
  // that is still in the operation before.
  const Planner direct{Collective::kBroadcast, Algorithm::kDirect};
  const Program around = program({all_reduce, 3, 5});
  const Program hasty = without_credits(program({direct, 3, 5}));
  const Edit from_a_peer = [](Plan& plan, Step& step) {
    if (step.verb == Verb::kCopy && plan.rank == 0) operand(plan, step, 1).rank = 1;
  };
  group.reject({edited(all_reduce, 20, from_a_peer)}, "a peer's tensor", "another rank's input");
  group.reject({hasty}, "no roll call", "has begun it");
  group.reject({around, hasty, around}, "no roll call", "may still be", false);
}

// Drops each signal with the wait that it meets: the rest must be wrong in some sequence, or
// the pair would be more than is needed.
struct Score {
  uint64_t caught = 0, survived = 0;
  std::string first_survivor;
};

inline void mutate(Group& group, const Case& c, Score& score) {
  const Program once = program(c);
  Case beside{{Collective::kAllReduce, Algorithm::kDirect}, c.size, 5};
  beside.slots = c.slots;
  const Program around = program(beside);
  const std::vector<std::vector<Program>> sequences = {{once, once, once}, {around, once, around}};
  const bool barrier = c.planner.collective == Collective::kBarrier;
  for (Dropped pair : pairs_of(once, 0)) {
    if (!group.takes(str(c.planner.name(), ", lane ", int{pair.lane}), 12)) continue;
    bool caught = false;
    for (size_t i = 0; i < sequences.size() && !caught; ++i) {
      pair.operations = i == 0 ? 7 : 2;
      caught = !verify(sequences[i], {1, barrier, pair}).empty();
    }
    ++(caught ? score.caught : score.survived);
    if (!caught && score.first_survivor.empty()) {
      score.first_survivor = str(describe(c), ": signal ", pair.index, " from ", pair.from, " to ",
                                 pair.to, " on lane ", int{pair.lane});
    }
  }
}

inline void readable_mutations(Group& group) {
  for (const Planner& planner : readable_planners()) {
    Score score;
    for (int size = 2; size <= (group.long_mode() ? 6 : 4); ++size) {
      for (const uint64_t shard : {4u, 10u, 18u}) {
        const uint64_t n = static_cast<uint64_t>(size);
        Case c{planner, size, planner.sharded() ? shard : shard * n,
               planner.rooted() ? size / 2 : 0};
        c.readable = true;
        mutate(group, c, score);
      }
    }
    for (uint64_t i = 0; i < score.caught; ++i) group.expect(true, "");
    group.expect(score.caught > 0 && score.survived == 0, planner.name() + score.first_survivor);
  }
}

inline void mutations(Group& group) {
  std::string survivors;
  for (const Planner& planner : all_planners()) {
    Score score;
    for (int size = 2; size <= (group.long_mode() ? 8 : 6); ++size) {
      const uint64_t n = static_cast<uint64_t>(size), segment = tiny(size).segment_bytes;
      for (const uint64_t shard : {1u, 2u, 3u, 4u, 5u, 7u, 10u, 12u, 18u}) {
        const Rank root = planner.rooted() ? size / 2 : 0;
        for (const uint64_t slots : {2u, 4u, 8u}) {
          // Where a rank has no elements in the last segment or pass, its signal announces nothing:
          // with fewer elements than ranks, with cuts at cache lines, which are less even, or with
          // half a pass of several segments.
          const uint64_t count = (planner.sharded() ? shard : shard * n) * slots / 2;
          const uint64_t rest = count % segment;
          if (rest > 0 && rest < n && !planner.sharded()) continue;
          if (planner.algorithm == Algorithm::kHierarchical && count >= 128) continue;
          if (slots > 2 && shard % 2 != 0 && shard > 2) continue;
          if (slots > 2 && (group.long_mode() ? size + shard > 10 : size + shard != 8)) continue;
          mutate(group, {planner, size, count, root, false, 1, 0, slots}, score);
        }
      }
    }
    std::printf("   %-28s caught %6lu, survived %lu %s\n", planner.name().c_str(), score.caught,
                score.survived, score.first_survivor.c_str());
    for (uint64_t i = 0; i < score.caught + score.survived; ++i) group.expect(true, "");
    if (score.survived > 0) survivors += "\n" + score.first_survivor;
  }
  if (!survivors.empty()) throw Failure("dropped pairs survived:" + survivors);
}

}  // namespace ringcomm::cases
