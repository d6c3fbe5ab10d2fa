#include "transport/assembly.h"

#include <numeric>

#include "net/handshake.h"
#include "transport/roster.h"

namespace ringcomm {
namespace {

constexpr auto kFirstPause = std::chrono::microseconds(100);
constexpr auto kLongestPause = std::chrono::milliseconds(500);
// For a group whose ranks all ask the store: it takes so many questions in these pauses.
constexpr auto kFirstShare = std::chrono::microseconds(20),
               kLongestShare = std::chrono::microseconds(1000);
constexpr int kShare = 4;                               // of the time that has passed
constexpr auto kPiece = std::chrono::milliseconds(50);  // of a pause, between looks for Ctrl-C
constexpr int kLooks = 8;    // before a warning that an earlier meeting failed: some 5 s
constexpr int kSearch = 64;  // so many ranks find by themselves who is late
constexpr auto kNamesTime = std::chrono::seconds(2);  // for rank 0 to say who it is
constexpr size_t kMostNamed = 16;                     // ranks that have not come
constexpr Rank kNobody = -1, kAll = -2;               // in a word of failure
// Before the card of a rank that has met the others, and of one that has given up.
constexpr char kMet = '=', kLeft = '-';
constexpr auto kReaders = std::chrono::seconds(5);    // for the last word of rank 0
constexpr auto kLastWords = std::chrono::seconds(2);  // of a rank that gives up

// A word of failure: the rank concerned, or kNobody where that is in the text; then what to say.
std::string word_of(Rank self, const std::exception& error) {
  if (const auto* peer = dynamic_cast<const PeerError*>(&error)) {
    return str(peer->rank(), ' ', peer->what());
  }
  if (dynamic_cast<const TimeoutError*>(&error) != nullptr) return str(kNobody, ' ', error.what());
  return str(self, " rank ", self, " failed: ", error.what());
}

// All of them begin with who says it, and of which world.
struct Failure {
  explicit Failure(const std::string& word) {
    TextReader in(word.substr(word.starts_with('!') ? 1 : 0));
    if (in >> id >> world >> rank) std::getline(in >> std::ws, text);
  }
  std::string id, text;
  uint64_t world = 0;
  Rank rank = kNobody;
};

[[noreturn]] void retell(const std::string& word) {
  const Failure failure(word);
  if (failure.rank == kAll) throw UsageError(failure.text);
  if (failure.rank < 0) throw TimeoutError(failure.text);
  throw PeerError(failure.rank, failure.text);
}

bool is_over(const std::string& card) {
  return card.starts_with(kMet) || card.starts_with(kLeft) || card.starts_with('!');
}

Members members_of(const RendezvousOptions& options) {
  Members members = Members::all(options.size);
  if (!options.members.empty()) members.ranks = options.members;
  members.rank = options.rank;
  members.world = options.world;
  const Nonce id = random_id();
  members.id = str(id[0], '-', id[1]);
  return members;
}

}  // namespace

Assembly::Assembly(Store& store, const RendezvousOptions& options, const Deadline& deadline)
    : store_(store), options_(options), deadline_(deadline), members_(members_of(options)) {
  base_ = str("ringcomm/", options.name, '/', channel_of({members_.shown()}), '/');
  prefix_ = base_;
}

void Assembly::begin() {
  if (store_.served()) {
    roster_ = old(value_of(roster()));
    failure_ = old(value_of(trouble()));
    before_ = store_.said(cards());
    if (options_.world != 0 && store_.has(latest())) check_members(true);
  }
  store_.set(latest(), members_.to_text());
}

// Returns what this rank takes for the word of an earlier meeting. A failure in its own world is
// none, because each name is used once there.
std::string Assembly::old(const std::string& word) const {
  return options_.world != 0 && Failure(word).world == options_.world ? "" : word;
}

std::string Assembly::value_of(const std::string& key) {
  return store_.has(key) ? store_.get(key) : "";
}

std::string Assembly::gather(const std::string& card, const Answer& answer,
                             const std::function<bool(const std::string& roster)>& accepts) {
  stage_ = 0;
  speakers_.resize(static_cast<size_t>(options_.size));
  std::iota(speakers_.begin(), speakers_.end(), 0);
  if (mine_.empty()) {
    mine_ = card;
    store_.say(cards(), str(options_.rank), mine_);
  }
  std::string text;
  if (options_.rank == 0) {
    text = propose(answer);
  } else {
    do {
      stage_ = 0;
      text = hear_roster();
      TextReader in(text);
      in >> prefix_;
      prefix_ = str(base_, prefix_, '/');
      text = text.substr(std::min(text.find('\n'), text.size() - 1) + 1);
    } while (!accepts(text));
  }
  stage_ = 1;
  return text;
}

// Another one than what is known.
std::string Assembly::hear_roster() {
  std::string now;
  const auto changed = [&] {
    now = value_of(roster());
    return !now.empty() && now != roster_;
  };
  if (!await(changed)) wait_for_names(changed);
  roster_ = now;
  if (roster_.starts_with('!')) retell(roster_);
  return roster_;
}

std::string Assembly::propose(const Answer& answer) {
  said_ = -1;
  await_all([&] {
    const int64_t said = store_.said(cards());
    if (said < options_.size || said == said_) return false;
    said_ = said;
    return read_cards();
  });
  const std::string name = str(members_.id, '.', ++rosters_);
  prefix_ = str(base_, name, '/');
  const std::string text = agreed(answer, cards_);
  roster_ = str(name, '\n', text);
  store_.set(roster(), roster_);
  return text;
}

// False: a rank has not come, or is over with it.
bool Assembly::read_cards() {
  std::vector<std::string> keys;
  for (Rank rank = 0; rank < options_.size; ++rank) keys.push_back(card(rank));
  if (!store_.has_all(keys)) return false;
  cards_ = store_.get_all(keys);
  return std::ranges::none_of(cards_, is_over);
}

std::string Assembly::exchange(const std::string& mine, const std::vector<Rank>& speakers,
                               const Answer& answer) {
  speakers_ = speakers;
  if (std::ranges::binary_search(speakers, options_.rank)) {
    store_.say(list(stage_), str(options_.rank), mine);
  }
  const std::string text = options_.rank == 0 ? answer_all(answer) : hear();
  confirmed_ = confirmed_ || std::ssize(speakers) == options_.size;
  ++stage_;
  return text;
}

std::string Assembly::hear() {
  const auto start = store_.now();
  bool asks = true;
  const auto answered = [&] {
    asks = !asks || confirmed_ || store_.now() - start < kLongestPause;
    if (asks) return store_.has(answer(stage_));
    check_roster();
    return false;
  };
  if (!await(answered)) wait_for_names([&] { return store_.has(answer(stage_)); });
  std::string text = store_.get(answer(stage_));
  if (text.starts_with('!')) retell(text);
  return text;
}

// Rank 0 finds the missing ranks of a large group, for all: else each would ask for each.
void Assembly::wait_for_names(const std::function<bool()>& answered) {
  if (options_.size <= kSearch) throw late(silent());
  const auto pause = [&](Clock::duration time) {
    options_.interrupt();
    store_.wait(time);
  };
  if (poll(store_.now() + kNamesTime, kPiece, answered, pause)) return;
  throw late(store_.has(key(0)) ? silent() : std::vector{0});
}

std::string Assembly::answer_all(const Answer& make) {
  await_all([&] { return store_.said(list(stage_)) >= std::ssize(speakers_); });
  std::vector<std::string> keys;
  for (const Rank rank : speakers_) keys.push_back(key(rank));
  const std::string text = agreed(make, store_.get_all(keys));
  store_.set(answer(stage_), text);
  return text;
}

// In the long run every other question is whether somebody has given up.
void Assembly::await_all(const std::function<bool()>& said) {
  const auto start = store_.now();
  bool asks = true;
  const auto all = [&] {
    asks = !asks || store_.now() - start < kLongestPause;
    if (asks) return said();
    if (failed()) check_last_words();
    if (stage_ > 0) check_roster();
    return false;
  };
  if (!await(all)) throw late(silent());
}

// All get its UsageError.
std::string Assembly::agreed(const Answer& make, const Words& words) {
  try {
    return make(words);
  } catch (const UsageError& error) {
    disagreement_ = str(kAll, ' ', error.what());
    throw;
  }
}

// Is there another roster, or must there be one?
void Assembly::check_roster() {
  if (confirmed_ || !store_.served()) return;
  if (options_.rank != 0) {
    const std::string now = value_of(roster());
    if (now.starts_with('!') && now != roster_) retell(now);
    if (now != roster_) throw Again();
    return;
  }
  const int64_t said = store_.said(cards());
  if (said == said_) return;
  said_ = said;
  const Words before = cards_;
  if (!read_cards() || cards_ != before) throw Again();
}

// Asks until it is done, in pauses that grow with the time that has passed, up to `longest`.
bool Assembly::poll(Clock::time_point end, Clock::duration longest,
                    const std::function<bool()>& done, const Pause& pause) {
  const auto first = std::max<Clock::duration>(kFirstPause, options_.size * kFirstShare);
  const auto start = store_.now();
  while (!done()) {
    const auto now = store_.now();
    if (now >= end) return false;
    pause(std::clamp<Clock::duration>((now - start) / kShare, std::min(first, longest), longest));
  }
  return true;
}

bool Assembly::poll(Clock::time_point end, const std::function<bool()>& done) {
  return poll(end, kPiece, done, [this](Clock::duration pause) { store_.wait(pause); });
}

bool Assembly::await(const std::function<bool()>& ready) {
  const auto start = store_.now();
  int looks = 0;
  const auto longest = std::max<Clock::duration>(kLongestPause, options_.size * kLongestShare);
  return poll(deadline_.at(), longest, ready, [&](Clock::duration pause) {
    if (stage_ == 0 && store_.now() - start > kLongestPause && store_.served())
      look_for_mistake(++looks);
    rest(pause);
  });
}

// The ranks do not meet: is it for a mistake that can be told?
void Assembly::look_for_mistake(int looks) {
  if (looks == kLooks && !failure_.empty() && options_.warn) {
    options_.warn("the ranks have not met yet. Before, they failed with: " +
                  Failure(failure_).text);
  }
  if (looks % 2 == 1)
    check_card();
  else
    check_members(false);
}

void Assembly::rest(Clock::duration pause) {
  const auto end = std::min(store_.now() + pause, deadline_.at());
  do {
    options_.interrupt();
    check_dead();
    if (store_.wait(std::clamp<Clock::duration>(end - store_.now(), {}, kPiece))) return;
  } while (store_.now() < end);
}

// A rank's words still count when it is dead. Rank 0 tells the others of another's death. Without a
// server its words may be lost to a rank that comes later, so that one looks at all ranks itself.
void Assembly::check_dead() {
  for (Rank rank = 0; rank < options_.size; ++rank) {
    const auto error = died && (rank == 0 || options_.rank == 0) ? died(rank) : store_.died(rank);
    if (!error || store_.has(heard(rank))) continue;
    check_last_words();
    throw PeerError(*error);
  }
}

// Ranks that have other members in mind hear so from those that wait. If a rank `comes`, the last
// word may be of a dead process, unless it is of the same world, where each name is used once.
void Assembly::check_members(bool comes) {
  const Members theirs = Members::from_text(store_.get(latest()));
  if (theirs.ranks.empty() || theirs.ranks == members_.ranks) return;
  if (comes && theirs.world != members_.world) return;
  members_.told = theirs.id;
  const std::string own = members_.to_text();
  store_.set(latest(), own);
  if (!theirs.overlap(members_)) return;
  poll(store_.now() + kLastWords,  // for the other to read it, and to answer
       [&] { return theirs.told == members_.id || store_.get(latest()) != own; });
  if (options_.members.empty()) {
    throw PeerError(theirs.rank,
                    sizes_text(theirs.rank, static_cast<int>(theirs.ranks.size()), options_.size));
  }
  throw PeerError(theirs.rank,
                  str("rank ", theirs.number(), " makes group '", options_.name, "' of the ranks ",
                      theirs.shown(), ", and this one, rank ", members_.number(), ", of the ranks ",
                      members_.shown(),
                      ": every rank must call new_group for each group, also for those that "
                      "it is not part of, in the same order and with the same ranks"));
}

// Another process that writes this rank's card is the same rank. Both hear of it, and rank 0.
void Assembly::check_card() {
  const std::string now = store_.get(card(options_.rank));
  if (now == mine_) return;
  if (now.starts_with('!')) throw PeerError(options_.rank, now.substr(1));
  const auto process = [&](const std::string& text) {
    const Card card = Card::from_text(text, options_.rank);
    return str("process ", card.pid, " on ", card.host);
  };
  const std::string text = str("two processes are rank ", options_.rank, " of ", options_.size,
                               ": ", process(now.substr(is_over(now) ? 1 : 0)), ", and ",
                               process(mine_), ": start each rank once");
  store_.say(cards(), str(options_.rank), '!' + text);
  throw PeerError(options_.rank, text);
}

// Has somebody given up since this rank came?
bool Assembly::failed() { return store_.has(trouble()) && store_.get(trouble()) != failure_; }

// A rank that gave up says so before it ends.
void Assembly::check_last_words() {
  if (failed()) retell(store_.get(trouble()));
  if (stage_ > 0 && store_.has(answer(stage_))) hear();
}

void Assembly::check(const std::vector<Rank>& awaited) {
  if (deadline_.passed()) throw late(awaited);
  if (options_.rank == 0 ? failed() : store_.has(answer(stage_))) check_last_words();
  check_roster();
}

// A rank that comes a moment later would take what it finds for the word of an older meeting, so it
// is told again.
void Assembly::give_up(const std::exception& error) {
  const std::string word = disagreement_.empty() ? word_of(options_.rank, error) : disagreement_;
  const bool waited = dynamic_cast<const TimeoutError*>(&error) != nullptr;
  if (const auto* peer = dynamic_cast<const PeerError*>(&error)) excuse({peer->rank()});
  int64_t said = -1;
  int times = 0;
  const auto all_have_heard = [&] {
    const int64_t now = store_.said(cards());
    if (now != said) tell_failure(str(members_.id, '.', times++, ' ', options_.world, ' ', word));
    said = now;
    if (!options_.lingers) return true;
    const bool all = waited || said - before_ >= options_.size - (mine_.empty() ? 1 : 0);
    return !store_.served() || (options_.rank == 0 ? all && !has_readers() : all || is_answered());
  };
  try {
    poll(store_.now() + kLastWords, all_have_heard);
    if (store_.served() && !mine_.empty()) store_.set(card(options_.rank), kLeft + mine_);
  } catch (const std::exception&) {
    return;  // the store may be what failed
  }
}

// The others are in this stage or wait for the next.
void Assembly::tell_failure(const std::string& word) {
  if (!failed() || value_of(trouble()) == told_) store_.set(trouble(), word);  // the first counts
  told_ = word;
  if (options_.rank != 0) return;
  for (size_t stage = std::max<size_t>(stage_, 1);
       stage < std::min(stage_ + 2, kStages.size()) && prefix_ != base_; ++stage) {
    store_.set(answer(stage), '!' + word);
  }
  store_.set(roster(), '!' + word);
}

void Assembly::end() {
  if (!store_.served() || options_.size == 1 || !options_.lingers) return;
  try {
    if (options_.rank == 0) poll(store_.now() + kReaders, [&] { return !has_readers(); });
    store_.set(card(options_.rank), kMet + mine_);
  } catch (const std::exception&) {
    return;  // rank 0 has left, and the store with it: this rank needs it no more
  }
}

// Rank 0 waits for these no more.
void Assembly::excuse(const std::vector<Rank>& ranks) {
  cards_.resize(static_cast<size_t>(options_.size));
  for (const Rank rank : ranks) {
    if (rank >= 0 && rank < options_.size) cards_[static_cast<size_t>(rank)] = kMet;
  }
}

// Tells whether rank 0 still has to wait: a rank that has read the last word takes its card back.
bool Assembly::has_readers() {
  excuse({});
  std::vector<Rank> readers;
  std::vector<std::string> keys;
  for (Rank rank = 1; rank < options_.size; ++rank) {
    std::string& theirs = cards_[static_cast<size_t>(rank)];
    if (theirs.empty() && options_.size <= kSearch) theirs = value_of(card(rank));
    if (theirs.empty() || is_over(theirs)) continue;
    readers.push_back(rank);
    keys.push_back(card(rank));
  }
  const Words now = keys.empty() ? keys : store_.get_all(keys);
  for (size_t i = 0; i < readers.size(); ++i) {
    const Rank rank = readers[i];
    const bool dead = (died ? died(rank) : store_.died(rank)).has_value();
    if (dead || now[i] != cards_[static_cast<size_t>(rank)])
      cards_[static_cast<size_t>(rank)] = kMet;
  }
  return std::ranges::any_of(
      readers, [&](Rank rank) { return !is_over(cards_[static_cast<size_t>(rank)]); });
}

void Assembly::set_apart(Rank other, const std::string& why) {
  store_.set(apart(str('/', options_.rank, '/', other)), why);
  store_.set(apart(""), "some");
}

std::string Assembly::apart_from(Rank other) {
  const std::string pair = apart(str('/', other, '/', options_.rank));
  return store_.has(pair) ? store_.get(pair) : "";
}

TimeoutError Assembly::late(const std::vector<Rank>& ranks) {
  excuse(ranks);
  const bool more = ranks.size() >= kMostNamed;
  std::string text = str("Timed out after ", to_seconds(store_.now() - deadline_.start()),
                         " s waiting for ", list_of(ranks), more ? " and maybe more" : "", " of ",
                         options_.size, ", which ", ranks.size() == 1 ? "has" : "have",
                         stage_ == 0 ? " not joined" : " not finished joining", " the group");
  if (!options_.members.empty()) {
    text += str(" of the ranks ", members_.shown(),
                ": does every rank call new_group for each group, in the same order?");
  } else {
    text +=
        ": was every rank started, with the same world size and backend (RINGCOMM_AS on all ranks "
        "or on none)?";
  }
  if (!failure_.empty()) text += " Before, it failed with: " + Failure(failure_).text;
  return TimeoutError(text);
}

// The ranks that have said nothing in this stage, or the first of many; rank 0 if all have by now.
std::vector<Rank> Assembly::silent() {
  std::vector<Rank> silent;
  find_silent(speakers_, silent);
  return silent.empty() ? std::vector{0} : silent;
}

// By halves: a few questions find few of many ranks.
void Assembly::find_silent(std::span<const Rank> ranks, std::vector<Rank>& silent) {
  if (ranks.empty() || silent.size() >= kMostNamed) return;
  std::vector<std::string> keys;
  for (const Rank rank : ranks) keys.push_back(key(rank));
  const auto here = [](const auto& word) { return !word.starts_with(kMet); };
  if (store_.has_all(keys) && (stage_ > 0 || std::ranges::all_of(store_.get_all(keys), here))) {
    return;
  }
  if (ranks.size() == 1) return silent.push_back(ranks[0]);
  find_silent(ranks.first(ranks.size() / 2), silent);
  find_silent(ranks.subspan(ranks.size() / 2), silent);
}

}  // namespace ringcomm
