// Proves the session by simulation: collectives and messages of two groups over connections that
// are cut at any byte, silenced, corrupted and held, with ranks that pause. Every result is
// compared with its definition, and memory is poisoned as soon as it is the caller's again.
//
//   session_sim [filter]                 the checks
//   session_sim --seeds FIRST COUNT      so many simulations; prints what they went through
//   session_sim --without RULE COUNT [FIRST]  a rule switched off: exits 1 with the seed that fails
#include <sys/mman.h>

#include "cpp/simulator.h"
#include "session_member.h"
#include "session_net.h"

namespace ringcomm::testing {
namespace {

constexpr uint64_t kMostSteps = 400'000;
constexpr auto kStep = std::chrono::milliseconds(1);

class Simulation {
 public:
  Simulation(uint64_t seed, const Setup& setup)
      : setup_(setup), random_(seed), seed_(seed), size_(2 + static_cast<int>(seed % 3)) {
    flows_ = 1 + static_cast<int>(seed / 3 % 3);
    slots_ = seed / 18 % 2 == 0 ? 2 : 4;
    local_ = size_ == 4 && seed / 36 % 2 == 0 ? 2 : 1;
    setup_.session.window = seed / 9 % 2 == 0 ? 8 : kFrameWindow;
    fault_every_ = 150 + random_.below(2000);
    bell_ = std::make_unique<DoorbellPage>();
    for (int i = 0; i < size_ * (size_ - 1) / 2; ++i) {
      pairs_.push_back(std::make_unique<Pair>(flows_, setup_.session));
    }
    paused_until_.resize(at(size_));
    for (uint64_t group = 0; group < kGroups; ++group) make_group(group, 0);
  }

  void run(Totals& totals) {
    uint64_t steps = 0;
    while (!finished()) {
      if (++steps == kMostSteps) throw Failure("stuck: " + describe());
      now_ += kStep;
      step(totals);
    }
    totals.steps += steps;
    for (const auto& pair : pairs_) {
      totals.cuts += pair->cuts;
      totals.corrupted += pair->corrupted;
      totals.parked += pair->parked;
      totals.forgotten += pair->forgotten;
      for (const End& end : pair->ends) {
        totals.resent += end.session.counters().resent;
        totals.duplicates += end.session.counters().duplicates;
      }
    }
    for (const auto& member : members_) totals.messages += member->messages;
  }

 private:
  static constexpr uint64_t kGroups = 2, kLives = 2;

  Pair& pair(Rank a, Rank b) {
    const Rank low = std::min(a, b), high = std::max(a, b);
    return *pairs_[at(high * (high - 1) / 2 + low)];
  }
  End& end(Rank self, Rank peer) { return pair(self, peer).ends[self < peer ? 0 : 1]; }

  Segment make_segment(const SegmentLayout& layout) {
    memory_.push_back(std::make_unique<Pages>(layout.bytes()));
    return Segment(memory_.back()->data, layout);
  }

  // All ranks open their side before anybody begins, as they do when they meet.
  void make_group(uint64_t group, uint64_t life) {
    const Geometry geometry = geometry_for(size_, slots_);
    const SegmentLayout layout{size_, geometry.window_room(), geometry.inbox_bytes, 4096};
    const SegmentLayout pair_layout{1, 0, geometry.inbox_bytes, 4096};
    const uint64_t channel = setup_.epochs ? 10 * group + life + 1 : group + 1;
    std::vector<Segment> own;
    for (Rank rank = 0; rank < size_; ++rank) own.push_back(make_segment(layout));
    for (Rank rank = 0; rank < size_; ++rank) {
      std::vector<ShmPeer> here;
      auto remote_ranks = std::make_unique<RemoteRanks>(size_);
      for (Rank peer = 0; peer < size_; ++peer) {
        if (peer / local_ == rank / local_) {
          ShmPeer& mate = here.emplace_back();
          mate.rank = peer;
          mate.segment = own[at(peer)];
          mate.doorbell = Doorbell(bell_.get());
          continue;
        }
        const RemotePeer::Ends ends{peer, &own[at(rank)].header(), pair_layout};
        remote_ranks->add(std::make_unique<RemotePeer>(end(rank, peer), channel, ends));
      }
      members_.push_back(
          std::make_unique<Member>(rank, geometry, local_, setup_, seed_ * 10 + group));
      members_.back()->open(channel, std::move(here), std::move(remote_ranks));
      current_[{group, rank}] = members_.back().get();
    }
    lives_[group] = life;
  }

