#include "net/frame.h"

#include "net/checksum.h"

namespace ringcomm {

void seal(Frame& frame) {
  frame.crc = checksum(reinterpret_cast<const std::byte*>(&frame), offsetof(Frame, crc));
}

void check(const Frame& frame) {
  if (frame.magic != kFrameMagic || frame.version != kFrameVersion) {
    throw FlowError("a frame does not begin as frames do");
  }
  if (checksum(reinterpret_cast<const std::byte*>(&frame), offsetof(Frame, crc)) != frame.crc) {
    throw ChangedError("a frame's header was changed on the way");
  }
  const uint64_t most = frame.type <= FrameType::kStream ? kFramePayload : kKeptPayload;
  if (frame.type < FrameType::kPut || frame.type > FrameType::kPark || frame.bytes > most ||
      is_sequenced(frame.type) != (frame.sequence != 0)) {
    throw FlowError("a frame makes no sense");
  }
}

}  // namespace ringcomm
