// Time slices of a simulated device that several processes use: kernels of one process run at a
// time, as on a GPU without MPS. A kernel that waits for another process's keeps the device until
// its slice ends, so it loses that time, and the one it waits for has to wait for the device.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "base/fd.h"

namespace ringcomm::sim {

// This process's side of one card. Kernels of a process share its slices. The locks are files', so
// the slice of a process that is killed ends.
class Slices {
 public:
  static constexpr std::chrono::milliseconds kSlice{2};

  Slices(const std::string& folder, int card);

  // Those of `card`, whose files are in `folder`: always the same ones. Null without a folder.
  static std::shared_ptr<Slices> of(const std::string& folder, int card);

  void begin();  // of a kernel: waits for a slice
  void end();
  // A kernel has nothing to do but to wait: gives the device to another process if the slice is
  // over.
  void pause();

 private:
  bool others_wait() const;
  void acquire();
  void take_next();  // after one that was lost

  const Fd gate_, card_;  // the next one holds the gate: so processes take turns
  std::mutex mutex_;
  std::condition_variable resumed_;
  std::chrono::steady_clock::time_point since_;
  int running_ = 0, paused_ = 0;  // kernels
  uint64_t slice_ = 0;
};

// How many slices of this process have ended while all its kernels waited.
uint64_t lost_slices();

// A kernel's stay on the device.
class Slice {
 public:
  explicit Slice(std::shared_ptr<Slices> slices) : slices_(std::move(slices)) {
    if (slices_) slices_->begin();
  }
  Slice(const Slice&) = delete;
  Slice& operator=(const Slice&) = delete;
  ~Slice() {
    if (slices_) slices_->end();
  }

 private:
  const std::shared_ptr<Slices> slices_;
};

}  // namespace ringcomm::sim
