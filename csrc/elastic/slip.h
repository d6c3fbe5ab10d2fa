// A slip is what a member of a world shows to the others: how far it is, and its part in the
// agreement on who goes on (elastic/decree.h). A member writes its own slip and reads those of the
// others. Only the latest counts, so lost and late ones do no harm.
#pragma once

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace ringcomm {

inline constexpr size_t kMostMembers = 256;
using Members = std::bitset<kMostMembers>;  // the members of an epoch, by rank

// The decision that makes an epoch: its members are some of those of the last one.
struct Decision {
  Members members;
  uint64_t step = 0;  // the last one that counts: all members apply it, and none after it
  std::string extra;  // the proposer's words to all: who joins
  bool operator==(const Decision&) const = default;
};

struct Slip {
  enum class State : uint8_t {
    kWorking,  // or on the way to it: makes the group of its epoch
    kMeeting,  // no collective of its epoch any more: `decided` and `voted` stand
    kLeft,     // goes, and takes part in nothing
  };

  uint32_t epoch = 0;
  State state = State::kWorking;
  bool voted = false;     // for the step after `decided`
  uint64_t decided = 0;   // the last step that it has applied, or will without a further word
  Members gone;           // that it holds for dead or suspected
  Members ended;          // that it certifies as dead: it has seen their processes end
  uint64_t promised = 0;  // takes no part in a lower ballot
  uint64_t ballot = 0;    // that it leads; 0: none
  bool proposes = false;  // `proposal` is to be accepted
  Decision proposal;
  uint64_t accepted = 0;  // the ballot of `value`; 0: none
  Decision value;
  Decision made;  // the decision that made `epoch`
  bool operator==(const Slip&) const = default;
};

// Returns at most kSlipBytes; throws UsageError if the texts are too long for that.
inline constexpr size_t kSlipBytes = 4032;
std::vector<std::byte> to_bytes(const Slip& slip);
// Returns nothing if these are no slip.
std::optional<Slip> slip_from(std::span<const std::byte> bytes);

}  // namespace ringcomm
