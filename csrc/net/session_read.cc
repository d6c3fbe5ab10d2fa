// The receiving half of a session.
#include <algorithm>
#include <cstring>
#include <utility>

#include "net/checksum.h"
#include "net/session.h"

namespace ringcomm {
namespace {

// Bytes that may wait for one flow while its peer asks for more. Prepared frames are always fewer.
constexpr size_t kMostAnswers = 3 * kFramePayload;

Cursor cursor_of(const Frame& frame, std::span<const std::byte> payload) {
  Cursor cursor;
  cursor.all = frame.ack;
  if (payload.empty()) return cursor;
  if (payload.size() != sizeof cursor.more) throw FlowError("an acknowledgement of a wrong size");
  std::memcpy(cursor.more.data(), payload.data(), payload.size());
  return cursor;
}

}  // namespace

std::span<std::byte> Session::landing(int index) {
  Reading& reading = at(index).reading;
  if (reading.header < sizeof(Frame) || reading.to == nullptr) return {};
  return {reading.to + reading.body, reading.frame.bytes - reading.body};
}

size_t Session::expected(int index) const {
  const Reading& reading = at(index).reading;
  if (reading.header < sizeof(Frame)) return sizeof(Frame) - reading.header;
  return reading.frame.bytes - reading.body;
}

void Session::landed(int index, size_t bytes) {
  Reading& reading = at(index).reading;
  reading.body += bytes;
  if (bytes > 0 && reading.body == reading.frame.bytes) close(index, reading);
}

void Session::read(int index, std::span<const std::byte> bytes, Clock::time_point now) {
  Flow& flow = at(index);
  flow.heard = last_heard_ = now;
  Reading& reading = flow.reading;
  while (!bytes.empty() && flow.up) {
    if (reading.header < sizeof(Frame)) {
      const size_t taken = std::min(bytes.size(), sizeof(Frame) - reading.header);
      std::memcpy(reinterpret_cast<std::byte*>(&reading.frame) + reading.header, bytes.data(),
                  taken);
      reading.header += taken;
      bytes = bytes.subspan(taken);
      if (reading.header < sizeof(Frame)) return;
      open(reading);
    } else {
      const size_t taken = std::min<size_t>(bytes.size(), reading.frame.bytes - reading.body);
      if (reading.to != nullptr) std::memcpy(reading.to + reading.body, bytes.data(), taken);
      reading.body += taken;
      bytes = bytes.subspan(taken);
    }
    if (reading.body == reading.frame.bytes) close(index, reading);
  }
}

// The header is whole: where does the payload go? Numbers are looked at before checksums.
void Session::open(Reading& reading) {
  const Frame& frame = reading.frame;
  check(frame);
  if (!is_sequenced(frame.type) || frame.type == FrameType::kState) {
    reading.own.resize(frame.bytes);
    reading.to = reading.own.data();
  }
  if (!is_sequenced(frame.type)) return;
  if (frame.sequence > all_ + rules_.window) {
    throw FlowError("a frame from beyond the window");
  }
  const bool duplicate = frame.sequence <= all_ || waiting_.contains(frame.sequence);
  if (duplicate && rules_.apply_once) {
    reading.to = nullptr;
  } else if (frame.type != FrameType::kState && frame.bytes > 0) {
    reading.to = receiver_.place(frame);
  }
}

void Session::close(int index, Reading& open) {
  Reading reading = std::exchange(open, Reading{});
  const Frame& frame = reading.frame;
  const bool dropped = reading.to == nullptr && frame.bytes > 0;
  if (rules_.verify && !dropped && frame.bytes > 0 &&
      checksum(reading.to, frame.bytes) != frame.payload_crc) {
    throw ChangedError("a payload was changed on the way");
  }
  acknowledge(frame.ack);
  if (!is_sequenced(frame.type)) {
    control(index, frame, reading.own);
    return;
  }
  // The frame may have come over another flow meanwhile.
  const bool again = frame.sequence <= all_ || waiting_.contains(frame.sequence);
  if (again) ++counters_.duplicates;
  if (again && rules_.apply_once) return;
  ++unacknowledged_;
  parked_ = false;  // it has agreed, and the peer has thought better of it
  apply({frame, std::move(reading.own)});
}

void Session::apply(Delivery delivery) {
  const uint64_t sequence = delivery.frame.sequence;
  if (sequence <= all_) {  // only where a test has switched the rule off
    receiver_.deliver(delivery.frame, delivery.payload);
    return;
  }
  if (sequence != all_ + 1) {
    waiting_.emplace(sequence, std::move(delivery));
    return;
  }
  all_ = sequence;
  receiver_.deliver(delivery.frame, delivery.payload);
  while (!waiting_.empty() && waiting_.begin()->first == all_ + 1) {
    const Delivery next = std::move(waiting_.begin()->second);
    waiting_.erase(waiting_.begin());
    ++all_;
    receiver_.deliver(next.frame, next.payload);
  }
}

void Session::control(int index, const Frame& frame, std::span<const std::byte> payload) {
  switch (frame.type) {
    case FrameType::kAck:
      acknowledge(cursor_of(frame, payload));
      return;
    case FrameType::kFlowDown:
      flow_down(frame);
      if (!at(index).up) return;  // it was about itself: nonsense, and closed now
      return answer(
          index, {.type = FrameType::kFenced, .offset = frame.offset, .stamp = frame.stamp}, true);
    case FrameType::kPark:
      return park(index, frame.stamp == 0);
    case FrameType::kFenced: {
      if (frame.offset >= flows_.size()) throw FlowError("no such flow");
      const int other = static_cast<int>(frame.offset);
      Flow& flow = at(other);
      if (flow.up || flow.fenced || flow.generation != frame.stamp) return;
      resolve(other, cursor_of(frame, payload));
      return;
    }
    default:
      ack_now_ = ack_now_ || frame.stamp != 0;  // a ping that asks for an answer
      return;
  }
}

void Session::answer(int index, const Frame& frame, bool with_cursor) {
  if (at(index).writing_bytes > kMostAnswers) throw FlowError("it asks and reads no answer");
  write_control(index, frame, with_cursor);
}

// The peer has nothing under way. Who asked closes, once the other one has agreed.
void Session::park(int index, bool asked) {
  if ((rules_.rest && !at_rest()) || !receiver_.idle()) return;
  if (asked) answer(index, {.type = FrameType::kPark, .stamp = 1}, false);
  for (int flow = 0; flow < flows() && !asked; ++flow) {
    if (!is_up(flow)) continue;
    down(flow);
    closed_.push_back(flow);
  }
  parked_ = true;
}

// The peer has lost a flow. We close it, too, and only then tell the peer what came over it.
void Session::flow_down(const Frame& frame) {
  if (frame.offset >= flows_.size()) throw FlowError("no such flow");
  const int other = static_cast<int>(frame.offset);
  at(other).refused = std::max(at(other).refused, frame.stamp);
  if (!rules_.fence || !at(other).up || at(other).generation != frame.stamp) return;
  down(other);
  closed_.push_back(other);
}

}  // namespace ringcomm
