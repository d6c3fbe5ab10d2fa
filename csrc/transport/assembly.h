// What the ranks of a group that is being made tell one another, through the store: in stages, in
// each of which ranks say a word and rank 0 answers all. A rank that gives up says why, and all
// give up.
//
// The store is asked for a few words by each rank, whatever the size of the group: rank 0 alone
// reads what all have said, at once. It is polled: torch's blocking waits cannot be interrupted and
// log warnings. Pauses grow with the time that has passed and with the ranks that wait.
#pragma once

#include <array>
#include <optional>
#include <span>

#include "transport/rendezvous.h"

namespace ringcomm {

class Assembly {
 public:
  using Words = std::vector<std::string>;
  using Answer = std::function<std::string(const Words& words)>;

  Assembly(Store& store, const RendezvousOptions& options, const Deadline& deadline)
      : store_(store), options_(options), deadline_(deadline) {}

  void begin();
  // The next stage. Those of `speakers` say `mine`. Rank 0 answers what they have said, in their
  // order, and all get the answer. All get its UsageError as well.
  std::string exchange(const std::string& mine, const std::vector<Rank>& speakers,
                       const Answer& answer);
  void skip() { ++stage_; }
  // In an answer, rank 0 leaves more for those whom it concerns. They read it after the stage.
  void leave(const std::string& name, const std::string& text) { store_.set(left(name), text); }
  std::string read(const std::string& name) { return store_.get(left(name)); }
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

  std::string list(size_t stage) const { return str(prefix_, kStages.at(stage), "/"); }
  std::string key(Rank rank) const { return list(stage_) + str(rank); }
  std::string answer(size_t stage) const { return str(prefix_, kStages.at(stage), "-answer"); }
  std::string left(const std::string& name) const { return str(prefix_, "left/", name); }
  std::string trouble() const { return prefix_ + "failed"; }
  std::string latest() const { return str("ringcomm/", options_.scope, "/latest"); }
  std::string apart(const std::string& pair) const { return prefix_ + "apart" + pair; }
  std::string hear();
  std::string answer_all(const Answer& make);
  bool await(const std::function<bool()>& ready);
  void rest(Clock::duration pause);
  void check_dead();
  void check_size();
  void find_silent(std::span<const Rank> ranks, std::vector<Rank>& silent);
  TimeoutError late(const std::vector<Rank>& ranks) const;
  std::vector<Rank> silent();

  Store& store_;
  const RendezvousOptions& options_;
  const Deadline& deadline_;
  std::string prefix_;          // of this life's keys
  size_t stage_ = 0;            // in progress, or next
  std::vector<Rank> speakers_;  // in this stage
  std::string disagreement_;    // in what rank 0 was told: all have done something wrong
};

}  // namespace ringcomm
