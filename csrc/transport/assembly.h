// What the ranks of a group that is being made tell one another, through the store: in stages, in
// each of which every rank says something to all. A rank that gives up says why, and all give up.
//
// Rank 0 reads what the others say and writes one list, so that a store which serves n ranks is
// asked n times, not n².
//
// The store is polled: torch's blocking waits cannot be interrupted and log warnings. Pauses grow
// with the time that has passed, so a rank that waits long asks twice a second.
#pragma once

#include <array>
#include <optional>

#include "transport/rendezvous.h"

namespace ringcomm {

class Assembly {
 public:
  Assembly(Store& store, const RendezvousOptions& options, const Deadline& deadline)
      : store_(store), options_(options), deadline_(deadline) {}

  void begin();
  // The next stage: what every rank says, one line each, and last rank 0's word for all.
  std::vector<std::string> exchange(const std::string& mine);
  void skip() { ++stage_; }
  // While a rank is awaited by other means: throws when it is in vain. It may be slow.
  void check(const std::vector<Rank>& awaited);
  // This rank gives up: before it closes what the others would take for its death.
  void give_up(const std::exception& error);

  // That this rank cannot reach `other`, which awaits it, and why.
  void set_apart(Rank other, const std::string& why);
  bool some_are_apart() { return store_.has(apart("")); }
  std::string apart_from(Rank other);  // what it said; ""

  // Before a rank's death is told: throws what it or another has said, if one gave up.
  void check_last_words();

  // How it is known that a rank has died, from now on; before, the store may know.
  std::function<std::optional<PeerError>(Rank)> died;

 private:
  // In this order; the last three where ranks are on several hosts.
  static constexpr std::array kStages = {"card", "mapped", "contact", "distance", "ready"};

  std::string key(size_t stage, const std::string& whose) const {
    return str(prefix_, kStages.at(stage), "/", whose);
  }
  std::string key(Rank rank) const { return key(stage_, str(rank)); }
  std::string list(size_t stage) const { return key(stage, "all"); }
  std::string trouble() const { return prefix_ + "failed"; }
  std::string apart(const std::string& pair) const { return prefix_ + "apart" + pair; }
  std::string read_list();
  std::string write_list();
  bool await(auto&& ready);
  void rest(Clock::duration pause);
  void check_dead();
  TimeoutError late(const std::vector<Rank>& ranks) const;
  std::vector<Rank> silent(Rank otherwise);

  Store& store_;
  const RendezvousOptions& options_;
  const Deadline& deadline_;
  std::string prefix_;  // of this life's keys
  size_t stage_ = 0;    // in progress, or next
};

}  // namespace ringcomm
