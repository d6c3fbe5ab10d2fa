// A rank of a large group stops in the middle of an all_reduce: when does each other one know?
#pragma once

#include "wide_world.h"

namespace ringcomm::testing {

struct WideDeath {
  int ranks = 0, local = 1;
  int know = 0;       // ranks whose group has failed, or fails with their next call
  int misled = 0;     // whose error names another one
  double first = 0;   // seconds after the death until somebody knows,
  double last = 0;    // and until all do
  uint64_t most = 0;  // frames of a rank from the death on
  uint64_t median = 0;

  std::string text() const {
    return str("{\"death\": true, \"ranks\": ", ranks, ", \"local\": ", local, ", \"know\": ", know,
               ", \"misled\": ", misled, ", \"first_seconds\": ", first,
               ", \"last_seconds\": ", last, ", \"frames_max\": ", most,
               ", \"frames_median\": ", median, "}");
  }
};

// Why its group has failed; of one that has nothing to do, why its next call will.
inline std::string what_knows(GroupState& state) {
  const auto first = state.transport().first_failed();
  return state.failed() || !first ? state.failure() : state.diagnosis().told_by(*first);
}

// `forwards`: ranks act on what others tell them. The peers of the rank that stopped are refused by
// its host for 0.7 s before they believe it, as in net/peer.cc, and look at their peers every 20
// ms.
inline WideDeath stop_one(const WideSetup& setup, bool forwards) {
  constexpr auto kRefused = std::chrono::milliseconds(700), kLook = std::chrono::milliseconds(20);
  const WideCall call(Collective::kAllReduce, 1024, setup);
  WideWorld world(setup, {call});
  Timeline& timeline = world.timeline();
  Random random(setup.seed);
  world.run(call);  // all are connected
  const Rank victim = static_cast<Rank>(random.below(at(setup.ranks)));
  std::vector<std::optional<Clock::time_point>> knows(at(setup.ranks));
  std::vector<uint64_t> before(at(setup.ranks)), after(at(setup.ranks));
  const auto frames = [&](std::vector<uint64_t>& counts) {
    for (Rank rank = 0; rank < setup.ranks; ++rank) {
      for (WidePair* pair : world.member(rank).pairs) {
        counts[at(rank)] += world.end(*pair, rank).session.posted();
      }
    }
  };
  int know = 0;
  world.after_drive = [&](Rank rank) {
    GroupState& state = world.member(rank).group->state();
    state.transport().pass_on();  // as the network's thread does when it hears of a failure
    const bool told = state.failed() || state.transport().first_failed();
    if (!told || knows[at(rank)]) return;
    knows[at(rank)] = timeline.now();
    ++know;
  };
  world.begin(call);
  const auto middle = timeline.now() + Fabric::seconds(2.5 * setup.costs.alpha);
  while (timeline.now() < middle && timeline.step()) {
  }
  const auto died = timeline.now();
  frames(before);
  world.stop(victim);
  world.deaf = !forwards;
  const auto soon = [&] {
    return std::chrono::nanoseconds(random.below(std::chrono::nanoseconds(kLook).count()));
  };
  for (Rank rank = 0; rank < setup.ranks; ++rank) {
    if (rank == victim || rank / setup.local != victim / setup.local) continue;
    timeline.after(soon(), [&world, rank, victim] {  // a Unix socket tells at once
      const PeerError error(victim,
                            str("Connection closed by rank ", victim, ": its process died"));
      world.member(rank).group->state().fail(std::make_exception_ptr(error));
      world.check_peers(rank);
    });
  }
  for (WidePair* pair : world.member(victim).pairs) {
    if (!pair->used()) continue;
    const Rank peer = pair->ranks[at(1 - WideWorld::side(*pair, victim))];
    timeline.after(kRefused, [&world, pair, peer] { world.end(*pair, peer).gone = true; });
    timeline.after(kRefused + soon(), [&world, peer] { world.check_peers(peer); });
  }
  const auto limit = died + std::chrono::seconds(3);
  while (know < setup.ranks - 1 && timeline.now() < limit && timeline.step()) {
  }
  frames(after);
  WideDeath death{.ranks = setup.ranks, .local = setup.local, .know = know, .first = 3};
  const std::string name = str("rank ", victim, ":");
  for (Rank rank = 0; rank < setup.ranks; ++rank) {
    after[at(rank)] -= before[at(rank)];
    if (!knows[at(rank)]) continue;
    const double seconds = std::chrono::duration<double>(*knows[at(rank)] - died).count();
    death.first = std::min(death.first, seconds);
    death.last = std::max(death.last, seconds);
    const std::string text = what_knows(world.member(rank).group->state());
    if (text.find(name) == std::string::npos) {
      ++death.misled;
      std::fprintf(stderr, "rank %d: %s\n", rank, text.c_str());
    }
  }
  std::ranges::sort(after);
  death.most = after.back();
  death.median = after[after.size() / 2];
  return death;
}

}  // namespace ringcomm::testing
