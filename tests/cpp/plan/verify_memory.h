// The verifier's memory: symbolic contents and the clocks of accesses. See verify.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
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

// A rank's contribution. Contributions are added up modulo 2^64. Other ones, or the same ones more
// than once, have the same sum with a probability of 2^-64.
inline uint64_t mark(Rank rank) { return mix(0x5eed, static_cast<uint64_t>(rank)); }

// What a granule of memory holds: parts of the inputs of operation `operation` - 1.
struct Value {
  uint32_t operation = 0;  // 0: nothing was written here
  uint32_t index = 0;      // which granule of the inputs
  uint64_t ranks = 0;      // whose contributions: the sum of their marks
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
    for (size_t i = 0; i < range.count; ++i) {
      if (cell(range.begin + i).changed) return true;
    }
    return false;
  }

  // A remote copy reads its source until the receiver has waited for it.
  void lend(const Range& range);
  void give_back(const Range& range, Rank reader, const Clock& now);

  // Are outputs what the collective promises, and inputs as they were?
  void check_results(const std::vector<Program>& sequence) const;

 private:
  struct Read {  // when last
    Rank rank;
    Time time;
  };
  struct Cell {
    Value value;
    Time written = 0;
    bool changed = false;  // by a plan
    int16_t writer = -1;
    uint16_t lent = 0;
    Read read{-1, 0};
    std::vector<Read> others = {};  // of other ranks, since it was written

    void note(Read next);
    void check_reads(const Clock& now) const;
  };
  static constexpr size_t kPage = 64;  // cells; most of the memory of many ranks is never used
  struct User {                        // one rank's memory in one operation
    size_t input, input_count;
    size_t output, output_count;
  };

  size_t cells_of(uint64_t bytes) const { return (bytes + granule_ - 1) / granule_; }
  const User& user(size_t operation, Rank rank) const {
    return users_[operation * static_cast<size_t>(size_) + static_cast<size_t>(rank)];
  }
  Cell& cell(size_t index) const {
    std::unique_ptr<Cell[]>& page = pages_[index / kPage];
    if (!page) page = std::make_unique<Cell[]>(kPage);
    return page[index % kPage];
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
  std::vector<uint64_t> elements_;       // by operation
  size_t shared_count_ = 0, count_ = 0;  // of cells: of a rank's half; of all
  std::vector<User> users_;
  mutable std::vector<std::unique_ptr<Cell[]>> pages_;
};

}  // namespace ringcomm::verify_detail
