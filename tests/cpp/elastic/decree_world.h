// A world in one thread: members that work, die and agree by the code that is shipped, over links
// that delay, lose and repeat what they show to each other. Time is a number. Here are its course
// and its faults; decree_member.h has the members' part.
#pragma once

#include <memory>
#include <optional>

#include "cpp/elastic/decree_history.h"
#include "cpp/elastic/decree_net.h"

namespace ringcomm::testing {

// When nothing happens any more, all work again after so long.
inline constexpr Tick kEnough = 800;
inline constexpr Tick kOperation = 120;  // an operation that waits longer for a rank fails
inline constexpr Tick kPatience = 150;   // of a meeting with those that live and do not come

struct Totals {
  uint64_t deaths = 0, decisions = 0, steps = 0, evicted = 0, left = 0, joined = 0;
  uint64_t extinct = 0;   // worlds in which nobody is left
  uint64_t minority = 0;  // where those that are left are no majority of the last epoch
  uint64_t untold = 0;    // members that were given up, and nobody is left who tells them
};

struct Process {
  enum class State : uint8_t { kWaiting, kGuest, kWorking, kMeeting, kGone };
  int id = 0, host = 0;
  bool alive = true;
  int acts = -1;  // until it dies; -1: it lives
  Tick stopped_until = 0, busy_until = 0, exits = 0, died = 0;
  bool leaves = false, late = false, hangs = false;

  State state = State::kWaiting;
  bool evicted = false;
  const Era* era = nullptr;
  int rank = 0;
  std::unique_ptr<Decree> decree;
  uint64_t decided = 0;
  bool voted = false, alarmed = false;
  bool gave = false, has_state = false;  // in an epoch with guests: its part of it, and all parts
  uint32_t visited = 0;                  // the last epoch in which it was a guest
  bool was_member = false;
  Tick ready = 0;  // to vote
  Tick voted_at = 0, met_at = 0;
  std::array<Votes, 2> votes;

  std::shared_ptr<const Slip> shown;
  uint32_t audience = 0;  // the processes that are shown it
  int version = 0;
  std::array<int, kMostProcesses> seen{};  // versions of the others
  std::array<std::shared_ptr<const Slip>, kMostProcesses> last;
  bool reads_again = false;
  std::array<Tick, kMostProcesses> heard{};
  Tick asks_again = 0;
};

class World {
 public:
  using State = Process::State;

  World(Plan plan, const Rules& rules, uint64_t seed)
      : plan_(std::move(plan)),
        rules_(rules),
        random_(seed),
        history_(plan_.size),
        links_(plan_),
        processes_(plan_.hosts.size()) {
    require(processes_.size() <= kMostProcesses, "too many processes");
    for (size_t id = 0; id < processes_.size(); ++id) {
      processes_[id].id = static_cast<int>(id);
      processes_[id].host = plan_.hosts[id];
    }
    for (int id = 0; id < plan_.size; ++id) begin(process(id), 0, {});
  }

  void run(Totals& totals) {
    const Tick end = plan_.calm + kEnough;
    for (now_ = 1; now_ < end; ++now_) {
      tick();
      if (now_ == plan_.calm + 1) calm_step_ = history_.steps();
      if (now_ > plan_.calm + 1 && now_ % 8 == 0 && works_again()) break;
    }
    count(totals);
  }

  size_t size() const { return processes_.size(); }
  Process& process(int id) { return processes_[static_cast<size_t>(id)]; }
  const History& history() const { return history_; }
  bool takes_part(const Process& p) const {
    return p.alive && (p.state == State::kWorking || p.state == State::kMeeting);
  }
  static bool is_in(const Era& era, const Process& p) { return is_among(era.members, p.id); }
  // Those that are left work, all in one epoch, and have made steps since the last fault.
  bool works_again() const {
    const Process* first = nullptr;
    for (const Process& p : processes_) {
      if (!takes_part(p) || p.hangs || !is_in(history_.last(), p)) continue;
      if (p.state == State::kMeeting || p.decided < calm_step_ + 2) return false;
      if (first && first->era != p.era) return false;
      first = &p;
    }
    return true;
  }

 private:
  // A question to the witness, and its answer on the way back.
  struct Question {
    Tick due = 0;
    int from = 0;
    uint32_t epoch = 0;
    Decree::Request request;
    std::optional<Slip> answer;
  };

  int upto(int low, int high) {
    return low + static_cast<int>(random_.below(static_cast<uint64_t>(high - low + 1)));
  }
  bool chance(int percent) { return upto(0, 99) < percent; }
  Clock::time_point time() const { return Clock::time_point(std::chrono::hours(1)) + now_ * kTick; }
  bool is_lost() { return now_ <= plan_.calm && chance(plan_.loss); }
  bool active(const Process& p) const { return p.alive && p.stopped_until <= now_; }

