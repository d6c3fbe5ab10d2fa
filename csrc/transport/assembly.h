// The ranks of a group that is being made talk through the store, in stages. In each of them ranks
// say a word, and rank 0 answers all. A rank that gives up says why, and all give up.
//
// A store may outlive its ranks, so it may hold words of processes that are dead. Three rules keep
// them out. Words that a rank finds before its own first one are old; only a change counts. A
// roster counts for a rank only if it holds this rank's card of today. And the keys of later stages
// have rank 0's nonce and the number of its roster in them. If a card changes before all ranks have
// confirmed the roster, rank 0 makes another one, and all begin again from there.
//
// The ranks meet by the group's name and by the list of its members. Ranks that give one name to
// two lists do not meet: they hear of each other by the key `latest`.
//
// The store is asked for a few words by each rank, whatever the size of the group: rank 0 alone
// reads what all have said, at once. It is polled: torch's blocking waits cannot be interrupted and
// log warnings. Pauses grow with the time that has passed and with the ranks that wait.
#pragma once

#include <array>
#include <optional>
#include <span>

#include "transport/members.h"
#include "transport/rendezvous.h"

namespace ringcomm {

class Assembly {
 public:
  // The roster was made of a card that is no longer its rank's: gather() once more.
  struct Again {};
  using Words = std::vector<std::string>;
  using Answer = std::function<std::string(const Words& words)>;

  Assembly(Store& store, const RendezvousOptions& options, const Deadline& deadline);

  void begin();
  // Runs the first stage: rank 0 makes the roster of all cards, another rank takes one that it
  // accepts.
  std::string gather(const std::string& card, const Answer& answer,
                     const std::function<bool(const std::string& roster)>& accepts);
  // All later stages may throw Again, until all ranks have said something in one of them.
  // Runs the next stage: the `speakers` say `mine`. Rank 0 answers what they have said, in their
  // order, and all get the answer. All get its UsageError as well.
  std::string exchange(const std::string& mine, const std::vector<Rank>& speakers,
                       const Answer& answer);
  void skip() { ++stage_; }
  // Ends the meeting: the group stands. Rank 0 returns when the others have read its last word, as
  // it may serve the store.
  void end();
  // Counts the cards that were there when this rank came. Processes of later ones were alive then.
  int64_t before() const { return before_; }
  // Leaves a further text for some ranks beside an answer of rank 0. They read it after the stage.
  void leave(const std::string& name, const std::string& text) { store_.set(left(name), text); }
  std::string read(const std::string& name) { return store_.get(left(name)); }
  // Throws when these ranks will not come. It may be slow.
  void check(const std::vector<Rank>& awaited);
  // Tells that this rank gives up. Call it before closing sockets, which the others would take for
  // its death.
  void give_up(const std::exception& error);

  // Tells that this rank cannot reach `other`, which awaits it, and why.
  void set_apart(Rank other, const std::string& why);
  bool some_are_apart() { return store_.has(apart("")); }
  std::string apart_from(Rank other);  // that rank's reason; ""

  // Throws the words of a rank that gave up. They come before the news of a death.
  void check_last_words();

  // Tells whether a rank has died, once this is set; before, the store may know.
  std::function<std::optional<PeerError>(Rank)> died;

 private:
  // In this order; the last three where ranks are on several hosts.
  static constexpr std::array kStages = {"card", "mapped", "contact", "distance", "ready"};

  std::string list(size_t stage) const {
    return stage == 0 ? cards() : str(prefix_, kStages.at(stage), "/");
  }
  std::string key(Rank rank) const { return list(stage_) + str(rank); }
  std::string card(Rank rank) const { return cards() + str(rank); }
  std::string cards() const { return base_ + "card/"; }
  std::string roster() const { return base_ + "roster"; }
  std::string answer(size_t stage) const { return str(prefix_, kStages.at(stage), "-answer"); }
  std::string left(const std::string& name) const { return str(prefix_, "left/", name); }
  // The key that shows that a rank has said the word this one waits for.
  std::string heard(Rank rank) const {
    return options_.rank == 0 ? key(rank) : stage_ == 0 ? roster() : answer(stage_);
  }
  std::string trouble() const { return base_ + "failed"; }
  std::string latest() const { return str("ringcomm/", options_.name, "/latest"); }
  std::string apart(const std::string& pair) const { return prefix_ + "apart" + pair; }
  std::string value_of(const std::string& key);  // "": there is none
  std::string hear();
  std::string hear_roster();
  std::string propose(const Answer& answer);
  bool read_cards();
  bool failed();
  void check_roster();
  void wait_for_names(const std::function<bool()>& answered);
  std::string agreed(const Answer& make, const Words& words);
  std::string answer_all(const Answer& make);
  // All waiting for the store is one loop. False: it is not done, or ready, before the end.
  using Pause = std::function<void(Clock::duration)>;
  bool poll(Clock::time_point end, Clock::duration longest, const std::function<bool()>& done,
            const Pause& pause);
  bool poll(Clock::time_point end, const std::function<bool()>& done);
  bool await(const std::function<bool()>& ready);
  void look_for_mistake(int looks);
  void await_all(const std::function<bool()>& said);
  void rest(Clock::duration pause);
  void check_dead();
  void check_members(bool comes);
  void check_card();
  bool has_readers();
  void excuse(const std::vector<Rank>& ranks);
  // Has rank 0 said anything in this meeting?
  bool is_answered() { return stage_ > 0 || value_of(roster()) != roster_; }
  void tell_failure(const std::string& word);
  std::string old(const std::string& word) const;
  void find_silent(std::span<const Rank> ranks, std::vector<Rank>& silent);
  TimeoutError late(const std::vector<Rank>& ranks);
  std::vector<Rank> silent();

  Store& store_;
  const RendezvousOptions& options_;
  const Deadline& deadline_;
  Members members_;      // its id is of this rank in this meeting, and of no other
  std::string base_;     // of the keys of a group of this name and these members
  std::string prefix_;   // of the keys of one roster's ranks
  std::string mine_;     // this rank's card
  std::string roster_;   // that is known, or was there before this rank
  std::string failure_;  // the same of the last failure
  std::string told_;     // this rank's own word of failure
  int64_t before_ = 0;
  Words cards_;                 // rank 0: that the roster was made of
  int64_t said_ = 0;            // rank 0: cards, in all lives of the store
  int rosters_ = 0;             // rank 0: made so far
  bool confirmed_ = false;      // by all ranks: their cards are today's
  size_t stage_ = 0;            // in progress, or next
  std::vector<Rank> speakers_;  // in this stage
  std::string disagreement_;    // in what rank 0 was told: all have done something wrong
};

}  // namespace ringcomm