  // A rank that has left drops what still comes; when all have, the group is made anew.
  void renew(uint64_t group) {
    bool all = true;
    for (Rank rank = 0; rank < size_; ++rank) {
      const Member& member = *current_[{group, rank}];
      all = all && member.done();
      if (!member.done()) continue;
      for (Rank peer = 0; peer < size_; ++peer) {
        if (peer != rank && setup_.epochs) end(rank, peer).channels.remove(member.channel());
      }
    }
    if (all && lives_[group] + 1 < kLives) make_group(group, lives_[group] + 1);
  }

  bool finished() {
    for (uint64_t group = 0; group < kGroups; ++group) {
      if (lives_[group] + 1 < kLives) return false;
      for (Rank rank = 0; rank < size_; ++rank) {
        if (!current_[{group, rank}]->done()) return false;
      }
    }
    return true;
  }

  std::string describe() {
    std::string text;
    for (size_t i = 0; i < pairs_.size(); ++i) {
      for (int side = 0; side < 2; ++side) {
        const End& end = pairs_[i]->ends[at(side)];
        text += str(" pair ", i, " side ", side, ": acknowledged ", end.session.acknowledged(),
                    " of ", end.session.posted(), ", flows");
        for (int flow = 0; flow < flows_; ++flow) {
          text += str(" ", end.session.is_up(flow) ? "up" : "down", end.session.generation(flow),
                      end.session.has_output(flow) ? "!" : "");
        }
      }
    }
    return text;
  }

  bool paused(Rank rank) const { return paused_until_[at(rank)] > now_; }

  void step(Totals& totals) {
    const Rank rank = static_cast<Rank>(random_.below(static_cast<uint64_t>(size_)));
    if (paused(rank)) return;
    const uint64_t group = random_.below(kGroups);
    const Rank peer = static_cast<Rank>(
        (static_cast<uint64_t>(rank) + 1 + random_.below(static_cast<uint64_t>(size_ - 1))) %
        static_cast<uint64_t>(size_));
    const int side = rank < peer ? 0 : 1;
    const int flow = static_cast<int>(random_.below(static_cast<uint64_t>(flows_)));
    Pair& with = pair(rank, peer);
    switch (random_.below(8)) {
      case 0:
      case 1:
        current_[{group, rank}]->advance(totals);
        if (current_[{group, rank}]->done()) renew(group);
        return;
      case 2:
      case 3:
        return with.write(side, flow, random_);
      case 4:
      case 5:
        return with.read(side, flow, random_, now_);
      case 6:
        // Where other flows carry on, a lost one takes its time to come back.
        // As the network does, a side connects only flows that it needs.
        if (with.ends[at(side)].session.needs(flow) && !with.ends[at(side)].session.parked() &&
            random_.below(with.ends[at(side)].any_up() ? 100 : 1) == 0) {
          with.connect(flow, side);
        }
        if (!paused(peer)) with.shake_hands(flow, now_);
        return;
      default:
        if (random_.below(4) == 0) with.tick(side, now_, {});
        if (random_.below(50) == 0) {  // mostly all of them
          const int fewer = 1 + static_cast<int>(random_.below(at(flows_)));
          with.ends[at(side)].session.use(random_.below(4) == 0 ? fewer : flows_);
        }
        if (setup_.faults && random_.below(20) == 0) with.ends[at(side)].session.ask_to_park();
        if (setup_.faults && random_.below(4) == 0) with.forget(side, setup_.numbers);
        if (setup_.faults && random_.below(fault_every_ / 8) == 0) fault(with, side, flow, rank);
    }
  }