  void tick();
  void befall(const Fault& fault);
  void die(Process& p);
  bool act(Process& p);
  void spring_traps(Process& p);
  void deliver(Message message);
  void answer_questions();
  void step(Process& p);

  void begin(Process& p, uint32_t epoch, const Decision& made);
  void hear(Process& p, const Process& from, std::shared_ptr<const Slip> shown, int version);
  void visit(Process& p);
  void call_in(Process& p, uint32_t epoch, const Decision& made);
  void send_away(Process& p);
  void give(Process& p);
  void send_vote(Process& p, const Votes& vote, const std::vector<int>& to);
  bool is_whole(const Era& era, int id) const;
  void leave_broken_unit(Process& p);
  void read_again(Process& p);
  void read_neighbours(Process& p);
  void observe(Process& p);
  void judge(Process& p, size_t rank, Members& dead, Members& suspected);
  void enter(Process& p);
  void ask_witness(Process& p);
  void adopt(Process& p);
  void go(Process& p, bool evicted);
  void work(Process& p);
  void vote(Process& p);
  void end_vote(Process& p, const Votes& votes);
  void apply(Process& p, uint64_t step);
  void show(Process& p);
  void send(const Process& p, int to);
  void repeat(Process& p);
  void check_decision(const Process& p);
  std::string joiners(const Process& p);
  void count(Totals& totals) const;
  bool has_majority(const Process& best) const;

