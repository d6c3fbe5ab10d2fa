// The cores that a rank has, as the ranks of its host see them: its affinity, and the share of time
// that its cgroup allows. From that of all ranks follows how many threads each may use.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

namespace ringcomm {

// Lies in shared memory: its owner writes it before the others map it.
struct Cores {
  std::array<uint64_t, 16> mask{};  // a bit for each CPU; none where there are more than 1,024
  uint32_t quota = 0;               // so many run at a time in its cgroup; 0: there is no limit
  uint32_t sharers = 1;  // ranks that share them with it, itself included, in earlier groups
  uint32_t threads = 0;  // that its user asks for; 0: as many as fit

  int count() const;
  bool overlap(const Cores& other) const;
};

inline constexpr uint32_t kMostThreads = 64;  // of a rank
// A guess: a few cores of a socket fill its memory's bandwidth. Nobody has measured it here.
inline constexpr uint32_t kMostFitting = 8;

// Returns the cores of this thread, whose affinity its children inherit.
Cores own_cores();
// Counts the ranks among all of a host that share cores with `rank`, itself included.
uint32_t sharers_of(std::span<const Cores> ranks, size_t rank);
// Returns how many threads `rank` uses in a call that blocks. `beside`: threads of its own that are
// busy then.
int threads_of(std::span<const Cores> ranks, size_t rank, int beside);

// Returns the cores that the files of the cgroups allow, 0 if any number. `own`: the text of
// /proc/self/cgroup. `root`: where they are mounted.
uint32_t quota_in(const std::string& own, const std::string& root);

}  // namespace ringcomm
