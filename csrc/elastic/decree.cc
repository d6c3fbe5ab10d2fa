#include "elastic/decree.h"

namespace ringcomm {

constexpr uint64_t kRound = kMostMembers;  // a ballot is a round, and the rank of its leader

Decree::Decree(int rank, int size, uint32_t epoch, Decision made, const DecreeRules& rules)
    : rank_(static_cast<At>(rank)), size_(size), rules_(rules), heard_(static_cast<At>(size)) {
  slip_.epoch = epoch;
  slip_.made = std::move(made);
}

void Decree::enter(uint64_t decided, bool voted, std::string extra, Clock::time_point now) {
  slip_.state = Slip::State::kMeeting;
  slip_.decided = decided;
  slip_.voted = voted;
  extra_ = std::move(extra);
  quiet_since_ = now;
  consider(now);
}

// ---- hearing

void Decree::hear(int from, const Slip& slip, Clock::time_point now) {
  if (slip.epoch > slip_.epoch + 1) left_behind_ = !decision_;
  if (slip.epoch == slip_.epoch + 1 && !decision_) decision_ = slip.made;
  if (slip.epoch != slip_.epoch) return;
  heard_[static_cast<At>(from)] = slip;
  if (slip.gone.test(rank_) && rules_.mutual) doubters_.set(static_cast<At>(from));
  consider(now);
}

Slip Decree::answer(const Slip& before, const Request& request) {
  Slip after = before;
  if (request.ballot < before.promised) return after;
  after.promised = request.ballot;
  if (request.accept) {
    after.accepted = request.ballot;
    after.value = request.value;
  }
  return after;
}

// ---- the acceptor

Members Decree::awaited() const {
  Members awaited = standing() & ~suspected_;
  for (At rank = 0; rank < heard_.size(); ++rank) {
    if (rank == rank_ || heard_[rank].state == Slip::State::kMeeting) awaited.reset(rank);
  }
  return awaited;
}

void Decree::consider(Clock::time_point now) {
  for (At rank = 0; rank < heard_.size(); ++rank) {
    if (heard_[rank].state != Slip::State::kLeft) continue;
    // One that took part may have accepted something: its vote counts on.
    (heard_[rank].promised == 0 || !rules_.unbound ? left_ : suspected_).set(rank);
  }
  count_dead();
  if (!entered() || decision_ || left_behind_) return;
  for (const Slip& other : heard_) {
    overtaken(std::max(other.ballot, other.promised), now);
    accept_from(other);
  }
  overtaken(witness_.promised, now);
  lead(now);
}

// A member that took part in a decision without this one held it for gone, as all did that took
// part. It must not count as dead here: then a minority could seem to be a majority. So those that
// hold this member for gone are only suspected. A certificate passes that on: the member that gives
// it holds all for gone whom the dead one did, and it does not count where it holds this one so.
void Decree::count_dead() {
  Members ended = ended_;
  for (const Slip& other : heard_) {
    if (!other.gone.test(rank_) || !rules_.heed) ended |= other.ended & all();
  }
  if (rank_ < heard_.size()) ended.reset(rank_);
  suspected_ |= ended & doubters_;
  dead_ |= ended & ~doubters_;
  suspected_ &= ~dead_;
  slip_.gone = dead_ | suspected_ | left_;
  if (decision_ || left_behind_) return;  // the dead have shown what is not of this epoch
  for (At rank = 0; rank < heard_.size(); ++rank) {
    const bool seen = ended_.test(rank) && dead_.test(rank);
    if (seen && ((heard_[rank].gone & ~slip_.gone).none() || !rules_.certify))
      slip_.ended.set(rank);
  }
}

// A higher ballot is under way: this member's own is in vain.
void Decree::overtaken(uint64_t ballot, Clock::time_point now) {
  if (ballot <= highest_) return;
  highest_ = ballot;
  quiet_since_ = now;
}

void Decree::accept_from(const Slip& leader) {
  if (leader.ballot == 0) return;
  if (leader.ballot < slip_.promised && rules_.promise) return;
  slip_.promised = std::max(slip_.promised, leader.ballot);
  if (!leader.proposes || leader.ballot == slip_.accepted) return;
  slip_.accepted = leader.ballot;
  slip_.value = leader.proposal;
}

// ---- the leader

void Decree::lead(Clock::time_point now) {
  wants_witness_ = false;
  if (slip_.ballot == 0 || slip_.ballot < highest_) {
    if (is_my_turn(now)) begin_ballot(now);
  }
  if (slip_.ballot == 0 || slip_.ballot < highest_) return;
  if (!slip_.proposes) count_votes();
  if (slip_.proposes) count_votes();
}

// The lowest member leads. When nothing has happened for a while, the next one does, and so on all
// around: a member that knows of more deaths may decide more. On a slow network leaders
// would hinder each other, so each round has more patience.
bool Decree::is_my_turn(Clock::time_point now) const {
  const Members others = highest_ == 0 ? standing() & ~suspected_ : standing();
  const At first = highest_ == 0 ? 0 : static_cast<At>(highest_ % kRound) + 1;
  int before = 0, passed = 0;
  for (At rank = first % heard_.size(); rank != rank_; rank = (rank + 1) % heard_.size()) {
    before += others.test(rank) ? 1 : 0;
    ++passed;
  }
  if (before == 0 && highest_ == 0) return true;
  const auto rounds = static_cast<int>(std::clamp<uint64_t>(highest_ / kRound, 4, 16));
  const auto turn = kPatience * (before + 1) + kPatience * passed / size_;
  return now - quiet_since_ >= turn * rounds / 4;
}

void Decree::begin_ballot(Clock::time_point now) {
  const uint64_t last = std::max(highest_, slip_.promised);
  slip_.ballot = (last / kRound + 1) * kRound + rank_;
  slip_.promised = slip_.ballot;
  slip_.proposes = false;
  slip_.proposal = {};
  overtaken(slip_.ballot, now);
}

// Counts members that have promised this ballot, and those that have accepted the proposal: with
// enough of them, it proposes, or has decided. All members that can be asked must have done so.
void Decree::count_votes() {
  const bool proposed = slip_.proposes;
  Members voters;
  for (At rank = 0; rank < heard_.size(); ++rank) {
    const Slip& slip = slip_of(rank);
    if ((proposed ? slip.accepted : slip.promised) == slip_.ballot) voters.set(rank);
  }
  const bool together = proposed ? rules_.unanimous : rules_.all_promise;
  const Members part = together ? closed(voters) : voters & standing();
  if (part.none()) return;
  if (!is_enough(part, (proposed ? witness_.accepted : witness_.promised) == slip_.ballot)) {
    wants_witness_ = true;
  } else if (proposed) {
    decision_ = slip_.proposal;
  } else {
    propose(part);
  }
}

void Decree::propose(const Members& promised) {
  uint64_t accepted = slip_.accepted;
  Decision value = slip_.value;
  const auto recall = [&](uint64_t ballot, const Decision& theirs) {
    if (ballot <= accepted) return;
    accepted = ballot;
    value = theirs;
  };
  for (At rank = 0; rank < heard_.size(); ++rank) {
    if (promised.test(rank) && rank != rank_) recall(heard_[rank].accepted, heard_[rank].value);
  }
  if (witness_.promised == slip_.ballot) recall(witness_.accepted, witness_.value);
  if (accepted == 0 || !rules_.recall) {
    value.members = promised;
    value.step = verdict(value.members);
    value.extra = extra_;
  }
  slip_.proposal = std::move(value);
  slip_.proposes = true;
  accept_from(Slip(slip_));
}

// Since every member begins to vote only when it holds the whole result of its step, a vote that
// ended anywhere was begun everywhere. So a step that one member has applied is one that all have
// voted for; and one that some member has not voted for was applied by nobody, and never will be.
uint64_t Decree::verdict(const Members& members) const {
  uint64_t step = 0;
  for (At rank = 0; rank < heard_.size(); ++rank) {
    if (members.test(rank)) step = std::max(step, slip_of(rank).decided);
  }
  for (At rank = 0; rank < heard_.size(); ++rank) {
    const Slip& other = slip_of(rank);
    if (members.test(rank) && (other.decided != step || !other.voted)) return step;
  }
  return rules_.voted ? step + 1 : step;
}

// Those of `part` that can act together: each of them holds all others for gone. Then none of the
// others can count one of them as dead (see bury), so it finds no majority without them. A member
// that seems to be gone itself need not agree: then it does not count. None, if they must wait.
Members Decree::closed(Members part) const {
  part &= standing();
  const auto agrees = [&](At rank) { return (all() & ~part & ~slip_of(rank).gone).none(); };
  for (At rank = 0; rank < heard_.size();) {
    const bool drops = part.test(rank) && suspected_.test(rank) && !agrees(rank);
    part.set(rank, part.test(rank) && !drops);
    rank = drops ? 0 : rank + 1;  // now the others must hold it for gone, too
  }
  for (At rank = 0; rank < heard_.size(); ++rank) {
    if (part.test(rank) && !agrees(rank)) return {};
  }
  return part;
}

// More than half of two votes for each member that is not known to be dead, and one of the witness.
bool Decree::is_enough(const Members& acceptors, bool witness) const {
  if (!rules_.majority) return acceptors.any();
  const size_t votes = 2 * (acceptors & standing()).count() + (witness ? 1 : 0);
  return 2 * votes > 2 * standing().count() + 1;
}

}  // namespace ringcomm
