// The verifier's memory: symbolic contents and the clocks of accesses, kept for stretches that are
// alike, so that long messages are as quick as short ones. See verify.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "verify/verify.h"

namespace ringcomm::verify_detail {

constexpr uint32_t kNoEvent = UINT32_MAX;

class Violation : public std::runtime_error {
 public:
  explicit Violation(const std::string& what, uint32_t other = kNoEvent)
      : std::runtime_error(what), other(other) {}
  uint32_t other;  // the event that it is about, beside the one that finds it
};

using Time = uint32_t;
using Clock = std::vector<Time>;  // a rank's knowledge of each rank

// Returns a rank's contribution. Contributions are added up modulo 2^64. Other ones, or the same
// ones more than once, have the same sum with a probability of 2^-64.
inline uint64_t mark(Rank rank) { return mix(0x5eed, static_cast<uint64_t>(rank)); }

// The content of a byte of memory: parts of the inputs of operation `operation` - 1.
struct Value {
  uint32_t operation = 0;  // 0: nothing was written here
  uint64_t index = 0;      // which byte of the inputs
  uint64_t ranks = 0;      // whose contributions: the sum of their marks
  bool final = false;
  uint64_t order = 0;  // names the sequence of additions
  bool operator==(const Value&) const = default;

  Value after(uint64_t bytes) const {
    Value value = *this;
    if (operation > 0) value.index += bytes;
    return value;
  }
};

// A run of bytes whose values follow one another.
struct ValueRun {
  uint64_t bytes;
  Value value;  // of the first
};
using ValueRuns = std::vector<ValueRun>;

struct Read {  // when last
  Rank rank;
  Time time;
  uint32_t event;
};

// A stretch of memory that was written and read together.
struct Cell {
  Cell(uint64_t begin, uint64_t end, const Value& value = {})
      : begin(begin), end(end), value(value) {}
  uint64_t begin, end;
  Value value;  // of its first byte
  Time written = 0;
  bool changed = false;  // by a plan
  int16_t writer = -1;
  uint16_t lent = 0;
  uint32_t event = kNoEvent;  // that wrote it
  std::vector<Read> reads;    // since it was written, one of each rank

  void note(const Read& next);
  void check_reads(const Clock& now) const;
};

// Memory that is contiguous: cells without gaps.
class Region {
 public:
  explicit Region(uint64_t bytes = 0) : cells_{{0, bytes}} {}

  uint64_t bytes() const { return cells_.back().end; }
  void grow(uint64_t bytes) { cells_.back().end = std::max(cells_.back().end, bytes); }
  // Returns the cells of [begin, end), cut at both.
  std::pair<size_t, size_t> cells(uint64_t begin, uint64_t end);
  Cell& operator[](size_t index) { return cells_[index]; }
  // Puts cells in the place of first … last - 1.
  void replace(size_t first, size_t last, const std::vector<Cell>& by);

 private:
  size_t cut(uint64_t at);
  std::vector<Cell> cells_;
};

struct Range {
  Region* region;
  uint64_t begin;
  uint64_t bytes;
  bool operator==(const Range&) const = default;
  uint64_t end() const { return begin + bytes; }
};

// The ranks' shared memory with both halves, and each operation's user memory.
class Memory {
 public:
  explicit Memory(const std::vector<Program>& sequence);

  // Finds where an operand lies; throws if it is out of bounds, misaligned, or not `rank`'s to use
  // so.
  Range locate(const Ref& ref, uint64_t bytes, size_t operation, Rank rank, bool write);

  // Reads what is there for `rank`; shared memory must hold something of the same operation.
  ValueRuns read(const Range& range, size_t operation, Rank rank, const Clock& now);
  void write(const Range& range, const ValueRuns& runs, Rank rank, const Clock& now);

  // Tells whether a plan has written any of it.
  bool is_changed(const Range& range) const;

  // Lend and give back the source of a remote copy, which is read until the receiver has waited.
  void lend(const Range& range);
  void give_back(const Range& range, Rank reader, const Clock& now);

  // Notes that the rank ends the operation. From then on nobody reads its caller's memory.
  void leave(size_t operation, Rank rank, const Clock& now);

  // Checks that outputs are what the collective promises, and inputs as they were.
  void check_results(const std::vector<Program>& sequence);

  uint32_t event = kNoEvent;  // the one that reads and writes now

 private:
  struct User {  // one rank's memory in one operation
    Region region;
    uint64_t input = 0, input_bytes = 0;
    uint64_t output = 0, output_bytes = 0;
    bool left = false;
  };

  User& user(size_t operation, Rank rank) {
    return users_[operation * static_cast<size_t>(size_) + static_cast<size_t>(rank)];
  }
  void add_user(const Program& program, size_t operation, Rank rank);
  Range bounds(const Ref& ref, size_t operation);
  void check_rights(const Ref& ref, size_t operation, Rank rank, bool write) const;
  void check_output(const Program& program, size_t operation, Rank rank);
  void check_equal(const Program& program, size_t operation);
  void check_input(const Program& program, size_t operation, Rank rank);

  int size_;
  Geometry geometry_;
  std::vector<uint64_t> elements_;  // by operation
  std::vector<bool> readable_;      // by operation
  std::vector<User> users_;
  std::unordered_map<uint64_t, Region> shared_;  // made when first used
};

// Calls act(begin, bytes) for each stretch of [begin, end) between edges.
template <typename Act>
void between(uint64_t begin, uint64_t end, const std::vector<uint64_t>& edges, Act act) {
  for (const uint64_t edge : edges) {
    if (edge <= begin || edge >= end) continue;
    act(begin, edge - begin);
    begin = edge;
  }
  if (begin < end) act(begin, end - begin);
}

}  // namespace ringcomm::verify_detail
