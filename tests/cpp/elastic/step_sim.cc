// Proves that a step is applied by all members or by none, the dead among them: three ranks make
// three steps by the code that is shipped. Every interleaving is tried, with a kill at every point.
//
//   step_sim [filter]         the checks; prints how many states there are
//   step_sim --without RULE   a rule switched off: exits 1 and names the path that fails
#include <map>
#include <unordered_set>
#include <utility>

#include "cpp/elastic/step_state.h"
#include "cpp/harness.h"

namespace ringcomm::testing {
namespace {

struct Setup {
  bool shared = true;  // memory: it stays when a rank has died, and others see it at once
  int steps = 3;
  int kills = 2;
  bool ended = true;   // I1: a step is applied when its vote has ended, or by a decision
  bool told = true;    // I2: a vote that has begun is told
  bool frozen = true;  // I2: no vote goes on in a meeting
  bool kept = true;    // I3: gradients stay as they are until the decision
};

class Search {
 public:
  explicit Search(const Setup& setup) : setup_(setup) {}

  void run() {
    State state;
    for (int self = 0; self < kRanks; ++self) begin(state, self, 0, {});
    explore(state);
  }
  size_t states() const { return seen_.size(); }
  size_t ends() const { return ends_; }

 private:
  enum Action : uint8_t {
    kCompute,
    kVote,
    kEnd,
    kShow,
    kApply,
    kAdopt,
    kHear,
    kBury,
    kArrive,
    kKill,
    kWait,
  };
  struct Move {
    Action action;
    int self;
    int other = 0;
  };

  // ---- the search

  void explore(const State& state) {
    if (!seen_.insert(state.print()).second) return;
    moves_.emplace_back();
    bool moved = false;
    for (int self = 0; self < kRanks; ++self) moved = try_all(state, self) || moved;
    if (state.kills < setup_.kills) {
      for (int self = 0; self < kRanks; ++self) kill(state, self);
    }
    if (!moved) wait(state);
    moves_.pop_back();
  }

  void follow(const State& state, Move move) {
    moves_.back() = move;
    explore(state);
  }

  bool try_all(const State& state, int self) {
    const Member& member = state.at(self);
    if (!member.alive) return false;
    if (*member.shown != member.decree->slip()) {  // it shows before it does anything else
      State next = state;
      show(next, self);
      follow(next, {kShow, self});
      return true;
    }
    if (member.decree->decision()) {
      adopt(state, self);
      return true;
    }
    bool moved = work(state, self);
    for (int other = 0; other < kRanks; ++other) {
      if (other == self) continue;
      moved = hear(state, self, other) || moved;
      moved = bury(state, self, other) || moved;
      moved = arrive(state, self, other) || moved;
    }
    return moved;
  }

  void kill(const State& state, int self) {
    int alive = 0;
    for (const Member& member : state.members) alive += member.alive ? 1 : 0;
    if (!state.at(self).alive || alive == 1) return;
    State next = state;
    next.at(self).alive = false;
    ++next.kills;
    follow(next, {kKill, self});
  }

  // Nothing happens any more: patience ends, or all is done.
  void wait(const State& state) {
    bool moved = false;
    for (int self = 0; self < kRanks; ++self) {
      const Member& member = state.at(self);
      if (!member.alive || !member.meets) continue;
      State next = state;
      ++next.at(self).waits;
      Decree& decree = next.change(self);
      decree.tick(time(next.at(self)));
      const bool same = decree.slip() == member.decree->slip() && !decree.decision();
      if (same) continue;
      moved = true;
      check_decision(next, self);
      follow(next, {kWait, self});
    }
    if (moved) return;
    ++ends_;
    const Member* first = nullptr;
    for (const Member& member : state.members) {
      if (!member.alive) continue;
      check(!member.meets && member.decided == setup_.steps, "stuck");
      check(!first || first->epoch == member.epoch, "two epochs");
      first = &member;
    }
  }

  // ---- steps of ranks

