// How the ranks of a group meet on their devices: all of them at its first operation, two of them
// at their first message, and all again where they have to map memory before any of them goes on.
#pragma once

#include <map>

#include "device/peers.h"
#include "stream/verdicts.h"

namespace ringcomm {

inline constexpr Rank kGroup = -1;  // all ranks, in place of a peer

// One thread at a time may call it, on the group's device.
class DeviceRendezvous {
 public:
  DeviceRendezvous(DeviceGroup& group, Verdicts& verdicts, cuda::Peers& peers)
      : group_(group), state_(group.state), verdicts_(verdicts), peers_(peers) {}

  // Meets each of these peers, or the group, unless that has been done.
  void meet(const std::vector<Rank>& peers, const std::string& asked);
  // Tells whether this rank and the peer, or all of the group, reach one another's devices. They
  // have met.
  bool reach(Rank peer) const;
  // Tells whether kernels run operations of the group, or some of them. It has met.
  bool runs_kernels() const { return reach(kGroup) || bridged_; }
  // Tells whether the group has met, and its ranks reach one another.
  bool reaches_group() const { return met_.contains(0) && met_.at(0); }
  // Returns why the group does not reach.
  const std::string& reason() const { return reason_; }
  // Tells whether streams of this rank write and await words of the host.
  bool streams_can_signal() const { return streams_can_signal_; }
  // Waits until all have come to this operation and have mapped the memory that it needs.
  void meet_at(uint64_t sequence, const Deadline& deadline, const std::string& asked);

 private:
  cuda::Subgroup subgroup_of(Rank peer) const;
  std::string why_not(const cuda::Subgroup& subgroup) const;
  void take_steps(const std::map<int, cuda::Subgroup>& fresh, const std::string& asked);
  void await_ranks(const std::string& asked, const Deadline& deadline,
                   const cuda::Subgroup& subgroup, const std::function<bool(Rank peer)>& has_come);
  void log_access(const cuda::Subgroup& subgroup, const cuda::PeerAccess& access,
                  const std::string& asked) const;

  DeviceGroup& group_;
  GroupState& state_;
  Verdicts& verdicts_;
  cuda::Peers& peers_;
  std::map<int, bool> met_;  // subgroups, by this rank's info: do they reach one another?
  bool bridged_ = false;
  std::string reason_;
  bool streams_can_signal_ = false;
};

}  // namespace ringcomm
