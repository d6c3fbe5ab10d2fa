#include "net/session.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "net/checksum.h"

namespace ringcomm {
namespace {

constexpr size_t kPrepared = kFramePayload;  // bytes of frames that one flow may have in hand
constexpr uint64_t kAckEvery = 32;           // frames, or half a window
constexpr auto kPingEvery = std::chrono::seconds(1);
constexpr auto kSilence = std::chrono::seconds(5);  // of a flow: then it is closed

const std::byte* bytes_of(const Cursor& cursor) {
  return reinterpret_cast<const std::byte*>(cursor.more.data());
}

Cursor cursor_of(const Frame& frame, std::span<const std::byte> payload) {
  Cursor cursor;
  cursor.all = frame.ack;
  if (payload.empty()) return cursor;
  if (payload.size() != sizeof cursor.more) throw FlowError("an acknowledgement of a wrong size");
  std::memcpy(cursor.more.data(), payload.data(), payload.size());
  return cursor;
}

}  // namespace

Session::Session(Receiver& receiver, int flows, const SessionRules& rules)
    : receiver_(receiver),
      rules_(rules),
      flows_(static_cast<size_t>(flows)),
      ack_every_(std::min(kAckEvery, (rules.window + 1) / 2)) {}

// ---- posting

void Session::post(const Frame& frame, const std::byte* payload, std::byte* keep) {
  Item& item = items_.emplace_back();
  item.frame = frame;
  item.frame.sequence = first_ + items_.size() - 1;
  item.payload = payload;
  item.keep = keep;
}

void Session::post(const Frame& frame, std::vector<std::byte> payload) {
  post(frame);
  items_.back().own = std::move(payload);
  items_.back().payload = items_.back().own.data();
}

// Later frames may have gone to the same place: those before them have been read there, and what
// is sent of them again, if anything is, is dropped. In order, so that the last one stays.
void Session::settle(uint64_t channel) {
  for (Item& item : items_) {
    if (item.keep == nullptr || item.frame.channel != channel) continue;
    if (!item.acknowledged) std::memcpy(item.keep, item.payload, item.frame.bytes);
    item.payload = std::exchange(item.keep, nullptr);
  }
  for (Flow& flow : flows_) {
    for (Writing& writing : flow.writing) {
      if (writing.keep == nullptr || writing.header.channel != channel) continue;
      writing.payload = std::exchange(writing.keep, nullptr);
    }
  }
}

Session::Item* Session::item(uint64_t sequence) {
  if (sequence < first_ || sequence - first_ >= items_.size()) return nullptr;
  return &items_[sequence - first_];
}

// ---- flows

void Session::down(int index) {
  Flow& flow = at(index);
  flow.writing.clear();
  flow.writing_bytes = 0;
  flow.reading = Reading{};
  if (!flow.up) return;
  flow.up = false;
  flow.fenced = false;
  for (int other = 0; other < flows(); ++other) {
    if (!at(other).up) continue;
    Frame frame;
    frame.type = FrameType::kFlowDown;
    frame.offset = static_cast<uint64_t>(index);
    frame.stamp = flow.generation;
    write_control(other, frame, false);
    return;
  }
}

bool Session::up(int index, uint64_t generation, const Cursor& theirs, Clock::time_point now) {
  Flow& flow = at(index);
  if (generation <= flow.refused) return false;
  down(index);
  resolve(index, theirs);
  flow.up = true;
  flow.generation = generation;
  flow.heard = flow.spoke = last_heard_ = now;
  return true;
}

Cursor Session::cursor() const {
  Cursor cursor;
  cursor.all = all_;
  for (const auto& [sequence, delivery] : waiting_) cursor.set(sequence);
  return cursor;
}

std::vector<int> Session::take_closed() { return std::exchange(closed_, {}); }

// The peer reads nothing more of this flow, and has said what came over it.
void Session::resolve(int index, const Cursor& theirs) {
  acknowledge(theirs);
  for (size_t i = 0; i < items_.size(); ++i) {
    Item& item = items_[i];
    if (item.flow != index) continue;
    item.flow = -1;
    if (item.acknowledged) continue;
    again_.insert(first_ + i);
    ++counters_.resent;
  }
  at(index).fenced = true;
}

void Session::acknowledge(uint64_t all) {
  if (all >= next_) throw FlowError("an acknowledgement of what was never sent");
  while (!items_.empty() && (first_ <= all || items_.front().acknowledged)) {
    again_.erase(first_);
    items_.pop_front();
    ++first_;
  }
}

void Session::acknowledge(const Cursor& theirs) {
  acknowledge(theirs.all);
  for (size_t i = 0; i < items_.size() && first_ + i < next_; ++i) {
    if (theirs.has(first_ + i)) items_[i].acknowledged = true;
  }
}

// ---- writing

std::optional<uint64_t> Session::next_to_send() {
  while (!again_.empty()) {
    const uint64_t sequence = *again_.begin();
    again_.erase(again_.begin());
    if (!item(sequence)->acknowledged) return sequence;
  }
  if (next_ - first_ >= items_.size()) return std::nullopt;
  if (!window_open()) return std::nullopt;
  return next_++;
}

void Session::push(int index, Writing writing) {
  Flow& flow = at(index);
  writing.header.ack = all_;
  if (waiting_.empty()) unacknowledged_ = 0;
  writing.header.payload_crc =
      writing.header.bytes == 0 ? 0 : checksum(writing.payload, writing.header.bytes);
  seal(writing.header);
  flow.writing_bytes += sizeof(Frame) + writing.header.bytes;
  ++counters_.frames;
  counters_.bytes += sizeof(Frame) + writing.header.bytes;
  flow.writing.push_back(std::move(writing));
}

void Session::write_item(int index, uint64_t sequence) {
  Item& item = *this->item(sequence);
  item.flow = index;
  Writing writing;
  writing.header = item.frame;
  writing.payload = item.payload;
  writing.keep = item.keep;
  if (!item.own.empty()) {  // the item may be acknowledged and gone before the last byte is out
    writing.own = item.own;
    writing.payload = writing.own.data();
  }
  push(index, std::move(writing));
}

void Session::write_control(int index, Frame frame, bool with_cursor) {
  Writing writing;
  if (with_cursor && !waiting_.empty()) {
    const Cursor mine = cursor();
    writing.own.assign(bytes_of(mine), bytes_of(mine) + sizeof mine.more);
    writing.payload = writing.own.data();
    frame.bytes = static_cast<uint32_t>(writing.own.size());
  }
  writing.header = frame;
  push(index, std::move(writing));
  unacknowledged_ = with_cursor ? 0 : unacknowledged_;
}

// Frames for a flow that can take them: no more than it needs, others take the rest.
void Session::fill(int index) {
  Flow& flow = at(index);
  while (flow.writing_bytes < kPrepared) {
    const auto sequence = next_to_send();
    if (!sequence) break;
    write_item(index, *sequence);
  }
  if (unacknowledged_ >= ack_every_ || (ack_now_ && unacknowledged_ > 0)) {
    Frame frame;
    frame.type = FrameType::kAck;
    write_control(index, frame, true);
  }
  ack_now_ = false;
}

size_t Session::gather(int index, std::span<iovec> parts) {
  if (!at(index).up) return 0;
  fill(index);
  size_t count = 0;
  for (Writing& writing : at(index).writing) {
    if (count + 2 > parts.size()) break;
    auto* header = reinterpret_cast<std::byte*>(&writing.header);
    if (writing.done < sizeof(Frame)) {
      parts[count++] = {header + writing.done, sizeof(Frame) - writing.done};
    }
    const size_t body = writing.done > sizeof(Frame) ? writing.done - sizeof(Frame) : 0;
    if (writing.header.bytes > body) {
      parts[count++] = {const_cast<std::byte*>(writing.payload) + body,
                        writing.header.bytes - body};
    }
  }
  return count;
}

void Session::wrote(int index, size_t bytes) {
  Flow& flow = at(index);
  flow.writing_bytes -= bytes;
  while (bytes > 0) {
    Writing& front = flow.writing.front();
    const size_t taken = std::min(bytes, sizeof(Frame) + front.header.bytes - front.done);
    front.done += taken;
    bytes -= taken;
    if (front.done == sizeof(Frame) + front.header.bytes) flow.writing.pop_front();
  }
}

bool Session::has_output(int index) const {
  const Flow& flow = at(index);
  if (!flow.up) return false;
  return !flow.writing.empty() || !again_.empty() ||
         (next_ - first_ < items_.size() && window_open()) || unacknowledged_ >= ack_every_ ||
         (ack_now_ && unacknowledged_ > 0);
}

// ---- reading

std::span<std::byte> Session::landing(int index) {
  Reading& reading = at(index).reading;
  if (reading.header < sizeof(Frame) || reading.to == nullptr) return {};
  return {reading.to + reading.body, reading.frame.bytes - reading.body};
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
  reading.duplicate = frame.sequence <= all_ || waiting_.contains(frame.sequence);
  if (reading.duplicate && rules_.apply_once) {
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
    ++counters_.corrupt;
    throw FlowError("a payload was changed on the way");
  }
  acknowledge(frame.ack);
  if (!is_sequenced(frame.type)) {
    control(index, frame, reading.own);
    return;
  }
  // It may have come over another flow meanwhile.
  const bool again = frame.sequence <= all_ || waiting_.contains(frame.sequence);
  if (again) ++counters_.duplicates;
  if (again && rules_.apply_once) return;
  ++unacknowledged_;
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
      {
        Frame reply = frame;
        reply.type = FrameType::kFenced;
        reply.bytes = 0;
        write_control(index, reply, true);
      }
      return;
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

// The peer has lost a flow: so have we, and only then is it told what came over it.
void Session::flow_down(const Frame& frame) {
  if (frame.offset >= flows_.size()) throw FlowError("no such flow");
  const int other = static_cast<int>(frame.offset);
  at(other).refused = std::max(at(other).refused, frame.stamp);
  if (!rules_.fence || !at(other).up || at(other).generation != frame.stamp) return;
  down(other);
  closed_.push_back(other);
}

// ---- time

void Session::tick(Clock::time_point now, Clock::duration stalled) {
  last_heard_ += stalled;
  for (int index = 0; index < flows(); ++index) {
    Flow& flow = at(index);
    if (!flow.up) continue;
    flow.heard += stalled;
    if (now - flow.heard > kSilence) {
      down(index);
      closed_.push_back(index);
      continue;
    }
    if (now - flow.spoke < kPingEvery) continue;
    flow.spoke = now;
    write_control(index, Frame{}, false);
  }
  ack_now_ = true;
}

}  // namespace ringcomm
