// The agreement of an epoch's members on who goes on, and on what becomes of the step under way:
// one decision for each epoch, however many die and however late things are.
//
// It is Paxos (L. Lamport, "The Part-Time Parliament", 1998) over slips: a member shows what it
// promises and accepts, and reads what the others show. Three things are added. Members that are
// known to be dead do not count. Members that are only suspected count, so at most one side of a
// broken network goes on. One more acceptor, the witness, is a key of the store: it breaks ties.
//
// Only a process of the same host knows for sure that another one has ended. It certifies that in
// its slip, and others believe it. A host that refuses connections proves nothing: a firewall does
// that, too, while the process lives and may go on without this one.
//
// This is the protocol alone: no clock, no thread, no memory that is shared. So the simulator
// (tests/cpp/elastic/decree_sim.cc) runs the code that production runs.
#pragma once

#include "base/deadline.h"
#include "elastic/slip.h"

namespace ringcomm {

// The rules on which the agreement rests, for the tests that switch one off and must then fail.
struct DecreeRules {
  bool promise = true;      // an acceptor takes part in no lower ballot than it has promised
  bool recall = true;       // a proposer takes over what was accepted, of the highest ballot
  bool majority = true;     // of all members that are not known to be dead, and the witness
  bool all_promise = true;  // those that promise hold all others for gone
  bool unanimous = true;    // those that accept hold all others for gone
  bool mutual = true;       // a member that holds this one for gone never counts as dead
  bool certify = true;  // a member that certifies a death adopts whom the dead one held for gone
  bool heed = true;     // nobody believes a certificate of one that holds it for gone
  bool unbound = true;  // a member that leaves counts no more only if it has promised nothing
  bool voted = true;    // a step counts when every member has voted for it
};

class Decree {
 public:
  static constexpr auto kPatience = std::chrono::milliseconds(200);

  // `made`: the decision that made this epoch. Later on this member shows it to those that lag.
  Decree(int rank, int size, uint32_t epoch, Decision made, const DecreeRules& rules = {});

  // Takes part from now on. `extra`: this member's words, should it propose.
  void enter(uint64_t decided, bool voted, std::string extra, Clock::time_point now);
  bool entered() const { return slip_.state == Slip::State::kMeeting; }
  void leave() { slip_.state = Slip::State::kLeft; }

  // Takes in what another member shows, in any order. Then look at slip(), asks() and decision().
  void hear(int from, const Slip& slip, Clock::time_point now);
  void suspect(const Members& suspected, Clock::time_point now) {
    suspected_ |= suspected & ~dead_;
    consider(now);
  }
  // Notes that this member has seen these processes end, and has heard all that they showed.
  void bury(const Members& ended, Clock::time_point now) {
    ended_ |= ended;
    consider(now);
  }
  void tick(Clock::time_point now) { consider(now); }

  // Returns the slip to show to all others.
  const Slip& slip() const { return slip_; }
  // Returns the members that this one waits for.
  Members awaited() const;
  const Slip& heard(int from) const { return heard_[static_cast<At>(from)]; }
  int size() const { return size_; }
  int rank() const { return static_cast<int>(rank_); }
  const Members& dead() const { return dead_; }
  const Members& suspected() const { return suspected_; }

  // A request to the witness, where the members alone are too few.
  struct Request {
    uint64_t ballot = 0;
    bool accept = false;
    Decision value;
    bool operator==(const Request&) const = default;
  };
  std::optional<Request> asks() const {
    if (!wants_witness_ || decision_) return std::nullopt;
    return Request{slip_.ballot, slip_.proposes, slip_.proposal};
  }
  // Answers a request as the witness, an acceptor whose slip the store keeps: the store replaces
  // `before` by the result at one stroke.
  static Slip answer(const Slip& before, const Request& request);
  void hear_witness(const Slip& witness, Clock::time_point now) {
    witness_ = witness;
    consider(now);
  }

  const std::optional<Decision>& decision() const { return decision_; }
  // Tells whether others are two epochs ahead: they went on without this member.
  bool left_behind() const { return left_behind_; }

 private:
  using At = size_t;
  Members all() const { return ~Members() >> (kMostMembers - static_cast<At>(size_)); }
  Members standing() const { return all() & ~dead_ & ~left_; }
  const Slip& slip_of(At rank) const { return rank == rank_ ? slip_ : heard_[rank]; }
  void consider(Clock::time_point now);
  void count_dead();
  void accept_from(const Slip& leader);
  void lead(Clock::time_point now);
  bool is_my_turn(Clock::time_point now) const;
  void begin_ballot(Clock::time_point now);
  void count_votes();
  void propose(const Members& promised);
  Members closed(Members part) const;
  bool is_enough(const Members& acceptors, bool witness) const;
  uint64_t verdict(const Members& members) const;
  void overtaken(uint64_t ballot, Clock::time_point now);

  const At rank_;
  const int size_;
  const DecreeRules rules_;
  Slip slip_;
  std::string extra_;
  std::vector<Slip> heard_;  // by rank; this member's own is slip_
  Members dead_, suspected_, left_;
  Members ended_;     // this member has seen their end
  Members doubters_;  // they hold this member for gone, and may have gone on without it
  Slip witness_;
  uint64_t highest_ = 0;           // ballot seen
  Clock::time_point quiet_since_;  // no higher one has been
  bool wants_witness_ = false;
  std::optional<Decision> decision_;
  bool left_behind_ = false;
};

}  // namespace ringcomm
