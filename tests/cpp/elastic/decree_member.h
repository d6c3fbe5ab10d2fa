// The members of a simulated world: they learn, agree, vote, and show their slips.
#pragma once

#include "cpp/elastic/decree_world.h"

namespace ringcomm::testing {

// ---- learning

inline void World::begin(Process& p, uint32_t epoch, const Decision& made) {
  p.era = history_.era(epoch);
  const auto place = std::ranges::find(p.era->members, p.id);
  p.rank = static_cast<int>(place - p.era->members.begin());
  const auto size = static_cast<int>(p.era->members.size());
  p.decree = std::make_unique<Decree>(p.rank, size, epoch, made, rules_.decree);
  p.state = State::kWorking;
  p.voted = p.alarmed = p.gave = false;
  p.was_member = true;
  p.ready = now_ + upto(1, 12);
  p.reads_again = rules_.reread;
  for (const int guest : p.era->guests) p.audience |= bit(guest);
  for (const int member : p.era->members) {
    p.audience |= bit(member);
    Tick& heard = p.heard[static_cast<size_t>(member)];
    if (heard == 0) heard = now_;  // it has just joined
  }
}

inline void World::hear(Process& p, const Process& from, std::shared_ptr<const Slip> shown,
                        int version) {
  const Slip& slip = *shown;
  const auto id = static_cast<size_t>(from.id);
  if (version >= p.seen[id]) {
    p.seen[id] = version;
    p.last[id] = shown;
  }
  if (p.state == State::kWaiting) {
    if (slip.epoch > p.visited && is_among(named(slip.made, '~'), p.id)) {
      call_in(p, slip.epoch, slip.made);
    }
    return;
  }
  if (!takes_part(p) && p.state != State::kGuest) return;
  const auto& members = p.era->members;
  const auto place = std::ranges::find(members, from.id);
  if (place == members.end() && slip.epoch <= p.era->epoch) return;  // evicted
  const auto rank = place == members.end() ? 0 : place - members.begin();
  if (slip.epoch == p.era->epoch && slip.state != Slip::State::kWorking) p.alarmed = true;
  p.decree->hear(static_cast<int>(rank), slip, time());
  check_decision(p);
}

inline void World::read_neighbours(Process& p) {
  for (const Process& other : processes_) {
    if (other.host != p.host || other.id == p.id || !other.shown) continue;
    if (!other.alive && !rules_.last_words) continue;
    if (p.seen[static_cast<size_t>(other.id)] == other.version) continue;
    hear(p, other, other.shown, other.version);
  }
}

// The slips that it has heard already may be of the epoch that it has come to.
inline void World::read_again(Process& p) {
  p.reads_again = false;
  for (const Process& other : processes_) {
    const auto id = static_cast<size_t>(other.id);
    if (other.id != p.id && p.last[id] && takes_part(p)) hear(p, other, p.last[id], p.seen[id]);
  }
}

// ---- guests

// It hears the members of an epoch, and has no vote among them.
inline void World::call_in(Process& p, uint32_t epoch, const Decision& made) {
  p.era = history_.era(epoch);
  const auto place = std::ranges::find(p.era->guests, p.id) - p.era->guests.begin();
  const auto size = static_cast<int>(p.era->members.size());
  p.rank = size + static_cast<int>(place);
  p.decree = std::make_unique<Decree>(p.rank, size, epoch, made, rules_.decree);
  p.state = State::kGuest;
  p.visited = epoch;
  p.decided = made.step;
  p.gave = p.has_state = false;
}

inline void World::send_away(Process& p) {
  p.state = State::kWaiting;
  p.decree = nullptr;
}

inline void World::visit(Process& p) {
  const auto lives = [&](int member) { return process(member).alive; };
  if (const auto& decision = p.decree->decision()) {
    const Decision made = *decision;
    if (!is_among(named(made, '+'), p.id)) return send_away(p);
    require(p.has_state, "process ", p.id, " is a member without the state");
    p.decided = made.step;
    begin(p, p.era->epoch + 1, made);
    return show(p);
  }
  if (p.decree->left_behind() || std::ranges::none_of(p.era->members, lives)) return send_away(p);
  uint32_t all = 0;
  for (const int member : p.era->members) all |= bit(member);
  const Votes& votes = p.votes[(p.decided + 1) % 2];
  p.has_state = p.has_state || (votes.epoch == p.era->epoch && votes.from == all);
  if (!p.has_state || p.gave) return;
  p.gave = true;
  send_vote(p, {p.era->epoch, p.decided + 1, bit(p.id), false}, p.era->members);
}

// A member gives its part of the state. All meet when they know that each guest has all of it, or
// when that takes too long.
inline void World::give(Process& p) {
  std::vector<int> ranks = p.era->members;
  std::ranges::copy(p.era->guests, std::back_inserter(ranks));
  const Votes part{p.era->epoch, p.decided + 1, bit(p.id), false};
  Votes& votes = p.votes[part.step % 2];
  if (!p.gave && now_ >= p.ready) {
    p.gave = true;
    votes.add(part);
    send_vote(p, part, ranks);
  }
  uint32_t all = 0;
  for (const int rank : ranks) all |= bit(rank);
  const bool full = votes.epoch == part.epoch && votes.step == part.step && votes.from == all;
  if (p.alive && (full || now_ > p.ready + kOperation)) enter(p);
}

inline void World::observe(Process& p) {
  Members dead, suspected;
  for (size_t rank = 0; rank < p.era->members.size(); ++rank) {
    if (p.era->members[rank] != p.id) judge(p, rank, dead, suspected);
  }
  if ((suspected & ~p.decree->suspected()).any()) p.decree->suspect(suspected, time());
  if ((dead & ~p.decree->dead()).any()) p.decree->bury(dead, time());
  if (p.decree->slip().gone.any()) p.alarmed = true;
}

// It sees a process of its own host end. About others it knows as much as a session does: they are
// silent, or refused, whether they live or not.
inline void World::judge(Process& p, size_t rank, Members& dead, Members& suspected) {
  const Process& other = process(p.era->members[rank]);
  const auto id = static_cast<size_t>(other.id);
  const bool near = other.host == p.host;
  const bool there = links_.up(p.host, other.host), back = links_.up(other.host, p.host);
  if (active(other) && back) p.heard[id] = now_;
  const bool ended = !other.alive && there && back && links_.powered(other.host);
  if ((ended || links_.refused(p.host, other.host)) && chance(30)) {
    (near || !rules_.refusal ? dead : suspected).set(rank);
  }
  // A member that waits too long for another host's loses patience.
  const bool awaited = p.state == State::kMeeting && p.decree->awaited().test(rank);
  const bool patient = now_ - p.met_at <= kPatience || !rules_.give_up;
  const bool weary = awaited && (!patient || (!near && now_ <= plan_.calm && chance(2)));
  const bool silent = now_ - p.heard[id] > kSilence && !(near && !other.alive);
  if (silent || weary) suspected.set(rank);
}

// ---- agreement

inline void World::enter(Process& p) {
  p.state = State::kMeeting;
  p.met_at = now_;
  p.decree->enter(p.decided, p.voted && rules_.vote, joiners(p), time());
}

inline std::string World::joiners(const Process& p) {
  std::string text;
  if (!p.era->guests.empty()) {
    const Votes& votes = p.votes[(p.decided + 1) % 2];
    for (const int guest : p.era->guests) {
      const bool has_state = votes.epoch == p.era->epoch && (votes.from & bit(guest)) != 0;
      if (has_state || !rules_.confirm) text += str("+", guest, " ");
    }
    return text;
  }
  for (const Process& joiner : processes_) {
    const auto& members = p.era->members;
    const bool asks = joiner.alive || now_ < joiner.died + 40;
    if (joiner.state != State::kWaiting || joiner.ready == 0 || !asks || chance(30)) continue;
    if (!is_among(members, joiner.id)) text += str("~", joiner.id, " ");
  }
  return text;
}

inline void World::ask_witness(Process& p) {
  if (now_ < p.asks_again) return;
  const auto request = p.decree->asks();
  if (!request || !act(p)) return;
  p.asks_again = now_ + upto(1, 8);
  questions_.push_back({now_ + upto(1, plan_.latency), p.id, p.era->epoch, *request, {}});
}

// A decision stands when one member knows it, also if that member dies before it does anything.
inline void World::check_decision(const Process& p) {
  if (!takes_part(p) || !p.decree->decision()) return;
  const Decision& decision = *p.decree->decision();
  if (!history_.decided(p.era->epoch + 1, decision)) return;
  const Slip& own = p.decree->slip();
  for (size_t rank = 0; rank < p.era->members.size(); ++rank) {
    const auto self = static_cast<int>(rank);
    const Slip& slip = self == p.rank ? own : p.decree->heard(self);
    const bool missing = decision.members.test(rank) && slip.accepted != own.ballot;
    require(!missing || own.gone.test(rank), "rank ", rank, " has not accepted ",
            name_of(decision));
  }
}

inline void World::adopt(Process& p) {
  const Decision decision = *p.decree->decision();
  const uint32_t epoch = p.era->epoch;
  if (!decision.members.test(static_cast<size_t>(p.rank))) return go(p, true);
  const uint64_t step = p.decided + 1;
  require(decision.step >= p.decided, "more was applied than ", name_of(decision));
  require(decision.step <= step, "no gradients of all steps up to ", name_of(decision));
  require(decision.step < step || p.voted, "no gradients for ", name_of(decision));
  const bool missing = decision.step == step;
  const bool first = missing && plan_.applies_first;
  if (first) {
    if (!act(p)) return;
    apply(p, step);
  }
  begin(p, epoch + 1, decision);
  show(p);
  if (missing && !first && act(p)) {
    history_.applied(epoch, step);
    p.decided = step;
  }
  if (p.alive && plan_.unit > 1 && rules_.drop) leave_broken_unit(p);
}

// Those whose unit has lost a member leave at once, and the others agree to that.
inline void World::leave_broken_unit(Process& p) {
  if (!is_whole(*p.era, p.id)) return go(p, false);
  const auto is_broken = [&](int member) { return !is_whole(*p.era, member); };
  if (std::ranges::any_of(p.era->members, is_broken)) enter(p);
}

// The others see that it goes, and by which decision.
inline void World::go(Process& p, bool evicted) {
  if (const auto& decision = p.decree->decision(); evicted && decision) {
    p.decree = std::make_unique<Decree>(p.rank, static_cast<int>(p.era->members.size()),
                                        p.era->epoch + 1, *decision, rules_.decree);
  }
  p.evicted = evicted;
  p.decree->leave();
  show(p);
  p.state = State::kGone;
  p.exits = now_ + upto(1, 40);
}

// ---- work

// Are all mates of this member in the epoch, too?
inline bool World::is_whole(const Era& era, int id) const {
  const int first = id / plan_.unit * plan_.unit;
  for (int mate = first; mate < first + plan_.unit; ++mate) {
    if (!is_among(era.members, mate)) return false;
  }
  return true;
}

inline void World::work(Process& p) {
  if (!p.era->guests.empty()) {
    if (p.state == State::kWorking) give(p);
    return;
  }
  require(is_whole(*p.era, p.id), "process ", p.id, " works in a unit that is not whole");
  if (!p.voted) {
    const bool knows =
        history_.steps() >= p.decided;  // a member that joins needs the state of another
    if (now_ >= p.ready && knows) vote(p);
    return;
  }
  uint32_t all = 0;
  for (const int member : p.era->members) all |= bit(member);
  const Votes& votes = p.votes[(p.decided + 1) % 2];
  if (votes.epoch == p.era->epoch && votes.step == p.decided + 1 && votes.from == all) {
    end_vote(p, votes);
  } else if (now_ > p.voted_at + kOperation) {
    p.alarmed = true;
  }
}

inline void World::vote(Process& p) {
  bool change = p.leaves;
  for (const Process& other : processes_) {
    change =
        change || (other.alive && other.state == State::kWaiting && other.ready > 0 && chance(50));
  }
  p.voted = true;
  p.voted_at = now_;
  const Votes vote{p.era->epoch, p.decided + 1, bit(p.id), change};
  p.votes[vote.step % 2].add(vote);
  send_vote(p, vote, p.era->members);
}

inline void World::send_vote(Process& p, const Votes& vote, const std::vector<int>& ranks) {
  const size_t size = ranks.size(), first = random_.below(size);
  for (size_t i = 0; i < size; ++i) {
    Process& to = process(ranks[(first + i) % size]);
    if (to.id == p.id) continue;
    if (!act(p)) return;
    if (to.host == p.host) {
      to.votes[vote.step % 2].add(vote);
    } else {
      wheel_.add({now_ + upto(1, plan_.latency), p.id, to.id, nullptr, 0, vote});
    }
  }
}

inline void World::end_vote(Process& p, const Votes& votes) {
  if (!act(p)) return;
  history_.ended(p.era->epoch, votes.step);
  apply(p, votes.step);
  if (p.state != State::kWorking || !votes.change) return;
  if (p.leaves) return go(p, false);
  enter(p);
}

inline void World::apply(Process& p, uint64_t step) {
  history_.applied(p.era->epoch, step);
  p.decided = step;
  p.voted = false;
  p.ready = now_ + upto(1, 12);
}

// ---- showing slips

inline void World::show(Process& p) {
  if (p.shown && *p.shown == p.decree->slip()) return;
  if (!act(p)) return;
  p.shown = std::make_shared<const Slip>(p.decree->slip());
  ++p.version;
  const int count = static_cast<int>(processes_.size()), first = upto(0, count - 1);
  for (int i = 0; i < count; ++i) {
    const int to = (first + i) % count;
    if (to == p.id || (p.audience & bit(to)) == 0 || process(to).host == p.host) continue;
    if (!act(p)) return;
    send(p, to);
  }
}

inline void World::send(const Process& p, int to) {
  Message message{now_ + upto(plan_.late.least, plan_.late.most), p.id, to, p.shown, p.version, {}};
  if (p.late || chance(plan_.echo)) wheel_.add(message);
  message.due = now_ + upto(1, plan_.latency);
  if (!p.late && !is_lost()) wheel_.add(std::move(message));
}

// The latest slip, to those that have not acknowledged it; and now and then to all.
inline void World::repeat(Process& p) {
  if ((now_ + p.id) % 10 != 0) return;
  const bool all = (now_ + p.id) % 50 == 0;
  for (const Process& other : processes_) {
    const bool listens = (p.audience & bit(other.id)) != 0 && other.alive && other.host != p.host;
    const bool behind = other.seen[static_cast<size_t>(p.id)] < p.version;
    if (listens && (behind || all)) send(p, other.id);
  }
}

}  // namespace ringcomm::testing
