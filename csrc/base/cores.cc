#include "base/cores.h"

#include <sched.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <fstream>
#include <sstream>

#include "base/error.h"

namespace ringcomm {
namespace {

constexpr uint32_t kNoLimit = UINT32_MAX;

// The whole cores in a quota; one where it is less.
uint32_t cores_of(double quota, double period) {
  if (quota <= 0 || period <= 0) return kNoLimit;
  return static_cast<uint32_t>(std::clamp(quota / period, 1.0, 1e6));
}

// Version 2 has one file, "max 100000" or "200000 100000". Version 1 has two.
uint32_t quota_of(const std::string& folder) {
  double quota = 0, period = 0;
  if (std::ifstream both(folder + "/cpu.max"); both >> quota >> period) {
    return cores_of(quota, period);
  }
  std::ifstream first(folder + "/cpu.cfs_quota_us"), second(folder + "/cpu.cfs_period_us");
  return first >> quota && second >> period ? cores_of(quota, period) : kNoLimit;
}

// The least of a cgroup and those around it. A container may see its own as the root.
uint32_t least_quota(const std::string& mount, std::string path) {
  uint32_t least = quota_of(mount);
  while (path.size() > 1) {
    least = std::min(least, quota_of(mount + path));
    path.resize(path.find_last_of('/'));
  }
  return least;
}

bool names_cpu(const std::string& controllers) {
  return ("," + controllers + ",").find(",cpu,") != std::string::npos;
}

}  // namespace

int Cores::count() const {
  int count = 0;
  for (const uint64_t word : mask) count += std::popcount(word);
  return count;
}

bool Cores::overlap(const Cores& other) const {
  for (size_t i = 0; i < mask.size(); ++i) {
    if ((mask[i] & other.mask[i]) != 0) return true;
  }
  return false;
}

Cores own_cores() {
  Cores cores;
  static_assert(sizeof(cpu_set_t) == sizeof cores.mask);
  cpu_set_t set;
  CPU_ZERO(&set);
  if (::sched_getaffinity(0, sizeof set, &set) == 0) {
    std::memcpy(cores.mask.data(), &set, sizeof set);
  }
  std::ifstream file("/proc/self/cgroup");
  std::ostringstream text;
  text << file.rdbuf();
  cores.quota = quota_in(text.str(), "/sys/fs/cgroup");
  return cores;
}

uint32_t quota_in(const std::string& own, const std::string& root) {
  uint32_t least = kNoLimit;
  std::istringstream lines(own);
  std::string line;
  while (std::getline(lines, line)) {  // "0::/a/b", or "4:cpu,cpuacct:/a/b"
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (!controllers.empty() && !names_cpu(controllers)) continue;
    const auto mounts = controllers.empty()
                            ? std::array{root, root + "/unified"}
                            : std::array{root + "/cpu", str(root, "/", controllers)};
    for (const std::string& mount : mounts) least = std::min(least, least_quota(mount, path));
  }
  return least == kNoLimit ? 0 : least;
}

uint32_t sharers_of(std::span<const Cores> ranks, size_t rank) {
  const auto shares = [&](const Cores& other) { return other.overlap(ranks[rank]); };
  return std::max(1u, static_cast<uint32_t>(std::ranges::count_if(ranks, shares)));
}

int threads_of(std::span<const Cores> ranks, size_t rank, int beside) {
  const Cores& own = ranks[rank];
  if (own.threads > 0) return static_cast<int>(std::min(own.threads, kMostThreads));
  const uint32_t sharers = std::max(own.sharers, sharers_of(ranks, rank));
  uint32_t share = static_cast<uint32_t>(own.count()) / sharers;
  const auto here = static_cast<uint32_t>(ranks.size());  // a cgroup is mostly a whole job's
  if (own.quota > 0) share = std::min(share, own.quota / std::max(sharers, here));
  const auto others = static_cast<uint32_t>(beside);
  return static_cast<int>(std::clamp(share - std::min(share, others), 1u, kMostFitting));
}

}  // namespace ringcomm
