// The verifier's memory: symbolic contents and the clocks of accesses. See verify.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "verify.h"

namespace ringcomm::verify_detail {

class Violation : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

using Time = uint32_t;
using Clock = std::vector<Time>;  // what a rank knows of each rank

// What a granule of memory holds: parts of the inputs of operation `operation` - 1.
struct Value {
  uint32_t operation = 0;  // 0: nothing was written here
  uint32_t index = 0;      // which granule of the inputs
  uint64_t ranks = 0;      // whose contributions, one bit a rank
  bool final = false;
  uint64_t order = 0;  // names the sequence of additions
  bool operator==(const Value&) const = default;
};

struct Range {
  size_t begin;
  size_t count;
  bool operator==(const Range&) const = default;
};

// The ranks' shared memory with both halves, and each operation's user memory, in granules of the
// smallest element of the sequence.
class Memory {
 public:
  explicit Memory(const std::vector<Program>& sequence);

  uint64_t granule() const { return granule_; }
  // Where an operand lies; throws if it is out of bounds, misaligned, or not `rank`'s to use so.
  Range locate(const Ref& ref, uint64_t bytes, size_t operation, Rank rank, bool write) const;

  // What `rank` finds there; shared memory must hold something of the same operation.
  const Value& read(size_t cell, size_t operation, Rank rank, const Clock& now);
  void write(size_t cell, const Value& value, Rank rank, const Clock& now);

  // Has a plan written any of it?
  bool is_changed(const Range& range) const {
    const auto cells = std::span(cells_).subspan(range.begin, range.count);
    return std::ranges::any_of(cells, &Cell::changed);
  }

  // A remote copy reads its source until the receiver has waited for it.
  void lend(const Range& range);
  void give_back(const Range& range, Rank reader, const Clock& now);

  // Are outputs what the collective promises, and inputs as they were?
  void check_results(const std::vector<Program>& sequence) const;

 private:
  struct Cell {
    Value value;
    Time written = 0;
    bool changed = false;  // by a plan
    int16_t writer = -1;
    uint16_t lent = 0;
  };
  struct User {  // one rank's memory in one operation
    size_t input, input_count;
    size_t output, output_count;
  };

  size_t cells_of(uint64_t bytes) const { return (bytes + granule_ - 1) / granule_; }
  const User& user(size_t operation, Rank rank) const {
    return users_[operation * static_cast<size_t>(size_) + static_cast<size_t>(rank)];
  }
  void add_user(const Program& program, size_t operation, Rank rank);
  Range bounds(const Ref& ref, size_t operation) const;
  void check_rights(const Ref& ref, Rank rank, bool write) const;
  void check_output(const Program& program, size_t operation, Rank rank) const;
  void check_equal(const Program& program, size_t operation) const;
  void check_input(const Program& program, size_t operation, Rank rank) const;

  int size_;
  uint64_t granule_;
  Geometry geometry_;
  std::vector<uint64_t> elements_;  // by operation
  size_t shared_count_ = 0;
  std::vector<User> users_;
  std::vector<Cell> cells_;
  std::vector<Time> reads_;  // by cell and reader: when last
};

}  // namespace ringcomm::verify_detail