  void fault(Pair& with, int side, int flow, Rank rank) {
    switch (random_.below(9)) {
      case 0:
      case 1:
      case 2:
        return with.cut(flow, random_, now_);
      case 3:
        for (int other = 0; other < flows_; ++other) with.cut(other, random_, now_);
        return;
      case 4:
        return with.corrupt(side, flow, random_);
      case 5:
        if (const auto connection = with.ends[at(side)].connections[at(flow)]) {
          connection->to[at(side)].held = now_ + std::chrono::milliseconds(random_.below(1000));
        }
        return;
      case 6:
        paused_until_[at(rank)] = now_ + std::chrono::milliseconds(random_.below(1000));
        return;
      case 7:
        return with.repeat(side, flow);
      default:
        now_ += std::chrono::seconds(random_.below(8));
    }
  }

  struct Pages {
    explicit Pages(uint64_t size) : bytes(size) {
      void* at = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (at == MAP_FAILED) throw SystemError("mmap");
      data = static_cast<std::byte*>(at);
    }
    ~Pages() { ::munmap(data, bytes); }
    std::byte* data;
    uint64_t bytes;
  };

  Setup setup_;
  Random random_;
  const uint64_t seed_;
  const int size_;
  int flows_, local_;
  uint64_t slots_;
  uint64_t fault_every_;
  Clock::time_point now_{std::chrono::hours(1)};
  std::unique_ptr<DoorbellPage> bell_;
  std::vector<std::unique_ptr<Pages>> memory_;
  std::vector<std::unique_ptr<Pair>> pairs_;
  std::vector<std::unique_ptr<Member>> members_;
  std::map<std::pair<uint64_t, Rank>, Member*> current_;
  std::map<uint64_t, uint64_t> lives_;
  std::vector<Clock::time_point> paused_until_;
};

void simulate(uint64_t seed, const Setup& setup, Totals& totals) {
  try {
    Simulation(seed, setup).run(totals);
  } catch (const std::exception& error) {
    throw Failure(str("seed ", seed, ": ", error.what(), " (session_sim --seeds ", seed, " 1)"));
  }
}

void print(uint64_t seeds, const Totals& totals) {
  std::printf(
      "%lu seeds: %lu operations, %lu messages; %lu cuts, %lu corrupted bytes, %lu frames "
      "sent again, %lu duplicates, %lu times parked, %lu forgotten; %lu steps\n",
      seeds, totals.operations, totals.messages, totals.cuts, totals.corrupted, totals.resent,
      totals.duplicates, totals.parked, totals.forgotten, totals.steps);
}

int without(const std::string& rule, uint64_t seeds, uint64_t first) {
  Setup setup;
  const std::map<std::string, bool*> rules = {{"apply_once", &setup.session.apply_once},
                                              {"fence", &setup.session.fence},
                                              {"verify", &setup.session.verify},
                                              {"bounded", &setup.session.bounded},
                                              {"latest", &setup.session.latest},
                                              {"rest", &setup.session.rest},
                                              {"numbers", &setup.numbers},
                                              {"reclaim_lent", &setup.reclaim_lent},
                                              {"halves", &setup.halves},
                                              {"credits", &setup.credits},
                                              {"epochs", &setup.epochs}};
  *rules.at(rule) = false;
  setup.operations = 12;  // a slot has to be in use again when late bytes come
  Totals totals;
  for (uint64_t seed = first; seed < first + seeds; ++seed) {
    try {
      simulate(seed, setup, totals);
    } catch (const std::exception& error) {
      std::printf("caught without %s: %s\n", rule.c_str(), error.what());
      return 1;
    }
  }
  std::printf("%s is never missed in %lu seeds\n", rule.c_str(), seeds);
  return 0;
}

std::vector<Check> all_checks() {
  return {{"quiet",
           [] {
             Setup setup;
             setup.faults = false;
             Totals totals;
             for (uint64_t seed = 0; seed < 200; ++seed) simulate(seed, setup, totals);
             require(totals.resent == 0, "nothing was lost, and ", totals.resent, " came again");
           }},
          {"faults", [] {
             Totals totals;
             for (uint64_t seed = 0; seed < 2000; ++seed) simulate(seed, Setup{}, totals);
             print(2000, totals);
             require(totals.parked > 1000 && totals.forgotten > 1000, "too few were parked");
             require(totals.cuts > 2000 && totals.corrupted > 100 && totals.duplicates > 100,
                     "too few faults to prove anything");
           }}};
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  using namespace ringcomm::testing;
  return run_simulator(argc, argv, all_checks(), simulate, print, without);
}