  bool work(const State& state, int self) {
    const Member& member = state.at(self);
    if ((member.meets && setup_.frozen) || member.decided == setup_.steps) return false;
    const int done = 2 * (member.decided - member.base);
    State next = state;
    Member& changed = next.at(self);
    if (member.sent == done) {
      ++changed.sent;
      follow(next, {kCompute, self});
      return true;
    }
    const int needed = member.sent;  // gradients of all, then ballots of all
    for (const int other : state.members_of(member.epoch)) {
      if (other != self && arrived(state, self, other) < needed) return false;
    }
    if (member.sent == done + 1) {
      changed.gradients = static_cast<uint8_t>(member.epoch + 1);
      changed.voted = true;
      ++changed.sent;
      if (!setup_.ended) apply(next, self);
      follow(next, {kVote, self});
      return true;
    }
    if (setup_.ended) apply(next, self);
    ++changed.decided;
    changed.voted = false;
    follow(next, {kEnd, self});
    return true;
  }

  void apply(State& state, int self) {
    Member& member = state.at(self);
    const auto step = static_cast<size_t>(member.decided) + 1;
    check(member.applied[step] == 0, "a step is applied twice");
    member.applied[step] = member.gradients;
    for (const Member& other : state.members) {
      const uint8_t theirs = other.applied[step];
      check(theirs == 0 || theirs == member.gradients, "two sides");
    }
    if (member.epoch < state.decisions.size()) {
      check(state.decisions[member.epoch].step >= step, "half a step");
    }
  }

  void adopt(const State& state, int self) {
    State next = state;
    Member& member = next.at(self);
    const Decision decision = *member.decree->decision();
    if (decision.step > member.decided) {
      check(decision.step == member.decided + 1U && member.voted, "no gradients");
      if (member.applied[decision.step] == 0) apply(next, self);
      ++member.decided;
      member.voted = false;
      return follow(next, {kApply, self});
    }
    check(decision.step == member.decided, "more was applied than decided");
    check(decision.members.test(static_cast<size_t>(member.decree->rank())), "evicted");
    begin(next, self, static_cast<uint8_t>(member.epoch + 1), decision);
    follow(next, {kAdopt, self});
  }

  bool hear(const State& state, int self, int other) {
    const Member& member = state.at(self);
    const Slip& slip = *state.at(other).shown;
    const int rank = state.rank_of(member.epoch, other);
    if (!state.has_news(self, other) || rank < 0) return false;
    if (member.decree->dead().test(static_cast<size_t>(rank))) return false;
    State next = state;
    next.at(self).news[static_cast<size_t>(other)] = false;
    next.change(self).hear(rank, slip, time(member));
    if (slip.state == Slip::State::kMeeting && slip.epoch == member.epoch) enter(next, self);
    check_decision(next, self);
    follow(next, {kHear, self, other});
    return true;
  }

  bool bury(const State& state, int self, int other) {
    const Member& member = state.at(self);
    const int rank = state.rank_of(member.epoch, other);
    if (state.at(other).alive || rank < 0) return false;
    const Members dead = Members().set(static_cast<size_t>(rank));
    if ((member.decree->dead() & dead).any()) return false;
    // In shared memory its last slip is read before; else it may be lost.
    if (setup_.shared && state.has_news(self, other)) return false;
    State next = state;
    enter(next, self);
    next.change(self).bury(dead, time(member));
    check_decision(next, self);
    follow(next, {kBury, self, other});
    return true;
  }

  bool arrive(const State& state, int self, int other) {
    const Member& member = state.at(self);
    if (setup_.shared || (member.meets && setup_.frozen)) return false;
    if (member.arrived[static_cast<size_t>(other)] >= state.sent(self, other)) return false;
    State next = state;
    ++next.at(self).arrived[static_cast<size_t>(other)];
    follow(next, {kArrive, self, other});
    return true;
  }

  void enter(State& state, int self) {
    Member& member = state.at(self);
    if (member.meets) return;
    member.meets = true;
    if (!setup_.kept && member.voted) member.gradients = kGarbage;
    state.change(self).enter(member.decided, member.voted && setup_.told, {}, time(member));
  }

