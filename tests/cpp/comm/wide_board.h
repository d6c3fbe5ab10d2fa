// Memory in which the ranks of the program `wide` and their parent tell one another where each is,
// what it has measured, and its error. It also has gates at which all meet.
#pragma once

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>

#include "base/deadline.h"
#include "cpp/harness.h"

namespace ringcomm::testing {

inline double now_seconds() {
  return std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

// A rank's measurements in one stage of the program, and its costs to the host at the end of it.
struct Footprint {
  static constexpr size_t kBatches = 3;
  char name[40] = "", algorithm[16] = "";
  int calls = 1;                                // of each batch
  std::array<double, kBatches> begin{}, end{};  // of batches, one at least
  uint64_t vm_bytes = 0, rss_bytes = 0, pss_bytes = 0, descriptors = 0, mappings = 0, threads = 0;
  uint64_t connections = 0;  // of TCP, that are up; pss: shared pages count in part
  uint64_t requests = 0, store_bytes = 0;
  uint64_t switches = 0;  // voluntary, of all its threads
};

// A rank's part of the board. It alone writes; the parent reads once the process has ended.
struct Seat {
  static constexpr size_t kStages = 64;
  std::atomic<int> stages{0};  // partner: the parent; so many footprints are whole
  std::array<Footprint, kStages> footprints;
  std::atomic<int> loops{0};  // partner: the parent, who acts once all ranks are in their loops
  // Each scenario fills in some of these.
  double heard_after = 0, left_after = 0, longest = 0, total = 0, count = 0;
  char doing[64] = "has not begun";
  char heard[1024] = "";  // the error that had to come
  char error[1024] = "";  // one that had not
};

struct Board {
  static constexpr size_t kMostRanks = 4097;

  static Board& make() {
    const int how = MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE;
    void* at = ::mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, how, -1, 0);
    if (at == MAP_FAILED) throw SystemError("mmap");
    return *new (at) Board;  // the program's end frees it
  }
  Seat& seat(Rank rank) { return seats.at(static_cast<size_t>(rank)); }

  // Returns when so many ranks are here. Throws if a rank has failed, or the time is over.
  void gate(int parties, const Deadline& deadline) {
    const uint32_t turn = turns.load();
    if (arrived.fetch_add(1) + 1 == parties) {
      arrived.store(0);
      turns.fetch_add(1);
      ::syscall(SYS_futex, &turns, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
      return;
    }
    while (turns.load() == turn) {
      require(!broken.load(), "another rank has failed");
      require(!deadline.passed(), "waited in vain for the other ranks");
      const timespec most{0, 200'000'000};
      ::syscall(SYS_futex, &turns, FUTEX_WAIT, turn, &most, nullptr, 0);
    }
  }

  std::atomic<uint32_t> turns{0};       // partner: those that wait at the gate
  std::atomic<int> arrived{0};          // the same
  std::atomic<bool> broken{false};      // partner: the same; a rank will not come to the next gate
  std::atomic<int> last_loop{INT_MAX};  // partner: all ranks; rank 0 sets it before that loop
  double began = 0;
  std::atomic<double> killed_at{0};  // partner: the ranks that outlive the killed one
  std::array<Seat, kMostRanks> seats;
};

}  // namespace ringcomm::testing
