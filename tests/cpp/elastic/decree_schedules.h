// Plans from seeds: half of them at random, the others variations of a known danger. Those find in
// a thousand seeds what chance alone finds in a million.
#pragma once

#include "cpp/elastic/decree_plan.h"

namespace ringcomm::testing {

class Schedules {
 public:
  explicit Schedules(uint64_t seed) : random_(seed * 2 + 1), seed_(seed) {}

  Plan make() {
    if (seed_ % 2 == 0) return anything();
    switch (seed_ / 2 % 16) {
      case 0:
        return given_up();
      case 1:
        return healed_too_soon();
      case 2:
        return between_two();
      case 3:
        return stopped();
      case 4:
        return one_by_one();
      case 5:
        return late_words();
      case 6:
        return walked_out();
      case 7:
        return overtaken();
      case 8:
        return waited_for();
      case 9:
        return refused();
      case 10:
        return certified();
      case 11:
        return left_beside();
      case 12:
        return let_in();
      case 13:
        return hung();
      case 14:
        return broken_units();
      default:
        return crossed();
    }
  }

 private:
  using Kind = Fault::Kind;
  using Point = Trap::Point;

  int upto(int low, int high) {
    return low + static_cast<int>(random_.below(static_cast<uint64_t>(high - low + 1)));
  }
  bool chance(int percent) { return upto(0, 99) < percent; }
  int process(const Plan& plan) { return upto(0, plan.size - 1); }
  int other_than(int target, const Plan& plan) {
    return (target + upto(1, plan.size - 1)) % plan.size;
  }
  int host_of(int who, const Plan& plan) { return plan.hosts[static_cast<size_t>(who)]; }
  Point point() { return static_cast<Point>(upto(0, 3)); }

  Plan anything() {
    Plan plan;
    plan.size = chance(70) ? upto(2, 5) : upto(6, 8);
    const int hosts = upto(1, plan.size);
    for (int i = 0; i < plan.size; ++i) plan.hosts.push_back(upto(0, hosts - 1));
    plan.store_host = chance(50) ? upto(0, hosts - 1) : hosts;
    plan.has_store = chance(80);
    plan.applies_first = chance(50);
    plan.latency = upto(1, 5);
    plan.loss = upto(0, 30);
    const Tick horizon = upto(80, 400);
    for (int count = upto(0, 2); count > 0; --count) random_cut(plan, hosts + 1, horizon);
    for (int count = upto(1, 4); count > 0; --count) random_fault(plan, horizon);
    if (chance(30)) plan.trap(process(plan), point(), upto(0, 5));
    if (!chance(40)) return plan;
    const Tick begin = upto(0, horizon);  // deaths come in crowds
    for (int count = upto(2, 3); count > 0; --count) {
      plan.kill(process(plan), begin + upto(0, 12), upto(0, 12));
    }
    return plan;
  }

  void random_cut(Plan& plan, int hosts, Tick horizon) {
    const Tick begin = upto(0, horizon), end = begin + upto(5, 3 * kSilence);
    if (chance(30)) {
      const auto side = static_cast<uint32_t>(random_.next());
      plan.refuse(begin, end, side, ~side & ~bit(plan.store_host), chance(60));
    } else if (chance(40)) {
      plan.cut(begin, end, bit(upto(0, hosts - 1)), bit(upto(0, hosts - 1)), chance(60));
    } else {
      const auto side = static_cast<uint32_t>(random_.next());
      plan.cut(begin, end, side, ~side, chance(60));
    }
  }

  void random_fault(Plan& plan, Tick horizon) {
    const Tick tick = upto(0, horizon);
    const int what = upto(0, 99), who = process(plan);
    if (what < 50) return plan.kill(who, tick, upto(0, 15));
    if (what < 58) return plan.add({tick, Kind::kPower, host_of(who, plan)});
    if (what < 64) return plan.add({tick, Kind::kStop, who, upto(5, 2 * kSilence)});
    if (what < 68) return plan.add({tick, Kind::kBusy, who, upto(5, 2 * kSilence)});
    if (what < 76) return plan.add({tick, Kind::kLeave, who});
    if (what < 80) return plan.add({tick, Kind::kQuit, who});
    if (what < 85) return plan.add({tick, Kind::kSuspect, who});
    if (what < 88) return plan.add({tick, Kind::kStore});
    const auto joiner = static_cast<int>(plan.hosts.size());
    plan.hosts.push_back(host_of(who, plan));
    plan.add({tick, Kind::kJoin, joiner});
    if (chance(40)) plan.kill(joiner, tick + upto(0, 40), upto(0, 10));
  }

