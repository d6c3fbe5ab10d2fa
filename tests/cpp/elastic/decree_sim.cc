// Proves the agreement on who goes on by simulation. Members die at any point, stop, hang, leave,
// and join, as guests at first. Units that lose a member leave. Links are cut in one direction or
// both, and hosts refuse each other while all live. Slips are delayed, lost, and come again when
// they are old. The witness is away at times. What must hold:
//
//   - Each epoch ends by one decision. Its members are of that epoch, and accepted it or are gone.
//   - A step that was applied anywhere, also by the dead, is in the decision that ends its epoch.
//   - Nobody applies a step without its gradients. All apply the same gradients, in one line.
//   - When faults have ended, all that are left work in one epoch: if they are a majority.
//   - Members have the state, and work in whole units.
//
//   decree_sim [filter]          the checks
//   decree_sim --seeds FIRST COUNT        so many simulations; prints what they went through
//   decree_sim --without RULE COUNT [FIRST]  a rule switched off: exits 1 with the seed that fails
#include "cpp/elastic/decree_member.h"
#include "cpp/elastic/decree_schedules.h"
#include "cpp/simulator.h"

namespace ringcomm::testing {
namespace {

using Kind = Fault::Kind;
using Point = Trap::Point;
using State = Process::State;

void simulate(uint64_t seed, const Rules& rules, Totals& totals) {
  try {
    World(Schedules(seed).make(), rules, seed).run(totals);
  } catch (const std::exception& error) {
    throw Failure(str("seed ", seed, ": ", error.what(), " (decree_sim --seeds ", seed, " 1)"));
  }
}

void print(uint64_t seeds, const Totals& totals) {
  std::printf(
      "%lu seeds: %lu deaths, %lu decisions, %lu steps, %lu evicted, %lu left, %lu joined, %lu "
      "never told; nobody is left in %lu worlds, no majority in %lu\n",
      seeds, totals.deaths, totals.decisions, totals.steps, totals.evicted, totals.left,
      totals.joined, totals.untold, totals.extinct, totals.minority);
}

// By name: the rules of the code under test, and those of the world around it.
std::map<std::string, bool*> names(Rules& rules) {
  DecreeRules& decree = rules.decree;
  return {{"promise", &decree.promise},      {"recall", &decree.recall},
          {"majority", &decree.majority},    {"all_promise", &decree.all_promise},
          {"unanimous", &decree.unanimous},  {"mutual", &decree.mutual},
          {"certify", &decree.certify},      {"heed", &decree.heed},
          {"unbound", &decree.unbound},      {"voted", &decree.voted},
          {"freeze", &rules.freeze},         {"vote", &rules.vote},
          {"refusal", &rules.refusal},       {"reread", &rules.reread},
          {"last_words", &rules.last_words}, {"confirm", &rules.confirm},
          {"give_up", &rules.give_up},       {"drop", &rules.drop}};
}

int without(const std::string& rule, uint64_t seeds, uint64_t first) {
  Rules rules;
  *names(rules).at(rule) = false;
  Totals totals;
  for (uint64_t seed = first; seed < first + seeds; ++seed) {
    try {
      simulate(seed, rules, totals);
    } catch (const std::exception& error) {
      std::printf("caught without %s: %s\n", rule.c_str(), error.what());
      return 1;
    }
  }
  std::printf("%s is never missed in %lu seeds\n", rule.c_str(), seeds);
  return 0;
}

// ---- single facts

// Runs a plan, and then says who works, in which epoch.
class Story {
 public:
  explicit Story(const Plan& plan) : world_(plan, {}, 1) { world_.run(totals_); }

  void expect(uint32_t epoch, const std::vector<int>& working) {
    std::vector<int> at_work;
    for (int id = 0; id < static_cast<int>(world_.size()); ++id) {
      const Process& p = world_.process(id);
      if (!p.alive || p.hangs || p.state != State::kWorking) continue;
      at_work.push_back(id);
      require(p.era->epoch == epoch, "process ", id, " is in epoch ", p.era->epoch);
    }
    require(at_work == working, at_work.size(), " processes work, not ", working.size());
    if (!working.empty()) require(world_.works_again(), "they make no steps");
  }
  World& world() { return world_; }
  const Totals& totals() const { return totals_; }
  const Decision& made(uint32_t epoch) { return world_.history().era(epoch)->made; }

