#include "comm/recorder.h"

#include <ranges>

#include "comm/operation.h"
#include "plan/registry.h"

namespace ringcomm {
namespace {

// `text` as a string of JSON. Names are a user's: all of the head has to fit.
std::string quoted(std::string text) {
  if (text.size() > 128) text.resize(128);
  for (char& letter : text) {
    if (letter == '"' || letter == '\\' || static_cast<unsigned char>(letter) < ' ') letter = '_';
  }
  return str('"', text, '"');
}

template <typename Value>
std::string names(int count, std::initializer_list<const char*> more = {}) {
  std::vector<std::string> all;
  for (int i = 0; i < count; ++i) all.push_back(quoted(to_string(static_cast<Value>(i))));
  for (const char* name : more) all.push_back(quoted(name));
  return str('[', joined(all), ']');
}

std::string registered_in(const Recorded& recorded) {
  std::vector<std::string> all;
  for (const Algorithm each : recorded.registered | std::views::take(16)) {  // the head has to fit
    all.push_back(str('"', static_cast<int>(each), "\":", quoted(registered_name(each))));
  }
  return str('{', joined(all), '}');
}

std::string about(const Recorded& recorded, size_t ranks_at, size_t records_at, size_t totals_at,
                  size_t waits_at) {
  char host[256] = {};
  ::gethostname(host, sizeof host - 1);
  return str("{\"version\":2,\"job\":", quoted(recorded.job), ",\"pid\":", ::getpid(),
             ",\"host\":", quoted(host), ",\"rank\":", recorded.rank, ",\"size\":", recorded.size,
             ",\"group\":", quoted(recorded.group), ",\"meeting\":", recorded.group_id,
             ",\"device\":", recorded.device ? "true" : "false",
             ",\"capacity\":", Recorder::kRecords, ",\"record_bytes\":", sizeof(Record),
             ",\"ranks_at\":", ranks_at, ",\"records_at\":", records_at,
             ",\"totals_at\":", totals_at, ",\"waits_at\":", waits_at,
             ",\"collectives\":", names<Collective>(kCollectives, {"send", "recv"}),
             ",\"dtypes\":", names<DType>(kDTypes), ",\"ops\":", names<ReduceOp>(kReduceOps),
             ",\"algorithms\":", names<Algorithm>(kNamed),
             ",\"registered\":", registered_in(recorded), "}");
}

int global_rank(const Recorded& recorded, Rank rank) {
  return recorded.global_ranks.empty() ? rank : recorded.global_ranks[static_cast<size_t>(rank)];
}

// In the file that Python makes for it, if it can; else in memory.
Mapping map(const Recorded& recorded, size_t bytes) {
  const Fd file(recorded.ring ? recorded.ring(global_rank(recorded, recorded.rank), bytes) : -1);
  return file ? Mapping::inherited(file, bytes) : Mapping(bytes);
}

void copy_text(std::span<char> to, const std::string& text) {
  std::memcpy(to.data(), text.data(), std::min(text.size(), to.size() - 1));
}

}  // namespace

Recorder::Recorder(const Recorded& recorded, const Moment& first)
    : size_(static_cast<size_t>(recorded.size)),
      places_(size_),
      memory_(map(recorded, places_.end)) {
  const auto wall = std::chrono::system_clock::now().time_since_epoch();
  head().first = first;
  head().last = Moment();
  head().steady = head().last.steady;
  head().wall = std::chrono::nanoseconds(wall).count();
  auto* const ranks = reinterpret_cast<int*>(memory_.data() + sizeof(Head));
  for (Rank each = 0; each < recorded.size; ++each) ranks[each] = global_rank(recorded, each);
  copy_text(head().about,
            about(recorded, sizeof(Head), places_.records, places_.totals, places_.waits));
  std::memcpy(head().magic, "RINGREC1", sizeof head().magic);
}

Record* Recorder::find(uint64_t ticket) {
  Record& record = ring()[ticket % kRecords];
  return record.number == ticket + 1 ? &record : nullptr;  // else overwritten meanwhile
}

uint64_t Recorder::add(const Descriptor& descriptor, uint32_t line, int64_t now) {
  const uint64_t ticket = head().begun++;
  if (ticket % kLook == 0) head().last = Moment();
  Record& record = ring()[ticket % kRecords];
  record = {.descriptor = descriptor, .called = now, .line = line};
  record.number = ticket + 1;
  return ticket;
}

uint64_t Recorder::call(const Descriptor& descriptor, uint32_t line) {
  const int64_t now = ticks();
  const Lock lock(mutex_);
  return add(descriptor, line, now);
}

uint64_t Recorder::begin(const Descriptor& descriptor, uint32_t line,
                         std::optional<uint64_t> called) {
  const int64_t now = ticks();
  const Lock lock(mutex_);
  const uint64_t ticket = called ? *called : add(descriptor, line, now);
  if (Record* const record = find(ticket)) {
    record->descriptor = descriptor;
    record->began = now;
    record->state = Record::State::kRunning;
  }
  return ticket;
}

void Recorder::waited(uint64_t ticket, Rank peer, Clock::duration time) {
  const Lock lock(mutex_);
  const auto passed = static_cast<uint64_t>(std::chrono::nanoseconds(time).count());
  if (static_cast<size_t>(peer) < size_) waits()[peer] += passed;
  Record* const record = find(ticket);
  if (record == nullptr) return;
  record->waited += passed;
  if (passed <= record->longest) return;
  record->longest = passed;
  record->longest_peer = peer;
}

void Recorder::end(uint64_t ticket, bool good, const Traffic& traffic) {
  const int64_t now = ticks();
  const Lock lock(mutex_);
  Record* const record = find(ticket);
  if (record == nullptr || record->ended != 0) return;
  record->state = good ? Record::State::kDone : Record::State::kFailed;
  record->ended = now;
  record->sent = traffic.sent;
  record->resent = static_cast<uint32_t>(traffic.resent);
  head().sent += traffic.sent;
  head().resent += traffic.resent;
  head().broken += traffic.broken;
  if (!good) return;
  const uint64_t* const words = record->descriptor.words;
  Totals& total = totals()[words[0] & 0xff];
  ++total.operations;
  total.bytes +=
      std::max(words[kBytesWord], words[1] * size_of(static_cast<DType>(words[0] >> 8 & 0xff)));
  total.ticks += static_cast<uint64_t>(record->ended - record->began);
}

void Recorder::close(const std::string& why) {
  const Lock lock(mutex_);
  if (why.empty()) head().left = 1;
  copy_text(head().failure, why);
}

std::string Recorder::name_of(uint64_t sequence) const {
  std::string name = str("#", sequence);
  const Lock lock(mutex_);
  for (const Record& record : ring().first(std::min(head().begun, kRecords))) {
    if (sequence != 0 && record.descriptor.sequence == sequence)
      return str(name, " ", to_text(record.descriptor));
  }
  return name;
}

std::string Recorder::bytes() const {
  const Lock lock(mutex_);
  head().last = Moment();
  return {reinterpret_cast<const char*>(memory_.data()), places_.end};
}

}  // namespace ringcomm
