// Memory of this process that all processes of its host have mapped, for tensors that they read
// where they lie. It stands behind the doorbell (transport/neighbours.h), and so lasts as long as
// the process, whatever becomes of groups. It is all address space: pages exist while they are in
// use, or kept for the next tensor.
#pragma once

#include <sys/types.h>

#include <map>
#include <span>

#include "base/fd.h"
#include "base/mutex.h"

namespace ringcomm {

class Arena {
 public:
  static constexpr uint64_t kBytes = uint64_t{64} << 30;  // of addresses
  static constexpr uint64_t kPage = 4096;

  // Tells whether this process may have a file with an arena in it. Beyond its limit of file sizes
  // the kernel ends the process by a signal.
  static bool fits(uint64_t file_bytes);

  // Maps the arena that begins `offset` bytes into the file. Without memory for so many addresses
  // there is none: allocate() returns nothing.
  void map(const Fd& file, uint64_t offset);
  std::span<std::byte> all() const { return {mapping_.data(), mapping_.data() ? kBytes : 0}; }

  // Returns whole pages, not cleared, while no more than `most` bytes are in use; else nothing.
  std::byte* allocate(uint64_t bytes, uint64_t most);
  // Takes them back. In a forked child it does nothing: there all of this is the parent's.
  void free(std::byte* data);
  // Says whether to keep the pages of tensors that are freed, for the next ones. If not, all that
  // are unused go back to the system.
  void keep(bool on);
  // Gives a forked child a copy of its own, which it may read and write.
  void forked();

 private:
  uint64_t offset_of(const std::byte* data) const {
    return static_cast<uint64_t>(data - mapping_.data());
  }
  void trim() RINGCOMM_REQUIRES(mutex_);
  uint64_t gap_for(uint64_t bytes) const RINGCOMM_REQUIRES(mutex_);
  bool back(uint64_t begin, uint64_t end) RINGCOMM_REQUIRES(mutex_);

  int file_ = -1;  // the owner's, which outlives this
  uint64_t begins_ = 0;
  pid_t owner_ = 0;
  Mapping mapping_;
  Mutex mutex_;
  std::map<uint64_t, uint64_t> used_ RINGCOMM_GUARDED_BY(mutex_);  // where each begins, and ends
  bool keeps_ RINGCOMM_GUARDED_BY(mutex_) = false;
  uint64_t in_use_ RINGCOMM_GUARDED_BY(mutex_) = 0;     // bytes
  uint64_t backed_ RINGCOMM_GUARDED_BY(mutex_) = 0;     // before it all pages exist, except
  bool has_holes_ RINGCOMM_GUARDED_BY(mutex_) = false;  // where some were given back
};

}  // namespace ringcomm
