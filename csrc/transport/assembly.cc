#include "transport/assembly.h"

namespace ringcomm {
namespace {

constexpr auto kFirstPause = std::chrono::microseconds(100);
constexpr auto kLongestPause = std::chrono::milliseconds(500);
constexpr int kShare = 4;                               // of the time that has passed
constexpr auto kPiece = std::chrono::milliseconds(50);  // of a pause, between looks for Ctrl-C

// A word of failure: the rank concerned, or -1 where that is in the text; then what to say.
std::string word_of(Rank self, const std::exception& error) {
  if (const auto* peer = dynamic_cast<const PeerError*>(&error)) {
    return str(peer->rank(), ' ', peer->what());
  }
  if (dynamic_cast<const TimeoutError*>(&error) != nullptr) return str(-1, ' ', error.what());
  return str(self, " rank ", self, " failed: ", error.what());
}

[[noreturn]] void retell(const std::string& word) {
  const size_t space = std::min(word.find(' '), word.size());
  const std::string text = word.substr(std::min(space + 1, word.size()));
  Rank rank = -1;
  TextReader(word) >> rank;
  if (rank < 0) throw TimeoutError(text);
  throw PeerError(rank, text);
}

}  // namespace

// Re-initialisation on a store that survived counts on: every life has its own generation. Where
// ranks were missing in one that failed, those that were in it fill it up. A rank that comes to it
// for the first time is late: it learns what failed.
void Assembly::begin() {
  do {
    const int64_t arrivals = store_.add(str("ringcomm/", options_.scope, "/arrivals"), 1);
    prefix_ = str("ringcomm/", options_.scope, "/", (arrivals - 1) / options_.size, "/");
  } while (store_.has_all({trouble(), key(options_.rank)}));
}

std::vector<std::string> Assembly::exchange(const std::string& mine) {
  store_.set(key(options_.rank), mine);
  TextReader in(options_.rank == 0 ? write_list() : read_list());
  ++stage_;
  std::vector<std::string> lines(static_cast<size_t>(options_.size) + 1);
  for (std::string& line : lines) std::getline(in, line);
  return lines;
}

std::string Assembly::read_list() {
  if (!await([&] { return store_.has(list(stage_)); })) throw late(silent(0));
  std::string text = store_.get(list(stage_));
  if (text.starts_with('!')) retell(text.substr(1));
  return text;
}

// In the long run every other question is whether somebody has given up.
std::string Assembly::write_list() {
  std::vector<std::string> keys;
  for (Rank rank = 0; rank < options_.size; ++rank) keys.push_back(key(rank));
  const auto start = Clock::now();
  bool asks = true;
  const auto all = [&] {
    asks = !asks || Clock::now() - start < kLongestPause;
    if (asks) return store_.has_all(keys);
    if (store_.has(trouble())) check_last_words();
    return false;
  };
  if (!await(all)) throw late(silent(0));
  std::string text;
  for (const std::string& key : keys) text += store_.get(key) + '\n';
  text += options_.word;
  store_.set(list(stage_), text);
  return text;
}

bool Assembly::await(auto&& ready) {
  const auto start = Clock::now();
  while (!ready()) {
    if (deadline_.passed()) return false;
    rest(std::clamp<Clock::duration>((Clock::now() - start) / kShare, kFirstPause, kLongestPause));
  }
  return true;
}

void Assembly::rest(Clock::duration pause) {
  const Deadline end(std::min(pause, deadline_.left()));
  do {
    options_.interrupt();
    check_dead();
  } while (!store_.wait(std::min<Clock::duration>(kPiece, end.left())) && !end.passed());
}

// Of a dead rank what it has said still counts. Rank 0 tells the others of another's death. Without
// a server its words may be lost to a rank that comes later, which so looks at all ranks itself.
void Assembly::check_dead() {
  for (Rank rank = 0; rank < options_.size; ++rank) {
    const auto error = died && (rank == 0 || options_.rank == 0) ? died(rank) : store_.died(rank);
    if (!error || store_.has(options_.rank == 0 ? key(rank) : list(stage_))) continue;
    check_last_words();
    throw PeerError(*error);
  }
}

// A rank that gave up says so before it ends.
void Assembly::check_last_words() {
  if (store_.has(trouble())) retell(store_.get(trouble()));
  if (store_.has(list(stage_))) read_list();
}

void Assembly::check(const std::vector<Rank>& awaited) {
  if (deadline_.passed()) throw late(awaited);
  if (store_.has(options_.rank == 0 ? trouble() : list(stage_))) check_last_words();
}

// The others are in this stage or wait for the next.
void Assembly::give_up(const std::exception& error) {
  if (prefix_.empty()) return;
  const std::string word = word_of(options_.rank, error);
  try {
    if (!store_.has(trouble())) store_.set(trouble(), word);  // the first counts
    if (options_.rank != 0) return;
    for (size_t stage = stage_; stage < std::min(stage_ + 2, kStages.size()); ++stage) {
      store_.set(list(stage), '!' + word);
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
  return TimeoutError(str("Timed out after ", to_seconds(deadline_.elapsed()), " s waiting for ",
                          list_of(ranks), " of ", options_.size, ", which ",
                          stage_ == 0 ? "has not joined" : "has not finished joining",
                          " the group: was every rank started, with the same world size?"));
}

// The ranks that have not written theirs; `otherwise` if all have by now.
std::vector<Rank> Assembly::silent(Rank otherwise) {
  std::vector<Rank> missing;
  for (Rank rank = 0; rank < options_.size; ++rank) {
    if (!store_.has(key(rank))) missing.push_back(rank);
  }
  return missing.empty() ? std::vector{otherwise} : missing;
}

}  // namespace ringcomm