  Plan apart(int size) {
    Plan plan = Plan::apart(size);
    plan.latency = upto(1, 4);
    plan.applies_first = chance(50);
    return plan;
  }

  // One is cut off and given up. The others die as the cut heals.
  Plan given_up() {
    Plan plan = apart(upto(2, 5));
    const int target = process(plan);
    const Tick cut = upto(5, 60), late = cut + kSilence + upto(5, 70);
    const uint32_t rest = ~bit(target);
    const int kind = upto(0, 3);
    if (kind == 0) plan.cut(cut, cut + kSilence + upto(-5, 60), bit(target), rest, chance(50));
    if (kind == 1) {
      const Tick heal = late + upto(1, 15);
      plan.cut(cut, heal, bit(target), rest, false);
      plan.cut(cut + kSilence - upto(1, 10), heal, rest, bit(target), false);
    }
    if (kind == 2) {
      const int other = other_than(target, plan);
      plan.cut(cut, late + 40, bit(target), bit(other));
      plan.cut(cut, late + 40, bit(other), bit(plan.store_host));
    }
    if (kind == 3) plan.cut(cut, late - upto(0, 10), bit(target), rest);
    for (int who = 0; who < plan.size; ++who) {
      if (who != target) plan.kill(who, late + upto(0, 3), upto(0, 6));
    }
    return plan;
  }

  // As the others begin to suspect one, it hears them again. They die with what they decide.
  Plan healed_too_soon() {
    Plan plan = apart(chance(70) ? 2 : 3);
    const int target = process(plan);
    const Tick cut = upto(5, 40), heal = cut + kSilence + upto(0, 8);
    if (chance(60)) plan.cut(cut, heal, bit(target), ~bit(target), chance(40));
    for (int who = 0; who < plan.size; ++who) {
      if (who != target) plan.trap(who, Point::kDecides, upto(0, 2));
    }
    plan.latency = upto(1, 2);
    plan.loss = upto(40, 90);
    plan.calm = heal + 40;
    return plan;
  }

  // Two do not see each other. Those between them promise something to one, and die.
  Plan between_two() {
    Plan plan = apart(upto(3, 4));
    const int target = upto(1, plan.size - 1);
    const int other = chance(80) ? upto(0, target - 1) : other_than(target, plan);
    const Tick cut = upto(5, 60), late = cut + kSilence + upto(0, 25);
    plan.cut(cut, late + upto(20, 120), bit(target), bit(other));
    plan.cut(cut, late + upto(10, 60), bit(target), bit(plan.store_host));
    if (chance(20)) plan.cut(cut, late + upto(0, 60), bit(other), bit(plan.store_host));
    for (int who = 0; who < plan.size; ++who) {
      if (who == target || who == other) continue;
      if (chance(75)) {
        plan.traps.push_back({who, Point::kPromises, 2, bit(target)});
      } else {
        plan.kill(who, late + upto(0, 12), upto(0, 12));
      }
    }
    if (chance(30)) plan.kill(other, late + upto(12, 60), upto(0, 10));
    plan.loss = upto(0, 30);
    return plan;
  }

  // One is stopped and given up. The others of its host die or go before it wakes.
  Plan stopped() {
    Plan plan = apart(upto(2, 5));
    std::ranges::fill(plan.hosts, 0);
    const int target = process(plan);
    if (chance(30)) plan.hosts[static_cast<size_t>(process(plan))] = 1;
    const Tick begin = upto(5, 60), late = begin + kSilence + upto(0, 20);
    plan.add({begin, Kind::kStop, target, late - begin + upto(0, 15)});
    const bool decide = chance(50);
    for (int who = 0; who < plan.size; ++who) {
      if (who == target) continue;
      if (chance(20)) {
        plan.add({late + upto(0, 4), Kind::kQuit, who});
      } else if (decide) {
        plan.trap(who, Point::kDecides, upto(0, 1));
      } else {
        plan.kill(who, late + upto(0, 4), upto(0, 8));
      }
    }
    return plan;
  }

