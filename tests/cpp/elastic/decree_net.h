// The links of a simulated world: which of them are up, and the messages under way on them.
#pragma once

#include <array>
#include <memory>
#include <utility>

#include "cpp/elastic/decree_plan.h"

namespace ringcomm::testing {

// Hosts, with the links between them and to the store.
class Links {
 public:
  explicit Links(const Plan& plan) : cuts_(plan.cuts), store_host_(plan.store_host) {
    powered_ = kEverywhere;
    store_ = plan.has_store;
    for (const Cut& cut : cuts_) {
      changes_.push_back(cut.begin);
      changes_.push_back(cut.end);
    }
    std::ranges::sort(changes_);
    blocked_.fill(0);
    refused_.fill(0);
  }

  void tick(Tick now) {
    bool changes = false;
    for (; next_ < changes_.size() && changes_[next_] <= now; ++next_) changes = true;
    if (!changes) return;
    blocked_.fill(0);
    refused_.fill(0);
    for (const Cut& cut : cuts_) {
      if (now < cut.begin || now >= cut.end) continue;
      for (int host = 0; host < kMostHosts; ++host) {
        if ((cut.from & bit(host)) == 0) continue;
        if (!cut.passes) blocked_[static_cast<size_t>(host)] |= cut.to;
        if (cut.refuses) refused_[static_cast<size_t>(host)] |= cut.to;
      }
    }
  }

  bool powered(int host) const { return (powered_ & bit(host)) != 0; }
  bool up(int from, int to) const {
    if (!powered(from) || !powered(to)) return false;
    return from == to || (blocked_[static_cast<size_t>(from)] & bit(to)) == 0;
  }
  // `from` is told at once that it cannot reach `to`.
  bool refused(int from, int to) const {
    return from != to && (refused_[static_cast<size_t>(from)] & bit(to)) != 0;
  }
  bool to_store(int host) const { return store_ && up(host, store_host_); }
  bool from_store(int host) const { return store_ && up(store_host_, host); }

  void cut_power(int host) { powered_ &= ~bit(host); }
  void end_store() { store_ = false; }

 private:
  std::vector<Cut> cuts_;
  std::vector<Tick> changes_;
  size_t next_ = 0;
  int store_host_;
  std::array<uint32_t, kMostHosts> blocked_, refused_;  // by the sender's host
  uint32_t powered_;
  bool store_;
};

// The ballots for one step that have come to a member.
struct Votes {
  uint32_t epoch = 0;
  uint64_t step = 0;
  uint32_t from = 0;
  bool change = false;  // somebody leaves or joins: all members meet after this step

  void add(const Votes& more) {
    if (std::pair(more.epoch, more.step) < std::pair(epoch, step)) return;
    if (std::pair(more.epoch, more.step) > std::pair(epoch, step)) *this = {more.epoch, more.step};
    from |= more.from;
    change = change || more.change;
  }
};

struct Message {
  Tick due = 0;
  int from = 0, to = 0;
  std::shared_ptr<const Slip> slip;  // else it is a vote
  int version = 0;
  Votes vote;
};

// Messages under way, by the time of their arrival. None takes longer than kMost.
class Wheel {
 public:
  static constexpr Tick kMost = 64;

  void add(Message message) { slot(message.due).push_back(std::move(message)); }
  std::vector<Message> take(Tick now) { return std::exchange(slot(now), {}); }

 private:
  std::vector<Message>& slot(Tick tick) { return slots_[static_cast<size_t>(tick % kMost)]; }
  std::array<std::vector<Message>, kMost> slots_;
};

}  // namespace ringcomm::testing
