#include "transport/assembly.h"

#include "transport/roster.h"

namespace ringcomm {
namespace {

constexpr auto kFirstPause = std::chrono::microseconds(100);
constexpr auto kLongestPause = std::chrono::milliseconds(500);
// Of a group whose ranks all ask the store: it takes so many questions in these pauses.
constexpr auto kFirstShare = std::chrono::microseconds(20),
               kLongestShare = std::chrono::microseconds(1000);
constexpr int kShare = 4;                               // of the time that has passed
constexpr auto kPiece = std::chrono::milliseconds(50);  // of a pause, between looks for Ctrl-C
constexpr int kSearch = 64;  // so many ranks find by themselves who is late
constexpr auto kNamesTime = std::chrono::seconds(2);  // for rank 0 to say who it is
constexpr size_t kMostNamed = 16;                     // ranks that have not come
constexpr Rank kNobody = -1, kAll = -2;               // in a word of failure

// A word of failure: the rank concerned, or kNobody where that is in the text; then what to say.
std::string word_of(Rank self, const std::exception& error) {
  if (const auto* peer = dynamic_cast<const PeerError*>(&error)) {
    return str(peer->rank(), ' ', peer->what());
  }
  if (dynamic_cast<const TimeoutError*>(&error) != nullptr) return str(kNobody, ' ', error.what());
  return str(self, " rank ", self, " failed: ", error.what());
}

[[noreturn]] void retell(const std::string& word) {
  const size_t space = std::min(word.find(' '), word.size());
  const std::string text = word.substr(std::min(space + 1, word.size()));
  Rank rank = kNobody;
  TextReader(word) >> rank;
  if (rank == kAll) throw UsageError(text);
  if (rank < 0) throw TimeoutError(text);
  throw PeerError(rank, text);
}

}  // namespace

// Re-initialisation on a store that survived counts on: every life has its own generation. Where
// ranks were missing in one that failed, those that were in it fill it up. A rank that comes to it
// for the first time is late: it learns what failed.
void Assembly::begin() {
  const std::string scope = str("ringcomm/", options_.scope, "/");
  do {
    const int64_t arrivals = store_.add(scope + "arrivals", 1);
    prefix_ = str(scope, (arrivals - 1) / options_.size, "/");
  } while (store_.has_all({trouble(), key(options_.rank)}));
  store_.set(latest(), str(options_.rank, ' ', options_.size));
}

std::string Assembly::exchange(const std::string& mine, const std::vector<Rank>& speakers,
                               const Answer& answer) {
  speakers_ = speakers;
  if (std::ranges::binary_search(speakers, options_.rank)) {
    store_.say(list(stage_), str(options_.rank), mine);
  }
  const std::string text = options_.rank == 0 ? answer_all(answer) : hear();
  ++stage_;
  return text;
}

std::string Assembly::hear() {
  const auto answered = [&] { return store_.has(answer(stage_)); };
  if (!await(answered)) wait_for_names();
  std::string text = store_.get(answer(stage_));
  if (text.starts_with('!')) retell(text.substr(1));
  return text;
}

// Rank 0 finds the missing ranks of a large group, for all: else each would ask for each.
void Assembly::wait_for_names() {
  if (options_.size <= kSearch) throw late(silent());
  const auto end = store_.now() + kNamesTime;
  while (!store_.has(answer(stage_))) {
    if (store_.now() >= end) throw late(store_.has(key(0)) ? silent() : std::vector{0});
    options_.interrupt();
    store_.wait(kPiece);
  }
}

// In the long run every other question is whether somebody has given up.
std::string Assembly::answer_all(const Answer& make) {
  const auto start = store_.now();
  bool asks = true;
  const auto all = [&] {
    asks = !asks || store_.now() - start < kLongestPause;
    if (asks) return store_.said(list(stage_)) >= std::ssize(speakers_);
    if (store_.has(trouble())) check_last_words();
    return false;
  };
  if (!await(all)) throw late(silent());
  std::vector<std::string> keys;
  for (const Rank rank : speakers_) keys.push_back(key(rank));
  std::string text;
  try {
    text = make(store_.get_all(keys));
  } catch (const UsageError& error) {
    disagreement_ = str(kAll, ' ', error.what());
    throw;
  }
  store_.set(answer(stage_), text);
  return text;
}

bool Assembly::await(const std::function<bool()>& ready) {
  const Clock::duration first = std::max<Clock::duration>(kFirstPause, options_.size * kFirstShare);
  const Clock::duration longest =
      std::max<Clock::duration>(kLongestPause, options_.size * kLongestShare);
  const auto start = store_.now();
  bool looks = false;
  while (!ready()) {
    const auto passed = store_.now() - start;
    if (store_.now() >= deadline_.at()) return false;
    looks = !looks && stage_ == 0 && passed > kLongestPause;  // every other time
    if (looks) check_size();
    rest(std::clamp<Clock::duration>(passed / kShare, first, longest));
  }
  return true;
}

void Assembly::rest(Clock::duration pause) {
  const auto end = std::min(store_.now() + pause, deadline_.at());
  do {
    options_.interrupt();
    check_dead();
    if (store_.wait(std::clamp<Clock::duration>(end - store_.now(), {}, kPiece))) return;
  } while (store_.now() < end);
}

// Of a dead rank what it has said still counts. Rank 0 tells the others of another's death. Without
// a server its words may be lost to a rank that comes later, which so looks at all ranks itself.
void Assembly::check_dead() {
  for (Rank rank = 0; rank < options_.size; ++rank) {
    const auto error = died && (rank == 0 || options_.rank == 0) ? died(rank) : store_.died(rank);
    if (!error || store_.has(options_.rank == 0 ? key(rank) : answer(stage_))) continue;
    check_last_words();
    throw PeerError(*error);
  }
}

// Who comes last may think the group larger or smaller. It hears so from those who wait.
void Assembly::check_size() {
  TextReader in(store_.get(latest()));
  Rank rank = 0;
  int size = 0;
  if (!(in >> rank >> size) || size == options_.size) return;
  store_.set(latest(), str(options_.rank, ' ', options_.size));
  throw PeerError(rank, sizes_text(rank, size, options_.size));
}

// A rank that gave up says so before it ends.
void Assembly::check_last_words() {
  if (store_.has(trouble())) retell(store_.get(trouble()));
  if (store_.has(answer(stage_))) hear();
}

void Assembly::check(const std::vector<Rank>& awaited) {
  if (deadline_.passed()) throw late(awaited);
  if (store_.has(options_.rank == 0 ? trouble() : answer(stage_))) check_last_words();
}

// The others are in this stage or wait for the next.
void Assembly::give_up(const std::exception& error) {
  if (prefix_.empty()) return;
  const std::string word = disagreement_.empty() ? word_of(options_.rank, error) : disagreement_;
  try {
    if (!store_.has(trouble())) store_.set(trouble(), word);  // the first counts
    if (options_.rank != 0) return;
    for (size_t stage = stage_; stage < std::min(stage_ + 2, kStages.size()); ++stage) {
      store_.set(answer(stage), '!' + word);
    }
  } catch (const std::exception&) {
    return;  // the store may be what failed
  }
}

void Assembly::set_apart(Rank other, const std::string& why) {
  store_.set(apart(str('/', options_.rank, '/', other)), why);
  store_.set(apart(""), "some");
}

std::string Assembly::apart_from(Rank other) {
  const std::string pair = apart(str('/', other, '/', options_.rank));
  return store_.has(pair) ? store_.get(pair) : "";
}

TimeoutError Assembly::late(const std::vector<Rank>& ranks) const {
  const bool more = ranks.size() >= kMostNamed;
  return TimeoutError(str("Timed out after ", to_seconds(store_.now() - deadline_.start()),
                          " s waiting for ", list_of(ranks), more ? " and maybe more" : "", " of ",
                          options_.size, ", which ",
                          stage_ == 0 ? "has not joined" : "has not finished joining",
                          " the group: was every rank started, with the same world size?"));
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
  if (store_.has_all(keys)) return;
  if (ranks.size() == 1) return silent.push_back(ranks[0]);
  find_silent(ranks.first(ranks.size() / 2), silent);
  find_silent(ranks.subspan(ranks.size() / 2), silent);
}

}  // namespace ringcomm
