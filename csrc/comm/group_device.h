// A group's engine for tensors on a device: there is one at most.
#pragma once

#include "stream/device_engine.h"

namespace ringcomm {

class GroupDevice {
 public:
  GroupDevice(GroupState& state, Progress& progress) : state_(state), progress_(progress) {}
  ~GroupDevice();

  // Returns the engine for tensors of that device; made at first use. Throws UsageError if the
  // group works on another one.
  DeviceEngine& engine(int index);
  // Returns the engine, or null where no device is in use.
  DeviceEngine* in_use() const { return engine_.load(std::memory_order_acquire); }
  // Waits until `end` is reached or `at_most` has passed. Returns true when it is reached. After a
  // failure a completed operation may hold no valid result.
  bool wait(const Completion& end, Clock::duration at_most = Clock::duration::max());
  // Waits for work that every rank has already called: it only needs time.
  void wait_for_all();

 private:
  GroupState& state_;
  Progress& progress_;
  Mutex mutex_;                                 // held to make the engine
  std::atomic<DeviceEngine*> engine_{nullptr};  // lives as long as the group; partner: engine()
};

}  // namespace ringcomm