  // One after the other is lost, each while the others agree about the one before.
  Plan one_by_one() {
    Plan plan = apart(upto(3, 8));
    if (chance(50)) {
      for (int& host : plan.hosts) host /= 2;
    }
    Tick tick = upto(5, 60);
    for (int count = upto(1, plan.size - 1); count > 0; --count) {
      if (chance(70)) {
        plan.kill(process(plan), tick, upto(0, 10));
      } else {
        plan.cut(tick, tick + kSilence + upto(0, 60), bit(process(plan)), kEverywhere, chance(60));
      }
      tick += chance(70) ? upto(0, 8) : upto(0, kSilence + 10);
    }
    plan.loss = upto(0, 40);
    return plan;
  }

  // A leader dies as it proposes, and so does the next one as it decides. Old slips come late.
  Plan late_words() {
    Plan plan = apart(4);
    const Tick begin = upto(5, 30);
    const int first = chance(80) ? 1 : 0;
    plan.kill(3, begin);
    if (first == 1) plan.add({begin, Kind::kStop, 0, upto(28, 40)});
    plan.traps.push_back({first, Point::kProposes, 2, bit(2), chance(80)});
    plan.trap(1 - first, Point::kDecides, upto(0, 1));
    plan.latency = upto(1, 2);
    plan.loss = upto(0, 20);
    plan.late = {16, 36};
    plan.calm = begin + 120;
    return plan;
  }

  // A majority decides without two, and the leader dies. The others leave, and the two see that.
  Plan walked_out() {
    Plan plan = apart(5);
    const uint32_t two = bit(3) | bit(4);
    const Tick cut = upto(5, 60), heal = cut + kSilence + upto(5, 30);
    plan.cut(cut, heal, two, ~two);
    plan.cut(cut, heal + 100, two, bit(0) | bit(plan.store_host));
    plan.trap(0, Point::kDecides, upto(0, 3));
    for (const int who : {1, 2}) plan.add({heal + upto(-10, 10), Kind::kQuit, who});
    plan.has_store = chance(20);
    plan.loss = upto(0, 40);
    return plan;
  }

  // One sleeps through a decision, and is given up in the next epoch, before it comes to it.
  Plan overtaken() {
    Plan plan = apart(3);
    plan.hosts = {0, 1, 1};
    const Tick begin = upto(5, 30), sleep = begin + upto(3, 8);
    plan.kill(0, begin);
    plan.add({sleep, Kind::kStop, 2, kSilence + upto(14, 40)});
    plan.traps.push_back({1, Point::kDecides, upto(0, 1), kEverywhere, false, 1});
    plan.latency = upto(1, 2);
    plan.loss = upto(0, 20);
    plan.calm += 40;
    return plan;
  }

  // One does not come when another has died. The others lose patience, and die with what they
  // decide.
  Plan waited_for() {
    Plan plan = apart(upto(3, 4));
    const Tick begin = upto(5, 60);
    const int target = process(plan), other = other_than(target, plan);
    plan.kill(other, begin);
    plan.add({begin, Kind::kBusy, target, kSilence + upto(-20, 60)});
    for (int who = 0; who < plan.size; ++who) {
      if (who != target && who != other) plan.trap(who, Point::kDecides, upto(0, 2));
    }
    plan.loss = upto(40, 90);
    plan.latency = upto(1, 2);
    plan.calm += 40;
    return plan;
  }

  // Two pairs do not see each other; then one of each pair has lost its partner, too.
  Plan crossed() {
    Plan plan = apart(4);
    const int turn = upto(0, 3);
    const auto role = [&](int which) { return bit((which + turn) % 4); };
    const uint32_t left = role(0) | role(1), right = role(2) | role(3), store = bit(4);
    const Tick cut = upto(5, 30), crossing = cut + kSilence + upto(1, 12);
    const Tick end = crossing + kSilence + upto(30, 60);
    plan.cut(cut, crossing, left, right);
    plan.cut(cut, end, role(1) | right, store);
    plan.cut(crossing, end, role(0), role(1) | role(3));
    plan.cut(crossing, end, role(1), role(2));
    plan.kill((2 + turn) % 4, crossing + kSilence + upto(0, 25), upto(0, 4));
    plan.loss = upto(0, 20);
    plan.latency = upto(1, 3);
    return plan;
  }

