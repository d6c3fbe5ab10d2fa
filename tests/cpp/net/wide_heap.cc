#include "wide_heap.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace ringcomm::testing {
namespace {

constexpr int kMostRanks = 4096;

struct alignas(std::max_align_t) Head {  // before each piece of memory
  uint64_t bytes;
  int rank;
};

thread_local int current = -1;
std::array<HeapUse, kMostRanks + 1> uses;  // the simulation has one thread

}  // namespace

HeapUse& heap_of(int rank) { return uses[static_cast<size_t>(rank + 1)]; }

ForRank::ForRank(int rank) : outer_(current) { current = rank; }
ForRank::~ForRank() { current = outer_; }

static void* take(uint64_t bytes) {
  auto* head = static_cast<Head*>(std::malloc(sizeof(Head) + bytes));
  if (head == nullptr) throw std::bad_alloc();
  *head = {bytes, current};
  HeapUse& use = heap_of(current);
  use.now += static_cast<int64_t>(bytes);
  use.most = std::max(use.most, use.now);
  return head + 1;
}

static void give(void* memory) {
  if (memory == nullptr) return;
  Head* head = static_cast<Head*>(memory) - 1;
  heap_of(head->rank).now -= static_cast<int64_t>(head->bytes);
  std::free(head);
}

}  // namespace ringcomm::testing

void* operator new(size_t bytes) { return ringcomm::testing::take(bytes); }
void operator delete(void* memory) noexcept { ringcomm::testing::give(memory); }
void operator delete(void* memory, size_t) noexcept { ringcomm::testing::give(memory); }
