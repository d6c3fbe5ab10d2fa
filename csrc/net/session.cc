#include "net/session.h"

#include <algorithm>
#include <cstring>
#include <ranges>
#include <utility>
#include <vector>

#include "net/checksum.h"

namespace ringcomm {
namespace {

constexpr size_t kPrepared = kFramePayload;  // bytes of frames that one flow may have in hand
constexpr uint64_t kAckEvery = 32;           // frames, or half a window
constexpr int kPings = 4;                    // in the time after which silence closes a flow

const std::byte* bytes_of(const Cursor& cursor) {
  return reinterpret_cast<const std::byte*>(cursor.more.data());
}

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

Session::Session(Receiver& receiver, int flows, const SessionRules& rules,
                 const SessionNumbers& numbers)
    : receiver_(receiver),
      rules_(rules),
      flows_(static_cast<size_t>(flows)),
      used_(flows),
      ack_every_(std::min(kAckEvery, (rules.window + 1) / 2)),
      before_(numbers.generation),
      first_(numbers.posted + 1),
      next_(first_),
      all_(numbers.come) {}

SessionNumbers Session::numbers() const {
  uint64_t last = 0;
  for (int flow = 0; flow < flows(); ++flow) last = std::max(last, generation(flow));
  return {posted(), all_, last};
}

// ---- posting

void Session::post(const Frame& frame, Payload payload) {
  parked_ = false;
  Item& item = items_.emplace_back();
  item.frame = frame;
  item.frame.sequence = first_ + items_.size() - 1;
  item.payload = std::move(payload);
  if (const auto& own = item.payload.own; !own.empty()) {
    item.frame.bytes = static_cast<uint32_t>(own.size());
  }
}

// The copies go where the frames go, and a later frame may be for the same bytes already. Then the
// peer has read the earlier one, so nobody needs its bytes: a repetition is dropped by its number.
// Copying it would put old bytes into the later frame, and a right checksum on them.
void Session::reclaim_lent(uint64_t channel) {
  std::vector<std::span<const std::byte>> later;  // the memory of later frames
  for (Item& item : items_ | std::views::reverse) {
    const Frame& frame = item.frame;
    if (frame.channel != channel || frame.bytes == 0) continue;
    if (std::byte* const keep = std::exchange(item.payload.keep, nullptr)) {
      const auto overlaps = [&](std::span<const std::byte> place) {
        return place.data() < keep + frame.bytes && keep < place.data() + place.size();
      };
      const bool has_come =
          item.acknowledged || (rules_.latest && std::ranges::any_of(later, overlaps));
      if (!has_come) std::memcpy(keep, item.payload.lent, frame.bytes);
      item.payload.lent = keep;
    }
    later.emplace_back(item.payload.data(), frame.bytes);
  }
  // Frames on their way into a flow are copies of posted ones.
  each_writing(channel, [](Writing& writing) {
    Payload& payload = writing.payload;
    if (payload.keep != nullptr) payload.lent = std::exchange(payload.keep, nullptr);
  });
}

void Session::release(uint64_t channel) {
  const auto own = [](Payload& payload, uint32_t bytes) {
    if (bytes == 0 || !payload.own.empty()) return;
    payload.own.assign(payload.lent, payload.lent + bytes);
    payload.keep = nullptr;
  };
  for (Item& item : items_) {
    if (item.frame.channel == channel) own(item.payload, item.frame.bytes);
  }
  each_writing(channel, [&](Writing& writing) { own(writing.payload, writing.header.bytes); });
  for (const auto& flow : flows_) {
    if (!flow) continue;
    Reading& reading = flow->reading;  // a payload on its way into that memory is dropped
    if (reading.own.empty() && reading.frame.channel == channel) reading.to = nullptr;
  }
}

void Session::each_writing(uint64_t channel, const std::function<void(Writing&)>& act) {
  for (const auto& flow : flows_) {
    if (!flow) continue;
    for (Writing& writing : flow->writing) {
      if (writing.header.channel == channel) act(writing);
    }
  }
}

void Session::say(const Frame& frame) {  // over any flow
  for (int index = 0; index < flows(); ++index) {
    if (is_up(index)) return write_control(index, frame, false);
  }
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
  const auto gone = static_cast<uint64_t>(index);
  say({.type = FrameType::kFlowDown, .offset = gone, .stamp = flow.generation});
}

bool Session::up(int index, uint64_t generation, const Cursor& theirs, Clock::time_point now) {
  Flow& flow = at(index);
  if (generation <= flow.refused) return false;
  down(index);
  resolve(index, theirs);
  flow.up = true;
  parked_ = false;
  flow.generation = generation;
  flow.pace = {};
  flow.heard = flow.spoke = last_heard_ = now;
  return true;
}

Cursor Session::cursor() const {
  Cursor cursor;
  cursor.all = all_;
  for (const auto& [sequence, delivery] : waiting_) cursor.set(sequence);
  return cursor;
}

// The peer reads nothing more of this flow, and has told its cursor.
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

// Earliest completion first (Lim, Nahum, Towsley, Gibbens: "ECF: An MPTCP Path Scheduler to Manage
// Heterogeneous Paths", CoNEXT 2017): frames are delivered in their order, so one that a slow flow
// took would hold up all that a fast one brings meanwhile. The flow that would be the first to
// bring the next frame never declines it.
bool Session::declines(int index) const {
  const auto seconds = [](const Flow& flow, uint64_t more) {
    if (flow.pace.bytes_per_second == 0) return 0.0;  // to be tried
    return static_cast<double>(flow.pace.queued + flow.writing_bytes + more) /
           static_cast<double>(flow.pace.bytes_per_second);
  };
  const auto bytes = [&](uint64_t sequence) {
    return sizeof(Frame) + items_[sequence - first_].frame.bytes;
  };
  bool any = false;
  for (int other = 0; other < used_; ++other) any = any || is_up(other);
  if (any && index >= used_) return true;
  const double here = seconds(at(index), bytes(again_.empty() ? next_ : *again_.begin()));
  for (int flow = 0; flow < (any ? used_ : flows()); ++flow) {
    const Flow& other = at(flow);
    if (!other.up || seconds(other, 0) >= here) continue;
    uint64_t all = 0;
    for (const uint64_t sequence : again_) all += bytes(sequence);
    for (uint64_t i = next_; i <= posted() && seconds(other, all) < here; ++i) all += bytes(i);
    if (seconds(other, all) < here) return true;
  }
  return false;
}

std::optional<uint64_t> Session::next_to_send() {
  while (!again_.empty()) {
    const uint64_t sequence = *again_.begin();
    again_.erase(again_.begin());
    if (!item(sequence).acknowledged) return sequence;
  }
  return waits_to_be_sent() ? std::optional(next_++) : std::nullopt;
}

void Session::push(int index, Writing writing) {
  Flow& flow = at(index);
  writing.header.ack = all_;
  if (waiting_.empty()) unacknowledged_ = 0;
  const bool seals = rules_.verify && writing.header.bytes > 0;
  writing.header.payload_crc = seals ? checksum(writing.payload.data(), writing.header.bytes) : 0;
  seal(writing.header);
  flow.writing_bytes += sizeof(Frame) + writing.header.bytes;
  flow.writing.push_back(std::move(writing));
}

void Session::write_control(int index, Frame frame, bool with_cursor) {
  Writing writing;
  if (with_cursor && !waiting_.empty()) {
    const Cursor mine = cursor();
    writing.payload.own.assign(bytes_of(mine), bytes_of(mine) + sizeof mine.more);
    frame.bytes = sizeof mine.more;
  }
  writing.header = frame;
  push(index, std::move(writing));
  unacknowledged_ = with_cursor ? 0 : unacknowledged_;
}

// Prepares frames for a flow that can take them: no more than it needs, others take the rest.
void Session::fill(int index) {
  Flow& flow = at(index);
  while (flow.writing_bytes < kPrepared && waits_to_be_sent() && !declines(index)) {
    const auto sequence = next_to_send();
    if (!sequence) break;
    Item& item = this->item(*sequence);
    item.flow = index;
    // A copy: the item may be acknowledged and gone before the last byte is out.
    push(index, {item.frame, item.payload});
  }
  if (unacknowledged_ >= ack_every_ || (ack_now_ && unacknowledged_ > 0)) {
    write_control(index, {.type = FrameType::kAck}, true);
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
      parts[count++] = {const_cast<std::byte*>(writing.payload.data()) + body,
                        writing.header.bytes - body};
    }
  }
  return count;
}

void Session::wrote(int index, size_t bytes) {
  Flow& flow = at(index);
  flow.writing_bytes -= bytes;
  flow.pace.queued += bytes;
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
  return !flow.writing.empty() || (waits_to_be_sent() && !declines(index)) ||
         unacknowledged_ >= ack_every_ || (ack_now_ && unacknowledged_ > 0);
}

// ---- reading

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

// The peer has nothing under way. The one that asked closes, once the other one has agreed.
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

// ---- time

void Session::tick(Clock::time_point now, Clock::duration stalled) {
  const auto forgive = [&](Clock::time_point heard) { return std::min(heard + stalled, now); };
  if (last_heard_ != Clock::time_point{}) last_heard_ = forgive(last_heard_);
  for (int index = 0; index < flows(); ++index) {
    if (!is_up(index)) continue;
    Flow& flow = at(index);
    flow.heard = forgive(flow.heard);  // it may have been heard since this process runs again
    if (now - flow.heard > rules_.silence) {
      down(index);
      closed_.push_back(index);
      continue;
    }
    if (now - flow.spoke < rules_.silence / kPings) continue;
    flow.spoke = now;
    write_control(index, Frame{}, false);
  }
  ack_now_ = true;
}

}  // namespace ringcomm
