// Numbers the operations and messages of a group on its device, and tells peers of them.
//
// If two ranks call different collectives, at least one of them notices before it enqueues
// anything, because each writes its board before it reads the other's. So neither gets a result.
// It is the same with the two sides of a message.
#pragma once

#include "stream/verdicts.h"

namespace ringcomm {

// One thread at a time may call it, but sequence().
class Announcements {
 public:
  Announcements(DeviceGroup& group, Verdicts& verdicts)
      : group_(group),
        verdicts_(verdicts),
        sent_(static_cast<size_t>(group.state.size())),
        received_(sent_.size()) {}

  // Returns how many operations ranks have done without the host's way, which counts its own.
  uint64_t sequence() const { return sequence_ - by_host_; }
  uint64_t last() const { return sequence_; }
  // Numbers and announces an operation of the group. Throws the error of a peer that has called
  // another, or is gone.
  Descriptor announce(const Operation& operation, Algorithm algorithm, bool by_host = false);
  // Does the same for a message.
  void announce(Pending& message);

 private:
  DeviceGroup& group_;
  Verdicts& verdicts_;
  std::atomic<uint64_t> sequence_{0};      // written by one thread at a time; partner: sequence()
  std::atomic<uint64_t> by_host_{0};       // so many of them
  std::vector<uint64_t> sent_, received_;  // messages, by peer
};

}  // namespace ringcomm
