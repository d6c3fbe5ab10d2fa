// The history of a simulated world, as none of its members can see it. It finds violations.
#pragma once

#include <algorithm>
#include <deque>
#include <string>
#include <vector>

#include "cpp/harness.h"
#include "elastic/decree.h"

namespace ringcomm::testing {

// An epoch, and its steps.
struct Era {
  uint32_t epoch = 0;
  Decision made;             // by which it began
  std::vector<int> members;  // processes, by rank
  std::vector<int> guests;   // they get the state in it
  uint64_t applied = 0;      // the last step whose vote ended in it
};

// The processes that a decision names in its extra text: '~' for guests of the next epoch, '+' for
// guests that become members.
inline std::vector<int> named(const Decision& decision, char mark) {
  std::vector<int> processes;
  for (size_t at = 0; at < decision.extra.size(); ++at) {
    if (decision.extra[at] == mark) processes.push_back(std::stoi(decision.extra.substr(at + 1)));
  }
  return processes;
}

inline bool is_among(const std::vector<int>& processes, int id) {
  return std::ranges::find(processes, id) != processes.end();
}

inline std::string name_of(const Decision& decision) {
  std::string text = "{";
  for (size_t rank = 0; rank < kMostMembers; ++rank) {
    if (decision.members.test(rank)) text += str(text.size() > 1 ? " " : "", rank);
  }
  return str(text, "} at step ", decision.step, decision.extra);
}

class History {
 public:
  explicit History(int size) {
    eras_.push_back({});
    for (int i = 0; i < size; ++i) eras_[0].members.push_back(i);
  }

  const Era* era(uint32_t epoch) const { return epoch < eras_.size() ? &eras_[epoch] : nullptr; }
  const Era& last() const { return eras_.back(); }
  uint64_t steps() const { return line_.size(); }

  // Somebody holds that the epoch before `epoch` ended so. Returns whether this is new.
  bool decided(uint32_t epoch, const Decision& decision) {
    if (const Era* known = era(epoch)) {
      require(known->made == decision, "two decisions make epoch ", epoch, ": ",
              name_of(known->made), " and ", name_of(decision));
      return false;
    }
    require(epoch == eras_.size(), "epoch ", epoch, " was made without the one before it");
    const Era& before = eras_.back();
    Era next{epoch, decision, {}, named(decision, '~'), 0};
    for (size_t rank = 0; rank < kMostMembers; ++rank) {
      if (!decision.members.test(rank)) continue;
      require(rank < before.members.size(), "a stranger is in epoch ", epoch);
      next.members.push_back(before.members[rank]);
    }
    require(decision.step >= before.applied, "half a step: ", before.applied, " was applied, but ",
            name_of(decision), " makes epoch ", epoch);
    for (const int joiner : named(decision, '+')) {
      require(is_among(before.guests, joiner), "process ", joiner, " was no guest");
      next.members.push_back(joiner);
    }
    eras_.push_back(std::move(next));
    return true;
  }

  // A vote on `step` has ended in `epoch`, somewhere.
  void ended(uint32_t epoch, uint64_t step) {
    Era& where = eras_[epoch];
    where.applied = std::max(where.applied, step);
    const Era* next = era(epoch + 1);
    require(!next || next->made.step >= step, "half a step: ", step, " is applied in epoch ", epoch,
            ", but ", next ? name_of(next->made) : "", " has ended it");
  }

  // The members of one world apply the same gradients: those that `epoch` has computed.
  void applied(uint32_t epoch, uint64_t step) {
    require(step <= line_.size() + 1, "step ", step, " is applied before the one before it");
    if (step > line_.size()) line_.push_back(epoch);
    require(line_[step - 1] == epoch, "two sides: step ", step, " of epoch ", line_[step - 1],
            " and that of epoch ", epoch, " are both applied");
  }

 private:
  std::deque<Era> eras_;        // members point to them
  std::vector<uint32_t> line_;  // by step: the epoch in which it was computed
};

}  // namespace ringcomm::testing
