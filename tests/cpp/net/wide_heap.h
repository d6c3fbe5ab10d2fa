// Counts the heap by the rank it is for: a program that simulates many ranks replaces operator new.
#pragma once

#include <cstdint>

namespace ringcomm::testing {

// Bytes of each rank that are in use, and the most that were; -1 is the simulation itself.
struct HeapUse {
  int64_t now = 0, most = 0;
};
HeapUse& heap_of(int rank);

// In its scope, memory is allocated for that rank.
class ForRank {
 public:
  explicit ForRank(int rank);
  ~ForRank();
  ForRank(const ForRank&) = delete;

 private:
  const int outer_;
};

}  // namespace ringcomm::testing
