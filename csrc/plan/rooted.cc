// Direct collectives with a root. All data comes from or goes to the root, so nothing in it tells
// a rank that the others have begun: a roll call does (planners.h says why). Where data leaves the
// root, every rank calls the root before the root's last signal; where it comes in, the root calls
// every rank once it has heard all. If a message takes more segments than there are slots, the
// credits say as much.
#include <vector>

#include "plan/builder.h"
#include "plan/planners.h"

namespace ringcomm {
namespace {

constexpr uint64_t kSlots = 4;  // of a segment each, in the window of the rank that publishes

Passes passes_of(const Segments& segments) {
  const uint64_t count = segments.count();
  return {count, kSlots, segments.unit, {1, kSlots, minus(count, kSlots), minus(count, 1)}};
}

}  // namespace

// The root publishes, all load: the message crosses memory once.
Plan direct_broadcast(const Shape& shape, Rank rank) {
  PlanBuilder plan(shape, Algorithm::kDirect, rank);
  const Rank root = shape.root;
  const Segments segments{shape.bytes, shape.geometry.segment_bytes};
  const uint64_t count = segments.count();
  const bool line = count == 1 && shape.bytes <= shape.geometry.line_bytes;
  const bool roll_call = shape.meets && count <= kSlots;
  const bool others = shape.size > 2;  // a single receiver need not wait for the roll call
  const auto published = [&](uint64_t c) {
    return line && rank != root ? plan.line(rank, root)
                                : plan.window(root, c % kSlots * segments.unit);
  };
  const auto publish = [&](uint64_t c) {
    const uint64_t at = segments.offset(c), bytes = segments.length(c);
    if (c >= kSlots) plan.wait_all(kCredit);
    if (!line) plan.copy(published(c), plan.input(at), bytes);
    for (int i = 1; line && i < shape.size; ++i) {
      plan.copy(plan.line(plan.peer(i), root), plan.input(at), bytes);
    }
    if (roll_call && others && c + 1 == count) plan.wait_all(kCredit);
    plan.signal_all();
    plan.copy(plan.output(at), plan.input(at), bytes);
  };
  const auto load = [&](uint64_t c) {
    plan.wait(root);
    plan.copy(plan.output(segments.offset(c)), published(c), segments.length(c));
    if (c + kSlots < count) plan.signal(root, kCredit);
  };
  if (roll_call && rank != root) plan.signal(root, kCredit);
  plan.repeat(passes_of(segments), [&](uint64_t c) { rank == root ? publish(c) : load(c); });
  if (roll_call && !others && rank == root) plan.wait_all(kCredit);
  return plan.finish();
}

// All publish, the root reduces in rank order straight into its output.
Plan direct_reduce(const Shape& shape, Rank rank) {
  PlanBuilder plan(shape, Algorithm::kDirect, rank);
  const Rank root = shape.root;
  const Segments segments{shape.bytes, shape.geometry.segment_bytes};
  const uint64_t count = segments.count();
  const bool line = count == 1 && shape.bytes <= shape.geometry.line_bytes;
  const bool roll_call = shape.meets && count <= kSlots;
  const auto published = [&](Rank r, uint64_t c) {
    return line ? plan.line(root, r) : plan.window(r, c % kSlots * segments.unit);
  };
  const auto publish = [&](uint64_t c) {
    if (c >= kSlots) plan.wait(root, kCredit);
    plan.copy(published(rank, c), plan.input(segments.offset(c)), segments.length(c));
    plan.signal(root);
  };
  const auto reduce = [&](uint64_t c) {
    plan.wait_all();
    if (roll_call && c == 0) plan.signal_all(kCredit);
    const uint64_t at = segments.offset(c);
    std::vector<Ref> sources;
    for (Rank r = 0; r < shape.size; ++r) {
      sources.push_back(r == root ? plan.input(at) : published(r, c));
    }
    plan.reduce({plan.output(at)}, sources, segments.length(c), true);
    if (c + kSlots < count) plan.signal_all(kCredit);
  };
  plan.repeat(passes_of(segments), [&](uint64_t c) { rank == root ? reduce(c) : publish(c); });
  if (roll_call && rank != root) plan.wait(root, kCredit);
  return plan.finish();
}

}  // namespace ringcomm