  void begin(State& state, int self, uint8_t epoch, const Decision& made) {
    Member& member = state.at(self);
    member.epoch = epoch;
    member.base = member.decided;
    member.meets = member.voted = false;
    member.sent_last = std::exchange(member.sent, 0);
    member.arrived.fill(0);
    member.news.fill(true);
    const int size = static_cast<int>(state.members_of(epoch).size());
    const int rank = state.rank_of(epoch, self);
    member.decree = std::make_shared<const Decree>(rank, size, epoch, made);
    if (!member.shown) show(state, self);
  }

  void show(State& state, int self) {
    state.at(self).shown = std::make_shared<const Slip>(state.at(self).decree->slip());
    for (Member& other : state.members) other.news[static_cast<size_t>(self)] = true;
  }

  void check_decision(State& state, int self) {
    const Member& member = state.at(self);
    if (!member.decree->decision()) return;
    const Decision& decision = *member.decree->decision();
    if (member.epoch < state.decisions.size()) {
      check(state.decisions[member.epoch] == decision, "two decisions");
      return;
    }
    for (const Member& other : state.members) {
      const bool more =
          other.epoch == member.epoch && decision.step < 3 && other.applied[decision.step + 1] != 0;
      check(!more, "half a step");
    }
    state.decisions.push_back(decision);
  }

  // ---- small things

  static Clock::time_point time(const Member& member) {
    return Clock::time_point(std::chrono::hours(1)) + member.waits * std::chrono::seconds(10);
  }
  int arrived(const State& state, int self, int other) const {
    if (setup_.shared) return state.sent(self, other);
    return state.at(self).arrived[static_cast<size_t>(other)];
  }
  void check(bool holds, const char* failure) const {
    if (!holds) throw Failure(failure + path());
  }
  // How the search has come here.
  std::string path() const {
    static constexpr const char* kNames[] = {"compute", "vote", "end",  "show", "apply", "adopt",
                                             "hear",    "bury", "hold", "dies", "wait"};
    std::string text = ", by";
    for (size_t i = 0; i + 1 < moves_.size(); ++i) {
      const Move& move = moves_[i];
      text += str(" ", move.self, kNames[move.action]);
      if (move.action >= kHear && move.action <= kArrive) text += str(move.other);
    }
    return text;
  }

  const Setup setup_;
  std::unordered_set<uint64_t> seen_;
  std::vector<Move> moves_;
  size_t ends_ = 0;
};

size_t search(const Setup& setup) {
  Search search(setup);
  search.run();
  std::printf("%zu states, %zu ends with %s\n", search.states(), search.ends(),
              setup.shared ? "shared memory" : "messages");
  return search.ends();
}

// Returns the violation that turns up without this rule, in shared memory or with messages.
std::string failure_without(const std::string& rule) {
  Setup setup;
  const std::map<std::string, bool*> rules = {{"ended", &setup.ended},
                                              {"told", &setup.told},
                                              {"frozen", &setup.frozen},
                                              {"kept", &setup.kept}};
  *rules.at(rule) = false;
  for (const bool shared : {true, false}) {
    setup.shared = shared;
    try {
      search(setup);
    } catch (const Failure& failure) {
      return failure.what();
    }
  }
  return {};
}

std::vector<Check> all_checks() {
  std::vector<Check> checks = {
      {"no kill: one end", [] { require(search({.kills = 0}) == 1, "the order matters"); }},
      {"two kills, shared memory", [] { search({}); }},
      {"two kills, messages", [] { search({.shared = false}); }}};
  for (const std::string rule : {"ended", "told", "frozen", "kept"}) {
    checks.push_back({"caught without " + rule, [rule] {
                        require(!failure_without(rule).empty(), "nothing fails without it");
                      }});
  }
  return checks;
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  using namespace ringcomm::testing;
  if (argc != 3 || std::string(argv[1]) != "--without") return run_checks(all_checks(), argc, argv);
  const std::string failure = failure_without(argv[2]);
  if (failure.empty()) {
    std::printf("%s is never missed\n", argv[2]);
    return 0;
  }
  std::printf("caught without %s: %s\n", argv[2], failure.c_str());
  return 1;
}
