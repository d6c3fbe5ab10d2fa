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
  p.voted = p.alarmed = false;
  p.ready = now_ + upto(1, 12);
  p.reads_again = rules_.reread;
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
    const auto joiners = joiners_of(slip.made);
    if (std::ranges::find(joiners, p.id) == joiners.end()) return;
    p.decided = slip.made.step;
    return begin(p, slip.epoch, slip.made);
  }
  if (!takes_part(p)) return;
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
  const bool weary = awaited && !near && now_ <= plan_.calm && chance(2);
  const bool silent = now_ - p.heard[id] > kSilence && !(near && !other.alive);
  if (silent || weary) suspected.set(rank);
}

// ---- agreement

inline void World::enter(Process& p) {
  p.state = State::kMeeting;
  p.decree->enter(p.decided, p.voted && rules_.vote, joiners(p), time());
}

inline std::string World::joiners(const Process& p) {
  std::string text;
  for (const Process& joiner : processes_) {
    const auto& members = p.era->members;
    const bool asks = joiner.alive || now_ < joiner.died + 40;
    if (joiner.state != State::kWaiting || joiner.ready == 0 || !asks || chance(30)) continue;
    if (std::ranges::find(members, joiner.id) == members.end()) text += str("+", joiner.id, " ");
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
  if (!missing || first || !act(p)) return;
  history_.applied(epoch, step);
  p.decided = step;
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

inline void World::work(Process& p) {
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
  }
}

inline void World::vote(Process& p) {
  bool change = p.leaves;
  for (const Process& other : processes_) {
    change =
        change || (other.alive && other.state == State::kWaiting && other.ready > 0 && chance(50));
  }
  p.voted = true;
  const Votes vote{p.era->epoch, p.decided + 1, bit(p.id), change};
  p.votes[vote.step % 2].add(vote);
  const size_t size = p.era->members.size(), first = random_.below(size);
  for (size_t i = 0; i < size; ++i) {
    Process& to = process(p.era->members[(first + i) % size]);
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
