// The flight recorder keeps the last operations of a group: for the texts of its errors, for people
// who ask when it hangs, and in a file for those who ask afterwards. ringcomm/tools/records.py
// reads the same layout.
#pragma once

#include <optional>
#include <span>

#include "base/fd.h"
#include "base/mutex.h"
#include "base/ticks.h"
#include "plan/plan.h"
#include "transport/transport.h"

namespace ringcomm {

inline constexpr int kKinds = kCollectives + 2;  // sends and receives, too
// The word of a record's descriptor that peers do not compare: the bytes of the larger side, if the
// count does not say it.
inline constexpr int kBytesWord = Descriptor::kWords - 1;

// Times are ticks(), and 0: not yet. Waits are nanoseconds.
struct Record {
  enum class State : uint32_t { kQueued, kRunning, kDone, kFailed };

  uint64_t number = 0;    // the ticket and 1; 0 while the record is written
  Descriptor descriptor;  // of a collective, or of a send or receive (sequence 0)
  int64_t called = 0, began = 0, ended = 0;
  uint64_t sent = 0;  // bytes to other hosts
  uint64_t waited = 0, longest = 0;
  Rank longest_peer = -1;
  uint32_t resent = 0;  // frames to the ranks of the group, of other groups as well
  State state = State::kQueued;
  uint32_t line = 0;  // of the program, that called: see Operation
};
static_assert(sizeof(Record) == 128);

// Whose operations are recorded.
struct Recorded {
  std::string job, group = "default";
  Rank rank = 0;
  int size = 0;
  std::vector<int> global_ranks;  // empty: the same as in the group
  bool device = false;
  std::vector<Algorithm> registered;  // that the group may use
  uint64_t group_id = 0;              // equal on all ranks of the group, and no other group's
  int (*ring)(int rank, uint64_t bytes) = nullptr;  // see ProcessConfig
};

// Any thread may call any function.
class Recorder {
 public:
  static constexpr uint64_t kRecords = 4096;
  static constexpr uint64_t kLook = 256;  // operations between looks at both clocks

  // `first`: a moment long before. Throws SystemError.
  explicit Recorder(const Recorded& recorded = {}, const Moment& first = {});

  // An operation is called, and waits for its turn. The ticket is for the other functions.
  uint64_t call(const Descriptor& descriptor, uint32_t line);
  // It begins; without a ticket it was called just now.
  uint64_t begin(const Descriptor& descriptor, uint32_t line,
                 std::optional<uint64_t> called = std::nullopt);
  void waited(uint64_t ticket, Rank peer, Clock::duration time);
  void end(uint64_t ticket, bool good, const Traffic& traffic = {});
  // The group fails. Without a reason: it was destroyed, or its program ends.
  void close(const std::string& why = {});

  // "#412 all_reduce float32[10] SUM", or "#412" when that was too long ago.
  std::string name_of(uint64_t sequence) const;
  // What the file shows.
  std::string bytes() const;

 private:
  struct Head {
    char magic[8];
    uint64_t begun;  // operations
    int64_t steady, wall;
    uint64_t sent, resent, broken;  // by all operations; the last are connections
    int64_t seen;        // by Python, each second: the wall clock, while the process lives
    char about[2968];    // JSON
    uint64_t left;       // 1: the group was destroyed, or its program has ended
    Moment first, last;  // of the process, and lately: they tell what ticks are
    char failure[1024];
  };
  static_assert(sizeof(Head) == 4096);
  struct Totals {  // of one collective, or of sends, or of receives
    uint64_t operations, bytes, ticks;
  };
  // In the file: a Head, each rank's global rank, and then these.
  struct Places {
    explicit Places(size_t size)
        : records(sizeof(Head) + (size * sizeof(int) + 63) / 64 * 64),
          totals(records + kRecords * sizeof(Record)),
          waits(totals + kKinds * sizeof(Totals)),
          end(waits + size * sizeof(uint64_t)) {}  // a wait for each rank
    size_t records, totals, waits, end;
  };

  Head& head() const { return *reinterpret_cast<Head*>(memory_.data()); }
  std::span<Record> ring() const {
    return {reinterpret_cast<Record*>(memory_.data() + places_.records), kRecords};
  }
  Totals* totals() const { return reinterpret_cast<Totals*>(memory_.data() + places_.totals); }
  uint64_t* waits() const { return reinterpret_cast<uint64_t*>(memory_.data() + places_.waits); }
  uint64_t add(const Descriptor& descriptor, uint32_t line, int64_t now) RINGCOMM_REQUIRES(mutex_);
  Record* find(uint64_t ticket) RINGCOMM_REQUIRES(mutex_);

  mutable Mutex mutex_;
  const size_t size_;  // ranks
  const Places places_;
  const Mapping memory_;
};

}  // namespace ringcomm
