#include "verify/proof.h"

#include <map>

#include "plan/cursor.h"
#include "plan/select.h"

namespace ringcomm {
namespace {

constexpr auto kNone = Algorithm::kTree;  // a name for plans that have none here

// The operation beside the script's: short, of the same ranks and memory.
Program neighbour(const Shape& shape, Collective collective, Algorithm algorithm) {
  Shape other = shape;
  other.collective = collective;
  other.root = shape.size - 1;
  if (!rooted(collective)) other.root = 0;
  const std::vector<uint64_t> shards(static_cast<size_t>(shape.size), 3 * shape.element);
  other.bytes = 0;
  other.shards = other.send = other.recv = {};
  if (sharded(collective))
    other.shards = shards;
  else if (collective == Collective::kAllToAll)
    other.send = other.recv = shards;
  else if (collective != Collective::kBarrier)
    other.bytes = offset_of(shards, shape.size);
  return program_of(other, algorithm, false);
}

bool has_in_place(Collective collective) {
  return collective != Collective::kAllToAll && collective != Collective::kBarrier;
}

// Those that a group of so many ranks may run. Hierarchies need hosts.
bool runs(const Shape& shape, Algorithm algorithm) {
  return algorithm != Algorithm::kHierarchical || (shape.local > 1 && shape.size > shape.local);
}

}  // namespace

Scripted scripted(const Shape& shape, const std::vector<Script>& scripts, bool in_place) {
  RINGCOMM_CHECK(scripts.size() == static_cast<size_t>(shape.size), scripts.size(), " scripts for ",
                 shape.size, " ranks");
  Scripted made;
  made.program.shapes.assign(scripts.size(), shape);
  made.program.in_place = in_place;
  for (Rank rank = 0; rank < shape.size; ++rank) {
    const auto& script = scripts[static_cast<size_t>(rank)];
    made.program.plans.push_back(
        scripted_plan(shape, rank, kNone, script, &made.origins.emplace_back()));
  }
  return made;
}

Verdict prove(const Shape& shape, const std::vector<Script>& scripts) {
  const Program once = scripted(shape, scripts, false).program;
  Verdict verdict;
  const auto holds = [&](const std::vector<Program>& sequence, const std::string& when, size_t own,
                         size_t count) {
    if (verify(sequence, {.interleavings = 1}).empty()) return true;
    verdict = {find(sequence), when, own, count};
    return false;
  };
  if (!holds({once}, "alone", 0, 1)) return verdict;
  if (has_in_place(shape.collective)) {
    Program in_place = once;
    in_place.in_place = true;
    if (!holds({in_place}, "in place", 0, 1)) return verdict;
  }
  if (!holds({once, once, once}, "after itself", 0, 3)) return verdict;
  for (int c = 0; c < kCollectives; ++c) {
    const auto collective = static_cast<Collective>(c);
    for (const Algorithm algorithm : algorithms_of(collective)) {
      if (!runs(shape, algorithm)) continue;
      const Program other = neighbour(shape, collective, algorithm);
      const std::string when =
          str("between two ", to_string(collective), " ", to_string(algorithm));
      if (!holds({other, once, other}, when, 1, 1)) return verdict;
    }
  }
  return verdict;
}

Mutants mutants(const Shape& shape, const std::vector<Script>& scripts) {
  const Program once = scripted(shape, scripts, false).program;
  const Program around = neighbour(shape, Collective::kAllReduce, Algorithm::kDirect);
  const std::vector<std::vector<Program>> sequences = {{once, once, once}, {around, once, around}};
  Mutants result;
  for (const Plan& plan : once.plans) {
    std::map<std::pair<Rank, Lane>, uint64_t> sent;
    for (PlanCursor step(plan); step; step.next()) {
      if (step->verb != Verb::kSignal) continue;
      const auto lane = static_cast<Lane>(step->lane);
      const uint64_t index = sent[{step->peer, lane}]++;
      ++result.dropped;
      const auto survives = [&](size_t i) {
        const uint64_t operations = i == 0 ? 7 : 2;
        const Dropped pair{plan.rank, step->peer, lane, index, operations};
        return verify(sequences[i], {1, true, pair}).empty();
      };
      if (!survives(0) || !survives(1)) continue;
      const auto number = static_cast<uint32_t>(&*step - plan.steps.data());
      result.spare.push_back({plan.rank, step->peer, lane, index, number});
    }
  }
  return result;
}

}  // namespace ringcomm
