// Frames travel between two processes: a header of 64 bytes and up to 256 KiB of payload, both
// little-endian. All fields of a frame that comes are a stranger's words: checked before use.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <vector>

namespace ringcomm {

static_assert(std::endian::native == std::endian::little, "frames are little-endian");

inline constexpr uint64_t kFramePayload = 256 << 10;  // at most
inline constexpr uint64_t kKeptPayload = 4 << 10;     // of a frame that goes to no channel's memory
inline constexpr uint64_t kFrameWindow = 1024;        // frames sent and not acknowledged, at most
inline constexpr uint8_t kNoLane = 0xff;
inline constexpr uint16_t kFrameMagic = 0x6372;  // "rc"
inline constexpr uint8_t kFrameVersion = 1;

enum class FrameType : uint8_t {
  kPut = 1,  // payload lands at `offset` of the channel's memory; may carry a signal
  kStream,   // the same, in the byte stream of send/recv: `stamp` is its new end
  kCredit,   // the stream has been read up to `stamp`
  kState,    // the sender's words about itself
  // These have no sequence number: they are about the session, or a flow of it.
  kAck,       // payload: nothing, or which of the next kFrameWindow frames have come
  kPing,      // asks for nothing; tells that the process lives
  kFlowDown,  // flow `offset` of generation `stamp` is gone: close yours
  kFenced,    // it is closed here, and `ack` and payload (as kAck's) say which frames came
  kPark,      // `stamp` 0: may the connections go, until one of us has something to say? 1: yes
};

struct Frame {
  uint16_t magic = kFrameMagic;
  uint8_t version = kFrameVersion;
  FrameType type = FrameType::kPing;
  uint8_t lane = kNoLane;  // of the signal, if there is one
  uint8_t half = 0;
  uint16_t reserved = 0;
  uint64_t sequence = 0;  // of this direction of the session, from 1
  uint64_t ack = 0;       // all frames up to this one have come
  uint64_t channel = 0;
  uint64_t offset = 0;
  uint64_t stamp = 0;
  uint32_t bytes = 0;  // of payload
  uint32_t payload_crc = 0;
  uint32_t padding = 0;
  uint32_t crc = 0;  // of the fields before it
};
static_assert(sizeof(Frame) == 64);

inline bool is_sequenced(FrameType type) { return type < FrameType::kAck; }

// The bytes that a frame carries: memory that must not change (see session.h), or its own.
struct Payload {
  Payload() = default;
  explicit Payload(const std::byte* lent, std::byte* keep = nullptr) : lent(lent), keep(keep) {}
  explicit Payload(std::vector<std::byte> own) : own(std::move(own)) {}

  const std::byte* lent = nullptr;
  std::byte* keep = nullptr;  // it is lent for a time only: where reclaim_lent() may copy it
  std::vector<std::byte> own;
  const std::byte* data() const { return own.empty() ? lent : own.data(); }
};

// A peer sent nonsense, or a byte was changed on the way. The flow is closed, and its frames come
// again.
struct FlowError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A byte was changed on the way.
struct ChangedError : FlowError {
  using FlowError::FlowError;
};

void seal(Frame& frame);         // sets crc
void check(const Frame& frame);  // throws FlowError

// The frames of one direction that have come: all up to `all`, and those of the next kFrameWindow
// whose bit is set.
struct Cursor {
  uint64_t all = 0;
  std::array<uint64_t, kFrameWindow / 64> more{};

  bool has(uint64_t sequence) const {
    if (sequence <= all) return true;
    const uint64_t bit = sequence - all - 1;
    return bit < kFrameWindow && (more[bit / 64] >> (bit % 64) & 1) != 0;
  }
  void set(uint64_t sequence) {
    const uint64_t bit = sequence - all - 1;
    more[bit / 64] |= uint64_t{1} << (bit % 64);
  }
  bool operator==(const Cursor&) const = default;
};
static_assert(sizeof(Cursor) == 8 + kFrameWindow / 8);

}  // namespace ringcomm