  const Plan plan_;
  const Rules rules_;
  Random random_;
  History history_;
  Links links_;
  Wheel wheel_;
  std::vector<Process> processes_;
  std::vector<Question> questions_;
  std::vector<Slip> witnesses_;  // by epoch
  size_t next_fault_ = 0;
  Tick now_ = 0;
  uint64_t calm_step_ = 0, deaths_ = 0;
};

// ---- time

inline void World::tick() {
  links_.tick(now_);
  for (; next_fault_ < plan_.faults.size() && plan_.faults[next_fault_].tick <= now_;
       ++next_fault_) {
    befall(plan_.faults[next_fault_]);
  }
  std::vector<Message> due = wheel_.take(now_);
  for (size_t left = due.size(); left > 0; --left) {
    std::swap(due[left - 1], due[random_.below(left)]);
    deliver(std::move(due[left - 1]));
  }
  answer_questions();
  const size_t first = random_.below(processes_.size());
  const bool backwards = chance(50);
  for (size_t i = 0; i < processes_.size(); ++i) {
    const size_t next = backwards ? processes_.size() - i : i;
    Process& p = processes_[(first + next) % processes_.size()];
    if (active(p) && !p.hangs && p.state != State::kGone) step(p);
    if (active(p) && p.state == State::kGone) repeat(p);
    if (p.alive && (p.acts == 0 || (p.acts > 0 && chance(20)))) die(p);
    if (p.alive && p.exits > 0 && p.exits <= now_) die(p);
  }
}

inline void World::befall(const Fault& fault) {
  using Kind = Fault::Kind;
  if (fault.kind == Kind::kStore) return links_.end_store();
  if (fault.kind == Kind::kPower) {
    for (Process& p : processes_) {
      if (p.host == fault.who) die(p);
    }
    return links_.cut_power(fault.who);
  }
  Process& p = process(fault.who);
  if (!p.alive) return;
  if (fault.kind == Kind::kKill) p.acts = fault.length;
  if (fault.kind == Kind::kKill && fault.length == 0) die(p);
  if (fault.kind == Kind::kStop) p.stopped_until = now_ + fault.length;
  if (fault.kind == Kind::kBusy) p.busy_until = now_ + fault.length;
  if (fault.kind == Kind::kHang) p.hangs = true;
  if (fault.kind == Kind::kLeave) p.leaves = true;
  if (fault.kind == Kind::kJoin) p.ready = 1;
  if (fault.kind == Kind::kQuit && takes_part(p)) go(p, false);
  if (fault.kind != Kind::kSuspect || !takes_part(p)) return;
  for (size_t rank = 0; rank < p.era->members.size(); ++rank) {
    const int other = p.era->members[rank];
    if (other == p.id || process(other).host != p.host) continue;
    p.alarmed = true;
    return p.decree->suspect(Members().set(rank), time());
  }
}

inline void World::die(Process& p) {
  if (!p.alive) return;
  deaths_ += p.exits == 0 ? 1 : 0;
  p.alive = false;
  p.died = now_;
}

inline void World::spring_traps(Process& p) {
  const Slip& slip = p.decree->slip();
  const auto reached = [&](Trap::Point point) {
    switch (point) {
      case Trap::Point::kPromises:
        return slip.promised != 0;
      case Trap::Point::kProposes:
        return slip.proposes;
      case Trap::Point::kAccepts:
        return slip.accepted != 0;
      default:
        return p.decree->decision().has_value();
    }
  };
  for (const Trap& trap : plan_.traps) {
    if (trap.who != p.id || p.acts >= 0 || slip.epoch < trap.epoch) continue;
    if (!reached(trap.point)) continue;
    p.acts = trap.acts;
    p.audience &= trap.to;
    p.late = trap.late;
  }
}

// Each thing that others may notice is an act: a process may die before any of them.
inline bool World::act(Process& p) {
  if (p.alive && p.acts >= 0 && p.acts-- == 0) die(p);
  return p.alive;
}

inline void World::deliver(Message message) {
  Process& to = process(message.to);
  const Process& from = process(message.from);
  if (!to.alive) return;
  const bool up = links_.up(from.host, to.host);
  const bool repeats = from.alive || from.host == to.host;  // a session does, while both ends live
  if (!up && (message.slip || !repeats)) return;
  if (!up || !active(to)) {
    message.due = now_ + upto(1, 4);
    return wheel_.add(std::move(message));
  }
  if (message.slip) {
    hear(to, from, std::move(message.slip), message.version);
  } else {
    to.votes[message.vote.step % 2].add(message.vote);
  }
}

inline void World::answer_questions() {
  for (size_t i = 0; i < questions_.size();) {
    Question& question = questions_[i];
    Process& p = process(question.from);
    if (question.due > now_) {
      ++i;
      continue;
    }
    const bool back = question.answer.has_value();
    bool lost = back ? !links_.from_store(p.host) : !links_.to_store(p.host);
    if (!lost && !back) {
      witnesses_.resize(std::max<size_t>(witnesses_.size(), question.epoch + 1));
      Slip& witness = witnesses_[question.epoch];
      witness = Decree::answer(witness, question.request);
      question.answer = witness;
      question.due = now_ + upto(1, plan_.latency);
      lost = now_ <= plan_.calm && chance(10);
    } else if (!lost && active(p) && takes_part(p) && p.era->epoch == question.epoch) {
      p.decree->hear_witness(*question.answer, time());
      check_decision(p);
    }
    if (lost || back) {
      question = std::move(questions_.back());
      questions_.pop_back();
    }
  }
}

inline void World::step(Process& p) {
  if (p.reads_again) read_again(p);
  read_neighbours(p);
  if (p.state == State::kGuest) visit(p);
  if (!takes_part(p)) return;
  observe(p);
  if (p.alarmed && p.state == State::kWorking && p.busy_until <= now_) enter(p);
  if (p.state == State::kMeeting && (now_ + p.id) % 3 == 0) p.decree->tick(time());
  check_decision(p);
  spring_traps(p);
  ask_witness(p);
  show(p);
  if (!p.alive) return;
  if (p.decree->decision()) {
    adopt(p);
  } else if (p.decree->left_behind()) {
    go(p, true);
  } else if (p.state == State::kWorking || !rules_.freeze) {
    work(p);
  }
  if (p.alive) show(p);
  if (p.alive) repeat(p);
}

// ---- at the end

inline void World::count(Totals& totals) const {
  totals.deaths += deaths_;
  totals.steps += history_.steps();
  totals.decisions += history_.last().epoch;
  const Process* best = nullptr;
  for (const Process& p : processes_) {
    totals.evicted += p.evicted ? 1 : 0;
    totals.left += p.state == State::kGone && !p.evicted ? 1 : 0;
    totals.joined += p.id >= plan_.size && p.was_member ? 1 : 0;
    if (!takes_part(p) || p.hangs) continue;
    if (!best || p.era->epoch > best->era->epoch) best = &p;
    totals.untold += is_in(history_.last(), p) ? 0 : 1;
  }
  if (!best || history_.steps() < best->decided) {  // or only one that has no state
    ++totals.extinct;
  } else if (!works_again()) {
    require(!has_majority(*best), "stuck in epoch ", best->era->epoch, " at step ", best->decided);
    ++totals.minority;
  }
}

// Have those that are left, with the witness, a majority? It is of the members that one of them
// does not know to be dead. Then they must agree, and work.
inline bool World::has_majority(const Process& best) const {
  const size_t size = best.era->members.size();
  size_t there = 0, standing = size;
  for (const Process& p : processes_) {
    if (!takes_part(p) || p.hangs || !is_in(*best.era, p)) continue;
    ++there;
    if (p.era == best.era) standing = std::min(standing, size - p.decree->dead().count());
  }
  const bool witness = links_.to_store(best.host) && links_.from_store(best.host);
  return 2 * (2 * there + (witness ? 1 : 0)) > 2 * standing + 1;
}

}  // namespace ringcomm::testing