  // Hosts refuse each other for a while, and all processes live.
  Plan refused() {
    Plan plan = apart(upto(2, 6));
    const int hosts = upto(2, 3);
    for (int& host : plan.hosts) host = upto(0, hosts - 1);
    plan.store_host = hosts;
    const uint32_t side = bit(upto(0, hosts - 1));
    const Tick begin = upto(5, 60);
    plan.refuse(begin, begin + upto(5, 2 * kSilence), side, ~side & ~bit(hosts), chance(60));
    if (chance(30)) plan.kill(process(plan), begin + upto(0, 40), upto(0, 8));
    return plan;
  }

  // One sleeps and is given up. Its neighbour agrees to that, dies, and has not told who decides.
  Plan left_beside() {
    Plan plan = apart(3);
    plan.hosts = {1, 0, 0};
    plan.store_host = 2;
    const int target = upto(1, 2);
    const Tick begin = upto(5, 30), cut = begin + kSilence + upto(6, 30);
    plan.add({begin, Kind::kStop, target, cut - begin + upto(0, 8)});
    plan.trap(3 - target, Point::kAccepts, upto(1, 3));
    plan.refuse(cut, cut + upto(40, 100), bit(0), bit(1));
    plan.loss = upto(0, 10);
    plan.latency = upto(1, 2);
    return plan;
  }

  // Three decide without two, and one of them dies. Its neighbour certifies that to the two, which
  // it holds for gone itself.
  Plan certified() {
    Plan plan = apart(5);
    plan.hosts = {1, 0, 0, 2, 2};
    plan.store_host = 3;
    const Tick begin = upto(5, 30), cut = begin + upto(8, 30);
    plan.refuse(begin, cut + 80, bit(1), bit(2));
    plan.refuse_some(begin, cut, bit(0), bit(2));
    plan.refuse(cut, cut + upto(40, 80), bit(0), bit(2));
    plan.trap(upto(1, 2), Point::kAccepts, upto(1, 5));
    plan.trap(0, Point::kDecides, upto(0, 1));
    plan.loss = 0;
    plan.latency = upto(1, 2);
    return plan;
  }

  // Guests come, and they or members are lost as they get the state.
  Plan let_in() {
    Plan plan = apart(upto(1, 4));
    const Tick begin = upto(5, 40), first = plan.size;
    for (int count = upto(1, 3); count > 0; --count) {
      plan.hosts.push_back(upto(0, first));
      plan.add({begin, Kind::kJoin, static_cast<int>(plan.hosts.size()) - 1});
    }
    plan.store_host = first + 1;
    const auto some = [&] { return upto(0, static_cast<int>(plan.hosts.size()) - 1); };
    for (int count = upto(1, 3); count > 0; --count) {
      const Tick tick = begin + upto(5, 60);
      if (chance(60)) plan.kill(some(), tick, upto(0, 8));
      if (chance(20)) plan.add({tick, Kind::kStop, some(), upto(5, 2 * kSilence)});
      if (chance(20)) plan.trap(upto(0, first - 1), point(), upto(0, 3));
    }
    plan.loss = upto(0, 40);
    plan.calm += 40;
    return plan;
  }

  // A member does nothing any more. The others lose patience; later it may end itself.
  Plan hung() {
    Plan plan = apart(upto(2, 5));
    if (chance(50)) {
      for (int& host : plan.hosts) host /= 2;
    }
    const int target = process(plan);
    const Tick begin = upto(5, 60);
    plan.add({begin, Kind::kHang, target});
    if (chance(50)) plan.kill(target, begin + upto(20, 3 * kSilence));
    if (chance(50)) plan.kill(other_than(target, plan), begin + upto(0, 2 * kSilence), upto(0, 8));
    plan.loss = upto(0, 40);
    return plan;
  }

  // Members of units die, one while the others agree on the mates of another.
  Plan broken_units() {
    const int unit = upto(2, 3);
    Plan plan = apart(unit * upto(2, unit == 2 ? 4 : 2));
    plan.unit = unit;
    if (chance(50)) {
      for (int& host : plan.hosts) host /= unit;
    }
    Tick tick = upto(5, 60);
    for (int count = upto(1, 3); count > 0; --count) {
      plan.kill(process(plan), tick, upto(0, 10));
      if (chance(30)) plan.trap(process(plan), point(), upto(0, 3));
      tick += upto(0, 30);
    }
    plan.loss = upto(0, 40);
    return plan;
  }

  Random random_;
  const uint64_t seed_;
};

}  // namespace ringcomm::testing
