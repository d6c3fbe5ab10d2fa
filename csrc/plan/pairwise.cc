// Plans in which every rank talks to every other, or to log2 n of them, as an equal.
#include <numeric>

#include "plan/builder.h"
#include "plan/planners.h"

namespace ringcomm {
namespace {

// The exchange of step i, to rank + i and from rank - i.
struct Exchange {
  Feed out;
  Feed in;
  bool mirrored;  // both are the same rank, whose messages say how much it has consumed
  uint64_t slots;

  // Message m is taken when m + lag has been sent: half the slots are under way. A mirrored peer's
  // message m was sent when it had taken all before my m - lag.
  uint64_t lag() const { return slots / 2 - 1; }

  // Single messages have gone out before.
  bool sends(uint64_t m) const { return out.messages > 1 && m < out.messages; }
  bool receives(uint64_t m) const { return m < in.messages; }
  uint64_t count() const { return std::max(out.messages, in.messages + lag()); }
  bool needs_credit(uint64_t m) const {
    return m >= slots && !(mirrored && m - slots / 2 < in.messages);
  }
  bool gives_credit(uint64_t m) const {
    return m + slots < in.messages && !(mirrored && m + slots / 2 < out.messages);
  }
  // The passes that differ from the one before: either side has its last messages, or credits begin
  // or end.
  std::vector<uint64_t> edges() const {
    const uint64_t o = out.messages, i = in.messages, half = slots / 2;
    return {lag(), slots, o, minus(o, half) + lag(), i + half, i + lag(), minus(i, slots) + lag()};
  }
};

}  // namespace

// Step i exchanges with rank + i and rank - i, so that all links carry equal load (pairwise
// exchange in Thakur, Rabenseifner, Gropp 2005). Single messages go out at once, so that small
// all_to_alls are one hop; of many ranks' only so many before the first answers are taken. Every
// ordered pair has a message, if an empty one: all must know that all have begun.
Plan pairwise_all_to_all(const Shape& shape, Rank rank) {
  PlanBuilder plan(shape, Algorithm::kPairwise, rank);
  const bool alike = shape.collective == Collective::kAllGather;  // all get the same of me
  const auto begins = [&](const std::vector<uint64_t>& parts, bool same) {
    std::vector<uint64_t> at(parts.size(), 0);
    if (!same) std::exclusive_scan(parts.begin(), parts.end(), at.begin(), uint64_t{0});
    return [at = std::move(at)](Rank r) { return at[static_cast<size_t>(r)]; };
  };
  const auto offset_to = begins(shape.send, alike), offset_from = begins(shape.recv, false);
  const uint64_t slot = shape.slot_bytes();
  const auto sent = [&](Rank r) { return Segments{shape.send[static_cast<size_t>(r)], slot}; };
  const auto received = [&](Rank r) { return Segments{shape.recv[static_cast<size_t>(r)], slot}; };
  const auto give = [&](const Feed& feed, uint64_t m) {
    const Segments segments = sent(feed.to);
    plan.put(feed, m, plan.input(offset_to(feed.to) + segments.offset(m)), segments.stretch(m));
  };
  const auto take = [&](const Feed& feed, uint64_t m) {
    const Segments segments = received(feed.from);
    const uint64_t at = offset_from(feed.from) + segments.offset(m);
    plan.wait(feed.from);
    plan.copy(plan.output(at), plan.slot(feed, m), segments.stretch(m));
  };

  const auto give_single = [&](int step) {
    const Feed feed = plan.feed(rank, plan.peer(step), sent(plan.peer(step)).total);
    if (step < shape.size && feed.messages == 1) give(feed, 0);
  };
  for (int i = 1; i < kFewEnds; ++i) give_single(i);
  plan.copy(plan.output(offset_from(rank)), plan.input(offset_to(rank)), sent(rank).total);
  for (int i = 1; i < shape.size; ++i) {
    give_single(i + kFewEnds - 1);
    const Rank to = plan.peer(i), from = plan.peer(-i);
    const Exchange pair{plan.feed(rank, to, sent(to).total),
                        plan.feed(from, rank, received(from).total), to == from, plan.slots()};
    const auto pass = [&](uint64_t m) {
      if (pair.sends(m)) {
        if (pair.needs_credit(m)) plan.wait(to, kCredit);
        give(pair.out, m);
      }
      const uint64_t taken = m - pair.lag();
      if (m >= pair.lag() && pair.receives(taken)) {
        take(pair.in, taken);
        if (pair.gives_credit(taken)) plan.signal(from, kCredit);
      }
    };
    plan.repeat({pair.count(), slot, pair.edges()}, pass);
  }
  return plan.finish();
}

Plan pairwise_all_gather(const Shape& shape, Rank rank) {
  Shape exchange = shape;
  exchange.send.assign(shape.shards.size(), shape.shard(rank));
  exchange.recv = shape.shards;
  return pairwise_all_to_all(exchange, rank);
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
