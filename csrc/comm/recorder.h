// The flight recorder keeps the last operations of a group, for the texts of its errors and for
// people who ask when it hangs.
#pragma once

#include <array>

#include "base/deadline.h"
#include "base/mutex.h"
#include "transport/transport.h"

namespace ringcomm {

struct Record {
  enum class State : uint8_t { kQueued, kRunning, kDone, kFailed };

  Descriptor descriptor;  // of a collective, or of a send or receive (sequence 0)
  State state = State::kQueued;
  Clock::time_point began, ended;  // ended: when done or failed
};

const char* to_string(Record::State state);

// Any thread may call any function.
class Recorder {
 public:
  static constexpr uint64_t kRecords = 256;

  // An operation begins; the ticket is for end().
  uint64_t begin(const Descriptor& descriptor);
  void end(uint64_t ticket, bool good);

  std::vector<Record> records() const;  // oldest first
  // "#412 all_reduce float32[10] SUM", or "#412" when that was too long ago.
  std::string name_of(uint64_t sequence) const;

 private:
  mutable Mutex mutex_;
  std::array<Record, kRecords> ring_ RINGCOMM_GUARDED_BY(mutex_);
  uint64_t begun_ RINGCOMM_GUARDED_BY(mutex_) = 0;
};

}  // namespace ringcomm
