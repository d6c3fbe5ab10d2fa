// Kernels that wait for one another must fit on their devices all at one time, and beside those of
// other groups. So the groups of a process share out a device's multiprocessors: a block of these
// kernels may need all registers of one. A group has one such kernel at a time. Each gets as many
// as it asks for, in whatever order groups first use the device, until none are left.
#pragma once

#include <algorithm>
#include <map>
#include <mutex>

#include "device/api.h"

namespace ringcomm::cuda {

class Residency {
 public:
  static Residency& of_process() {
    static auto* const all = new Residency;  // groups may outlive statics
    return *all;
  }

  // Takes as many blocks as a group asks for, or what is left. Returns 0 where too few are left for
  // any kernel.
  int claim(const Uuid& device, int multiprocessors, int asked) {
    const std::lock_guard lock(mutex_);
    int& taken = taken_[device];
    const int left = multiprocessors - taken;
    const int blocks = left < kFewestBlocks ? 0 : std::min(left, asked);
    taken += blocks;
    return blocks;
  }
  void give_back(const Uuid& device, int blocks) {
    const std::lock_guard lock(mutex_);
    taken_[device] -= blocks;
  }

 private:
  std::mutex mutex_;
  std::map<Uuid, int> taken_;
};

}  // namespace ringcomm::cuda
