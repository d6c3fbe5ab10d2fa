// Memory of the host beside a device: while this lives, the thread's new pages are put on that NUMA
// node, as far as there is room. Where the kernel does not let the process, they lie where they
// would.
#pragma once

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>

namespace ringcomm::cuda {

class OnNode {
 public:
  explicit OnNode(int node) {  // -1: anywhere
    if (node < 0 || node >= static_cast<int>(kNodes)) return;
    changed_ = ::syscall(SYS_get_mempolicy, &mode_, before_.data(), kNodes, nullptr, 0) == 0;
    Mask wanted{};
    wanted[static_cast<size_t>(node) / kBits] = 1UL << static_cast<size_t>(node) % kBits;
    if (changed_) ::syscall(SYS_set_mempolicy, MPOL_PREFERRED, wanted.data(), kNodes);
  }
  ~OnNode() {
    if (changed_) ::syscall(SYS_set_mempolicy, mode_, before_.data(), kNodes);
  }
  OnNode(const OnNode&) = delete;

 private:
  static constexpr size_t kNodes = 1024, kBits = 8 * sizeof(unsigned long);
  using Mask = std::array<unsigned long, kNodes / kBits>;

  bool changed_ = false;
  int mode_ = MPOL_DEFAULT;
  Mask before_{};
};

}  // namespace ringcomm::cuda
