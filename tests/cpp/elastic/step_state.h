// Three ranks at one moment, for step_sim.cc: cheap to copy, and with a fingerprint.
#pragma once

#include <algorithm>
#include <array>
#include <memory>
#include <vector>

#include "elastic/decree.h"

namespace ringcomm::testing {

inline constexpr int kRanks = 3;
inline constexpr uint8_t kGarbage = 99;

struct Member {
  bool alive = true, meets = false, voted = false;
  uint8_t epoch = 0, base = 0, decided = 0;  // steps; base: with which the epoch began
  uint8_t gradients = 0;            // the epoch in which those it holds were computed, plus one
  uint8_t sent = 0, sent_last = 0;  // gradients and ballots, in turn; in the last epoch
  uint8_t waits = 0;
  std::array<uint8_t, kRanks> arrived{};  // messages of the others, sent in this epoch
  std::array<bool, kRanks> news{};        // a slip that it has not heard
  std::array<uint8_t, 4> applied{};       // by step: the gradients
  std::shared_ptr<const Decree> decree;
  std::shared_ptr<const Slip> shown;
};

// A fingerprint of all that the future depends on.
class Print {
 public:
  void add(uint64_t value) {
    sum_ = (sum_ ^ value) * 0x9e3779b97f4a7c15;
    sum_ ^= sum_ >> 29;
  }
  void add(const Decision& decision) {
    add(decision.members.to_ulong());
    add(decision.step);
  }
  void add(const Slip& slip) {
    add(slip.epoch << 8 | static_cast<uint64_t>(slip.state) << 2 | slip.voted << 1 | slip.proposes);
    add(slip.decided);
    add(slip.gone.to_ulong());
    add(slip.promised);
    add(slip.ballot);
    add(slip.accepted);
    if (slip.proposes) add(slip.proposal);
    if (slip.accepted != 0) add(slip.value);
  }
  uint64_t sum() const { return sum_; }

 private:
  uint64_t sum_ = 1;
};

struct State {
  std::array<Member, kRanks> members;
  std::vector<Decision> decisions;  // by epoch, from 1 on
  int kills = 0;

  Member& at(int self) { return members[static_cast<size_t>(self)]; }
  const Member& at(int self) const { return members[static_cast<size_t>(self)]; }

  // States share their decrees; this member gets one of its own.
  Decree& change(int self) {
    const auto copy = std::make_shared<Decree>(*at(self).decree);
    at(self).decree = copy;
    return *copy;
  }

  std::vector<int> members_of(uint8_t epoch) const {
    std::vector<int> remaining = {0, 1, 2};
    for (size_t i = 0; i < epoch; ++i) {
      std::vector<int> left;
      for (size_t rank = 0; rank < remaining.size(); ++rank) {
        if (decisions[i].members.test(rank)) left.push_back(remaining[rank]);
      }
      remaining = left;
    }
    return remaining;
  }
  // -1: it is not in this epoch.
  int rank_of(uint8_t epoch, int self) const {
    const auto ranks = members_of(epoch);
    const auto place = std::ranges::find(ranks, self);
    return place == ranks.end() ? -1 : static_cast<int>(place - ranks.begin());
  }

  // Counts the steps that `other` has sent in the epoch of this member.
  int sent(int self, int other) const {
    const int ahead = at(other).epoch - at(self).epoch;
    return ahead == 0 ? at(other).sent : ahead == 1 ? at(other).sent_last : 0;
  }
  // Is there something to hear from `other`?
  bool has_news(int self, int other) const {
    const Member& member = at(self);
    const Slip& slip = *at(other).shown;
    const bool old = slip.epoch < member.epoch;
    const bool same = slip.epoch == member.epoch && slip.state == Slip::State::kWorking;
    return member.alive && member.news[static_cast<size_t>(other)] && !old && !same;
  }

  uint64_t print() const {
    Print print;
    print.add(static_cast<uint64_t>(kills));
    for (const Decision& decision : decisions) print.add(decision);
    for (int self = 0; self < kRanks; ++self) {
      const Member& member = at(self);
      print.add(*member.shown);
      for (const uint8_t part : {member.epoch, member.sent, member.sent_last}) print.add(part);
      for (const uint8_t part : member.applied) print.add(part);
      print.add(member.alive);
      if (!member.alive) continue;  // its knowledge is lost
      for (const uint8_t part : {member.base, member.decided, member.gradients, member.waits}) {
        print.add(part);
      }
      print.add(member.meets << 1 | member.voted);
      for (const uint8_t part : member.arrived) print.add(part);
      for (int other = 0; other < kRanks; ++other) print.add(has_news(self, other));
      print.add(member.decree->slip());
      print.add(member.decree->dead().to_ulong());
      if (member.decree->decision()) print.add(*member.decree->decision());
      for (int rank = 0; rank < member.decree->size(); ++rank) {
        print.add(member.decree->heard(rank));
      }
    }
    return print.sum();
  }
};

}  // namespace ringcomm::testing
