#include "comm/recorder.h"

#include "comm/operation.h"

namespace ringcomm {

const char* to_string(Record::State state) {
  constexpr const char* names[] = {"queued", "running", "done", "failed"};
  return names[static_cast<size_t>(state)];
}

uint64_t Recorder::begin(const Descriptor& descriptor) {
  const auto now = Clock::now();
  const Lock lock(mutex_);
  ring_[begun_ % kRecords] = {descriptor, Record::State::kRunning, now, now};
  return begun_++;
}

void Recorder::end(uint64_t ticket, bool good) {
  const auto now = Clock::now();
  const Lock lock(mutex_);
  if (begun_ - ticket > kRecords) return;  // overwritten meanwhile
  Record& record = ring_[ticket % kRecords];
  record.state = good ? Record::State::kDone : Record::State::kFailed;
  record.ended = now;
}

std::vector<Record> Recorder::records() const {
  const Lock lock(mutex_);
  std::vector<Record> records;
  for (uint64_t i = begun_ - std::min(begun_, kRecords); i < begun_; ++i) {
    records.push_back(ring_[i % kRecords]);
  }
  return records;
}

std::string Recorder::name_of(uint64_t sequence) const {
  std::string name = str("#", sequence);
  const Lock lock(mutex_);
  for (const Record& record : ring_) {
    if (sequence != 0 && record.descriptor.sequence == sequence) {
      return str(name, " ", to_text(record.descriptor));
    }
  }
  return name;
}

}  // namespace ringcomm
