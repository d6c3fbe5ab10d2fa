// How many ranks meet: their questions to the store, in virtual time.
//
//   meeting_sim [filter]                       the checks
//   meeting_sim --meet RANKS LOCAL [SPREAD_MS LATENCY_US SERVICE_US]   a line of JSON
//   meeting_sim --absent RANKS LOCAL           the last rank never comes
//   meeting_sim --long                         a table of them, from 2 ranks to 4,096
#include "meeting_sim.h"

#include <cstdio>

namespace ringcomm::testing {
namespace {

double in_seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

struct Met {
  MeetingSetup setup;
  double seconds = 0;         // from the coming of the last one to the end of the last one
  int failed = 0, named = 0;  // ranks that failed, and that named the absent one
  uint64_t requests = 0, bytes = 0, most_requests = 0, most_bytes = 0;  // of all, of a rank
  uint64_t usual_requests = 0, usual_bytes = 0;                         // of the median rank
  std::string failure;                                                  // of one

  std::string text() const {
    return str(std::boolalpha, "{\"meeting\": true, \"ranks\": ", setup.ranks,
               ", \"local\": ", setup.local, ", \"spread\": ", in_seconds(setup.spread),
               ", \"latency\": ", in_seconds(setup.latency),
               ", \"service\": ", in_seconds(setup.service), ", \"set_waits\": ", setup.set_waits,
               ", \"absent\": ", setup.absent, ", \"seconds\": ", seconds, ", \"failed\": ", failed,
               ", \"named\": ", named, ", \"requests\": ", requests,
               ", \"requests_max\": ", most_requests, ", \"requests_median\": ", usual_requests,
               ", \"bytes\": ", bytes, ", \"bytes_max\": ", most_bytes,
               ", \"bytes_median\": ", usual_bytes, "}");
  }
};

Met meet_all(const MeetingSetup& setup) {
  Fibers fibers;
  VirtualServer server(fibers, setup);
  Random random(setup.seed);
  std::vector<std::unique_ptr<VirtualRank>> ranks;
  const auto began = fibers.now();
  auto last = began;
  for (Rank rank = 0; rank < setup.ranks; ++rank) {
    ranks.push_back(std::make_unique<VirtualRank>(server, rank, setup));
    const auto span = static_cast<uint64_t>(setup.spread.count());
    const auto comes = began + std::chrono::nanoseconds(random.below(span + 1));
    if (rank == setup.absent) continue;
    last = std::max(last, comes);
    fibers.start(comes, [&self = *ranks.back()] { self.meet(); });
  }
  fibers.run();
  Met met;
  met.setup = setup;
  std::vector<uint64_t> requests, bytes;
  auto ended = last;
  const std::string name = str("rank ", setup.absent, " ");
  for (const auto& rank : ranks) {
    ended = std::max(ended, rank->ended);
    requests.push_back(rank->store.requests);
    bytes.push_back(rank->store.bytes);
    met.requests += requests.back();
    met.bytes += bytes.back();
    if (rank->failure.empty()) continue;
    ++met.failed;
    met.failure = rank->failure;
    met.named += rank->failure.find(name) != std::string::npos ? 1 : 0;
  }
  std::ranges::sort(requests);
  std::ranges::sort(bytes);
  met.seconds = in_seconds(ended - last);
  met.most_requests = requests.back();
  met.most_bytes = bytes.back();
  met.usual_requests = requests[requests.size() / 2];
  met.usual_bytes = bytes[bytes.size() / 2];
  return met;
}

void require_met(const MeetingSetup& setup) {
  const Met met = meet_all(setup);
  std::printf("%s\n", met.text().c_str());
  require(met.failed == 0, met.failed, " ranks did not meet: ", met.failure);
}

void require_named(const MeetingSetup& setup) {
  const Met met = meet_all(setup);
  std::printf("%s\n", met.text().c_str());
  require(met.failed == setup.ranks - 1, met.failed, " ranks of ", setup.ranks, " failed");
  require(met.named == met.failed, met.named, " ranks of ", met.failed,
          " named the absent one: ", met.failure);
  const double limit = in_seconds(setup.timeout);
  require(met.seconds < 1.5 * limit, "the last one knew after ", met.seconds, " s of ", limit);
  // In the long run a rank looks twice a second, with a few questions, and then who is absent.
  const double most = 40 + 8 * limit + 2 * setup.ranks;
  require(static_cast<double>(met.most_requests) < most, met.most_requests, " questions of a rank");
}

// Lives of one store, at random. In the first ones all ranks that come are killed, at any moment.
// In the last one some are killed, too, before the last rank comes, and others come in their place.
// All ranks that live in the end meet, and no others.
void restarted(uint64_t seed) {
  Random random(seed);
  MeetingSetup setup{.ranks = 2 + static_cast<int>(random.below(6)), .local = 2};
  Fibers fibers;
  VirtualServer server(fibers, setup);
  std::vector<std::unique_ptr<VirtualRank>> all;
  const auto at = [began = fibers.now()](uint64_t ms) {
    return began + std::chrono::milliseconds(ms);
  };
  const auto come = [&](Rank rank, uint64_t when, uint64_t killed) {
    VirtualRank& self = *all.emplace_back(std::make_unique<VirtualRank>(server, rank, setup));
    self.nonce = all.size();
    if (killed > 0) self.store.killed = at(killed);
    fibers.start(at(when), [&self] { self.meet(); });
    return &self;
  };
  uint64_t time = 0;
  for (uint64_t life = random.below(3); life > 0; --life) {
    for (Rank rank = 0; rank < setup.ranks; ++rank) {
      const uint64_t when = time + random.below(2000);
      if (random.below(4) > 0) come(rank, when, when + 1 + random.below(time + 2000 - when));
    }
    time += 2000;
  }
  std::vector<VirtualRank*> alive;
  const auto last = static_cast<Rank>(random.below(static_cast<uint64_t>(setup.ranks)));
  for (Rank rank = 0; rank < setup.ranks; ++rank) {
    const uint64_t when = time + (rank == last ? 4000 : random.below(3000));
    if (rank != last && random.below(3) == 0) {
      const uint64_t before = time + random.below(when - time + 1);
      come(rank, before, std::max(before + random.below(when - before + 1), before + 1));
    }
    alive.push_back(come(rank, when, 0));
  }
  fibers.run();
  for (const VirtualRank* const rank : alive) {
    require(rank->failure.empty(), "seed ", seed, ": ", rank->failure);
    require(rank->heard == alive[0]->heard, "seed ", seed, ": two rosters");
    const double seconds = in_seconds(rank->ended - at(time + 4000));
    require(seconds < 3, "seed ", seed, ": they met ", seconds, " s after the last one came");
  }
}

// One name, and two lists of members that overlap: each rank hears who makes what.
void differing(const std::vector<std::vector<int>>& lists, const std::vector<int>& fail) {
  MeetingSetup base{.ranks = 2, .local = 1, .timeout = std::chrono::seconds(20)};
  Fibers fibers;
  VirtualServer server(fibers, base);
  std::vector<MeetingSetup> setups;
  for (const auto& list : lists) {
    setups.push_back(base);
    setups.back().ranks = static_cast<int>(list.size());
    setups.back().members = list;
  }
  std::vector<std::pair<int, std::unique_ptr<VirtualRank>>> ranks;
  for (size_t i = 0; i < lists.size(); ++i) {
    for (Rank rank = 0; rank < setups[i].ranks; ++rank) {
      ranks.emplace_back(i, std::make_unique<VirtualRank>(server, rank, setups[i]));
      fibers.start(fibers.now() + std::chrono::milliseconds(30 * (ranks.size() % 3)),
                   [&self = *ranks.back().second] { self.meet(); });
      if (std::ranges::count(fail, static_cast<int>(i)) > 0) break;  // the other rank is elsewhere
    }
  }
  fibers.run();
  for (const auto& [list, rank] : ranks) {
    const bool fails = std::ranges::count(fail, list) > 0;
    require(rank->failure.empty() != fails, "list ", list, ": ", rank->failure);
    if (!fails) continue;
    require(rank->failure.find("[0, 1]") != std::string::npos &&
                rank->failure.find("[0, 2]") != std::string::npos,
            rank->failure);
  }
}

// After a meeting that failed ranks come again, and one of them late: the others say why they wait.
void failed_before() {
  const MeetingSetup setup{.ranks = 2, .local = 2};
  MeetingSetup hasty = setup;
  hasty.timeout = std::chrono::seconds(3);
  Fibers fibers;
  VirtualServer server(fibers, setup);
  VirtualRank first(server, 0, hasty), again(server, 0, setup), late(server, 1, setup);
  again.nonce = 1;
  const auto at = [began = fibers.now()](int s) { return began + std::chrono::seconds(s); };
  fibers.start(at(0), [&] { first.meet(); });
  fibers.start(at(10), [&] { again.meet(); });
  fibers.start(at(20), [&] { late.meet(); });
  fibers.run();
  require(again.failure.empty() && late.failure.empty(), again.failure, late.failure);
  require(again.warning.find("the ranks have not met yet. Before, they failed with: " +
                             first.failure) == 0,
          again.warning);
  require(late.warning.empty(), late.warning);
}

// Two processes are rank 1 and nobody is rank 2: all hear it, long before the time is up.
void twice() {
  MeetingSetup setup{.ranks = 3, .local = 3};
  Fibers fibers;
  VirtualServer server(fibers, setup);
  std::vector<std::unique_ptr<VirtualRank>> ranks;
  const auto began = fibers.now();
  for (const Rank rank : {0, 1, 1}) {
    ranks.push_back(std::make_unique<VirtualRank>(server, rank, setup));
    ranks.back()->nonce = ranks.size();
    fibers.start(began + std::chrono::milliseconds(20 * ranks.size()),
                 [&self = *ranks.back()] { self.meet(); });
  }
  fibers.run();
  for (const auto& rank : ranks) {
    require(rank->failure.find("two processes are rank 1 of 3: process") == 0, rank->failure);
    require(rank->ended - began < std::chrono::seconds(4), "late");
  }
}

constexpr auto kSpread = std::chrono::seconds(2);
constexpr auto kSlow = std::chrono::milliseconds(100);

std::vector<Check> all_checks() {
  return {{"meet",
           [] {
             require_met({.ranks = 2, .local = 1});
             require_met({.ranks = 64, .local = 64});
             require_met({.ranks = 256});
             require_met({.ranks = 256, .spread = kSpread});
           }},
          {"bounds",
           [] {
             const Met met = meet_all({.ranks = 512, .spread = kSpread});
             std::printf("%s\n", met.text().c_str());
             require(met.seconds < 5 + 0.002 * 512, "they met in ", met.seconds, " s");
             require(met.usual_requests < 100, met.usual_requests, " requests of a rank");
           }},
          {"restarted",
           [] {
             for (uint64_t seed = 0; seed < 2000; ++seed) restarted(seed);
           }},
          {"members/overlap", [] { differing({{0, 1}, {0, 2}}, {0, 1}); }},
          {"members/apart", [] { differing({{0, 1}, {2, 3}}, {}); }},
          {"twice", twice},
          {"failed before", failed_before},
          {"slow",
           [] {
             require_met({.ranks = 256, .latency = kSlow});
             require_met({.ranks = 256, .latency = kSlow, .set_waits = true});
           }},
          {"absent", [] {
             require_named({.ranks = 4, .timeout = std::chrono::seconds(60), .absent = 3});
             for (const Rank rank : {0, 17, 255}) {
               require_named({.ranks = 256, .timeout = std::chrono::seconds(20), .absent = rank});
             }
           }}};
}

int run(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  const std::string first = words.empty() ? "" : words[0];
  if (first == "--long") {
    for (int ranks = 2; ranks <= 4096; ranks *= 2) {
      const int local = std::min(ranks, 8);
      require_met({.ranks = ranks, .local = local});
      require_met({.ranks = ranks, .local = local, .spread = kSpread});
      require_met({.ranks = ranks, .local = local, .latency = kSlow});
      require_named({.ranks = ranks, .local = local, .absent = ranks - 1});
    }
    return 0;
  }
  if ((first != "--meet" && first != "--absent") || words.size() < 3) {
    return run_checks(all_checks(), argc, argv);
  }
  MeetingSetup setup{.ranks = std::stoi(words[1]), .local = std::stoi(words[2])};
  if (words.size() > 3) setup.spread = std::chrono::milliseconds(std::stoi(words[3]));
  if (words.size() > 4) setup.latency = std::chrono::microseconds(std::stoi(words[4]));
  if (words.size() > 5) setup.service = std::chrono::microseconds(std::stoi(words[5]));
  if (first == "--absent") setup.absent = setup.ranks - 1;
  const Met met = meet_all(setup);
  std::printf("%s\n", met.text().c_str());
  if (!met.failure.empty()) std::printf("%s\n", met.failure.c_str());
  return 0;
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