 private:
  Totals totals_;
  World world_;
};

Plan two_hosts() {
  Plan plan = Plan::apart(8);
  for (int& host : plan.hosts) host /= 4;
  return plan;
}

void check_one_of_two() {
  Plan plan = Plan::apart(2);
  plan.kill(0, 20);
  Story(plan).expect(1, {1});
  plan.has_store = false;
  Story alone(plan);
  alone.expect(0, {});
  require(alone.totals().minority == 1, "a firewall would look like that");
  plan.hosts = {0, 0};
  Story(plan).expect(1, {1});
}

// A process of its host says that it has ended. So the others go on although they are no majority
// of those that were there.
void check_certificate() {
  Plan plan = Plan::apart(5);
  plan.hosts = {0, 0, 0, 0, 1};
  plan.has_store = false;
  for (const int who : {1, 2, 3}) plan.kill(who, 20);
  Story(plan).expect(1, {0, 4});
}

void check_refusals() {
  for (const bool both : {true, false}) {
    for (const Tick length : {10, 30, 200}) {
      Plan plan = two_hosts();
      plan.store_host = 2;
      plan.refuse(20, 20 + length, bit(0), bit(1), both);
      Story halves(plan);
      require(halves.world().works_again(), "one of two halves goes on");
      plan.hosts = {0, 1, 1, 1, 1, 1, 1, 1};
      Story majority(plan);
      require(
          majority.world().works_again() && majority.world().history().last().members.size() >= 7,
          "the majority goes on");
    }
  }
}

void check_power() {
  Plan plan = two_hosts();
  plan.add({20, Kind::kPower, 1});
  Story(plan).expect(1, {0, 1, 2, 3});
  plan.has_store = false;
  Story alone(plan);
  alone.expect(1, {});
  require(alone.totals().minority == 1, "half of them is no majority");
}

void check_store_host() {
  Plan plan = Plan::apart(9);
  for (int& host : plan.hosts) host /= 3;
  plan.store_host = 0;
  plan.add({20, Kind::kPower, 0});
  Story(plan).expect(1, {3, 4, 5, 6, 7, 8});
}

void check_partition() {
  Plan plan = two_hosts();
  plan.store_host = 0;
  plan.cut(20, 200, bit(0), bit(1));
  Story story(plan);
  story.expect(1, {0, 1, 2, 3});
  require(story.totals().evicted == 4, "the other side must know");
  plan.has_store = false;
  Story even(plan);
  require(even.made(1).members.count() == 8, "neither side could go on, so both do in the end");
}

void check_recall() {
  Plan plan = Plan::apart(4);
  plan.loss = plan.echo = 0;
  plan.kill(3, 20);
  plan.traps.push_back({0, Point::kProposes, 2, bit(1)});
  Story story(plan);
  story.expect(2, {1, 2});
  require(story.made(1).members.test(0), "the first proposal was accepted by one, so it stands");
}

void check_leader_dies() {
  Plan plan = Plan::apart(4);
  plan.kill(3, 20);
  plan.trap(0, Point::kDecides);
  Story story(plan);
  story.expect(2, {1, 2});
  require(story.made(1).members.count() == 3, "its decision stands");
}

void check_change() {
  Plan plan = Plan::apart(3);
  plan.hosts.push_back(2);
  plan.add({20, Kind::kJoin, 3});
  plan.add({80, Kind::kLeave, 0});
  plan.calm = 200;
  Story story(plan);
  story.expect(story.world().history().last().epoch, {1, 2, 3});
  require(story.totals().left == 1 && story.totals().evicted == 0, "nobody was given up");
}

void check_dead_joiner() {
  Plan plan = Plan::apart(2);
  plan.hosts.push_back(1);
  plan.add({20, Kind::kJoin, 2});
  plan.trap(2, Point::kPromises);
  plan.kill(2, 21, 2);
  Story story(plan);
  require(story.world().works_again(), "the others go on");
}

void check_unit() {
  Plan plan = Plan::apart(4);
  plan.unit = 2;
  plan.kill(3, 20);
  Story story(plan);
  story.expect(2, {0, 1});
  require(story.made(1).members.count() == 3, "its mate leaves in an epoch of its own");
}

void check_hang() {
  Plan plan = Plan::apart(3);
  plan.add({20, Kind::kHang, 2});
  Story(plan).expect(1, {0, 1});
}

void check_guest() {
  Plan plan = Plan::apart(2);
  plan.hosts.push_back(1);
  plan.add({20, Kind::kJoin, 2});
  plan.calm = 200;
  Story story(plan);
  const uint32_t last = story.world().history().last().epoch;
  story.expect(last, {0, 1, 2});
  require(last >= 2, "it is a guest for an epoch");
}

void check_laggard() {
  Slip slip;
  slip.epoch = 1;
  slip.made.members.set(0);
  slip.made.members.set(2);
  slip.made.step = 7;
  const auto now = Clock::time_point(std::chrono::hours(1));
  Decree decree(1, 3, 0, {});
  decree.hear(0, slip, now);
  require(decree.decision() == slip.made, "a slip of the next epoch tells how it was made");
  Decree far(1, 3, 0, {});
  slip.epoch = 2;
  far.hear(0, slip, now);
  require(!far.decision() && far.left_behind(), "two epochs ahead, they went on without it");
  far.enter(6, false, {}, now);
  far.bury(Members().set(0).set(2), now);
  require(!far.decision(), "it decides nothing, also when all others are dead");
}

const auto kNow = Clock::time_point(std::chrono::hours(1));

Slip meeting(const Members& gone, const Members& ended = {}) {
  Slip slip;
  slip.state = Slip::State::kMeeting;
  slip.gone = gone;
  slip.ended = ended;
  return slip;
}

// Member 1 has died beside member 0, and held member 2 for gone: it may have gone on without that.
void check_certifier() {
  for (const bool rule : {true, false}) {
    DecreeRules rules;
    rules.certify = rule;
    Decree decree(0, 3, 0, {}, rules);
    decree.enter(0, false, {}, kNow);
    decree.hear(1, meeting(Members().set(2)), kNow);
    decree.bury(Members().set(1), kNow);
    require(decree.dead().test(1), "its own end is seen");
    require(decree.slip().ended.test(1) == !rule, "it is certified to one that it held for gone");
    decree.suspect(Members().set(2), kNow);
    require(decree.slip().ended.test(1), "now the certificate says whom it is not for");
  }
}

// The same, as member 2 sees it.
void check_heed() {
  for (const bool rule : {true, false}) {
    DecreeRules rules;
    rules.heed = rule;
    rules.mutual = rule;  // it would keep a doubter of the certifier's, too
    Decree decree(2, 3, 0, {}, rules);
    decree.enter(0, false, {}, kNow);
    decree.hear(0, meeting(Members().set(1).set(2), Members().set(1)), kNow);
    require(decree.dead().test(1) == !rule, "it believes one that holds it for gone");
  }
  Decree decree(2, 3, 0, {});
  decree.hear(0, meeting(Members().set(1), Members().set(1)), kNow);
  require(decree.dead().test(1), "the certificate is good");
  decree.hear(0, meeting(Members().set(1), Members().set(2)), kNow);
  require(!decree.dead().test(2), "nobody certifies its own death to it");
}

// Member 1 has promised a ballot of member 0, and does not hold member 2 for gone.
void check_all_promise() {
  for (const bool rule : {true, false}) {
    DecreeRules rules;
    rules.all_promise = rule;
    Decree decree(0, 3, 0, {}, rules);
    decree.enter(0, false, {}, kNow);
    decree.suspect(Members().set(2), kNow);
    Slip slip = meeting({});
    slip.promised = decree.slip().ballot;
    decree.hear(1, slip, kNow);
    require(decree.slip().proposes == !rule, "it proposes to go on without one that all can see");
    slip.gone.set(2);
    decree.hear(1, slip, kNow);
    require(decree.slip().proposes, "all that promise hold the third one for gone");
  }
}

void check_witness() {
  Slip witness;
  Decision mine, theirs;
  mine.step = 1;
  theirs.step = 2;
  witness = Decree::answer(witness, {300, false, {}});
  require(Decree::answer(witness, {299, true, theirs}) == witness, "it has promised more");
  witness = Decree::answer(witness, {300, true, mine});
  require(witness.accepted == 300 && witness.value == mine, "it accepts what it promised");
  witness = Decree::answer(witness, {556, false, {}});
  require(witness.accepted == 300 && witness.promised == 556, "it tells what it accepted");
}

void check_many() {
  Totals totals;
  for (uint64_t seed = 0; seed < 4000; ++seed) simulate(seed, {}, totals);
  print(4000, totals);
  require(totals.deaths > 4000 && totals.decisions > 4000 && totals.evicted > 400,
          "too few faults to prove anything");
}

std::vector<Check> all_checks() {
  return {{"two of two, one killed: goes on alone", check_one_of_two},
          {"three of five killed, as one of their host certifies", check_certificate},
          {"two hosts refuse each other: at most one side", check_refusals},
          {"two hosts, one loses power: goes on with the witness, not without", check_power},
          {"three hosts, that of the store loses power: goes on", check_store_host},
          {"partition: at most one side", check_partition},
          {"an accepted value is recalled", check_recall},
          {"the leader dies after the decision", check_leader_dies},
          {"one joins, one leaves", check_change},
          {"a joiner dies at once", check_dead_joiner},
          {"a guest becomes a member", check_guest},
          {"a unit loses one: the others of it leave", check_unit},
          {"one of three hangs: goes on without it", check_hang},
          {"a laggard learns the decision from a later slip", check_laggard},
          {"a certificate says whom it is not for", check_certifier},
          {"nobody believes one that holds it for gone", check_heed},
          {"those that promise agree on who is gone", check_all_promise},
          {"the witness keeps its promise", check_witness},
          {"faults", check_many}};
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  using namespace ringcomm::testing;
  return run_simulator(argc, argv, all_checks(), simulate, print, without);
}
