// Plans in which every rank talks to every other, or to log2 n of them, as an equal.
#include <algorithm>
#include <numeric>
#include <vector>

#include "plan/builder.h"
#include "plan/planners.h"

namespace ringcomm {
namespace {

// The exchange of step i, to rank + i and from rank - i.
struct Exchange {
  Link out;
  Link in;
  bool mirrored;  // both are the same rank: its next message says it has consumed my last

  // Single messages have gone out before.
  bool sends(uint64_t m) const { return out.messages > 1 && m < out.messages; }
  bool receives(uint64_t m) const { return m < in.messages; }
  uint64_t count() const { return std::max(out.messages, in.messages); }
  bool needs_credit(uint64_t m) const {
    return m >= kInboxSlots && !(mirrored && m - 1 < in.messages);
  }
  bool gives_credit(uint64_t m) const {
    return m + kInboxSlots < in.messages && !(mirrored && m + 1 < out.messages);
  }
};

uint64_t offset_of(const std::vector<uint64_t>& parts, Rank r) {
  return std::accumulate(parts.begin(), parts.begin() + r, uint64_t{0});
}

}  // namespace

// Step i exchanges with rank + i and rank - i, so that all links carry equal load (pairwise
// exchange in Thakur, Rabenseifner, Gropp 2005). Single messages go out at once, so that small
// all_to_alls are one hop. Every ordered pair has a message, if an empty one: all must know that
// all have begun.
Plan pairwise_all_to_all(const Shape& shape, Rank rank) {
  PlanBuilder plan(shape, Algorithm::kPairwise, rank);
  const uint64_t slot = shape.slot_bytes();
  const auto sent = [&](Rank r) { return Segments{shape.send[static_cast<size_t>(r)], slot}; };
  const auto received = [&](Rank r) { return Segments{shape.recv[static_cast<size_t>(r)], slot}; };
  const auto give = [&](const Link& link, uint64_t m) {
    const Segments segments = sent(link.to);
    plan.put(link, m, plan.input(offset_of(shape.send, link.to) + segments.offset(m)),
             segments.length(m));
  };
  const auto take = [&](const Link& link, uint64_t m) {
    const Segments segments = received(link.from);
    const uint64_t at = offset_of(shape.recv, link.from) + segments.offset(m);
    plan.wait(link.from);
    plan.copy(plan.output(at), plan.slot(link, m), segments.length(m));
  };

  for (int i = 1; i < shape.size; ++i) {
    const Link link = plan.link(rank, plan.peer(i), sent(plan.peer(i)).total);
    if (link.messages == 1) give(link, 0);
  }
  plan.copy(plan.output(offset_of(shape.recv, rank)), plan.input(offset_of(shape.send, rank)),
            sent(rank).total);
  for (int i = 1; i < shape.size; ++i) {
    const Rank to = plan.peer(i), from = plan.peer(-i);
    const Exchange pair{plan.link(rank, to, sent(to).total),
                        plan.link(from, rank, received(from).total), to == from};
    const uint64_t out = pair.out.messages, in = pair.in.messages;
    plan.repeat({pair.count(),
                 kInboxSlots,
                 slot,
                 {1, 2, sent(to).full(), out, minus(out, 1), received(from).full(), in,
                  minus(in, 2), in + 1}},
                [&](uint64_t m) {
                  if (pair.sends(m)) {
                    if (pair.needs_credit(m)) plan.wait(to, kCredit);
                    give(pair.out, m);
                  }
                  if (pair.receives(m)) {
                    take(pair.in, m);
                    if (pair.gives_credit(m)) plan.signal(from, kCredit);
                  }
                });
  }
  return plan.finish();
}

// Round k: tell rank + 2^k, hear from rank - 2^k (Hensgen, Finkel, Manber, "Two algorithms for
// barrier synchronization", 1988). Then everybody has heard of everybody in log2 n rounds.
Plan dissemination_barrier(const Shape& shape, Rank rank) {
  PlanBuilder plan(shape, Algorithm::kDissemination, rank);
  for (int distance = 1; distance < shape.size; distance *= 2) {
    plan.signal(plan.peer(distance));
    plan.wait(plan.peer(-distance));
  }
  return plan.finish();
}

}  // namespace ringcomm
