// A group as its ranks see one another on their devices: the words of peers about their operations,
// in their areas and on their boards.
#pragma once

#include "device/area.h"
#include "stream/staged.h"

namespace ringcomm {

// An operation, or a message, that this rank has enqueued and whose end it has not noted yet.
struct Pending {
  Descriptor operation{};
  Point end;
  Rank peer = -1;  // of a message
  Clock::duration timeout{};
  // A message has it from when somebody waits for it.
  std::optional<Deadline> deadline = std::nullopt;
  // The flight recorder's: none if the host's way records it.
  std::optional<uint64_t> ticket = std::nullopt;
  // Counts messages to or from that peer; or the group's operations, where ranks reach one another.
  uint64_t number = 0;
  uint64_t batch = 0;                        // the same for all that was enqueued together
  HostStaging::ResultWord result = nullptr;  // staged: kGood if it has ended well

  bool sending() const { return end.timeline == timeline_of(peer, true); }
};

class DeviceGroup {
 public:
  explicit DeviceGroup(GroupState& state);

  GroupState& state;
  const cuda::Area own;  // the part of this rank's memory that is for devices
  Recorder recorder;     // of operations on the device
  const Diagnosis diagnosis;

  cuda::Area area(Rank peer) const { return {transport_.device_area(peer), transport_.size()}; }
  // Tells whether the peer has let its streams go on although the words that they await have not
  // come.
  bool has_let_go(Rank peer) const;
  // Returns how far the peer is, in view of that operation.
  PeerState state_of(Rank peer, uint64_t sequence) const;
  // Tells whether every rank that it needs has called it. Such ranks come, unless they fail.
  bool has_called(const Pending& pending) const;
  // Tells whether a message has ended well at its peer.
  bool has_ended(const Pending& message) const;
  // Returns a peer whose streams, let go, may have put garbage into the operation.
  std::optional<Rank> spoiler(const Pending& pending) const;
  // Throws MismatchError if the peer has called another message under its number.
  void compare(const Pending& message) const;

 private:
  bool has_said(const Pending& message, uint64_t number) const;

  Transport& transport_;
};

}  // namespace ringcomm
