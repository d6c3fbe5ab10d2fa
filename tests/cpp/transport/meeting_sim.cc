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
          {"slow",
           [] {
             require_met({.ranks = 256, .latency = kSlow});
             require_met({.ranks = 256, .latency = kSlow, .set_waits = true});
           }},
          {"absent", [] {
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
