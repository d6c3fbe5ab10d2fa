#include "transport/remote.h"

#include "transport/remote_ranks.h"

namespace ringcomm {
namespace {

static_assert(sizeof(RankState) <= kKeptPayload);

// Changes with the blame, except for hash collisions.
uint64_t mark(const Blame& blame) {
  return blame.sequence + (blame.rank << 48) + (blame.called << 32) + (blame.finished << 16);
}

// Without the text of a failure where there is none.
std::vector<std::byte> bytes_of(const RankState& state) {
  const auto* const data = reinterpret_cast<const std::byte*>(&state);
  return {data, data + (state.failed != 0 ? sizeof state : offsetof(RankState, failure))};
}

}  // namespace

const Segment& LateSegment::get() {
  if (try_get() == nullptr) check();
  return segment_;
}

const Segment* LateSegment::try_get() {
  std::call_once(once_, [&] {
    try {
      mapping_ = Mapping(layout_.bytes());
    } catch (const SystemError& error) {
      return lack_.store(error.code(), std::memory_order_release);  // partner: check()
    }
    segment_ = Segment(mapping_.data(), layout_);
    made_.store(true, std::memory_order_release);  // partner: find()
  });
  return find();
}

void LateSegment::check() const {
  const int code = lack_.load(std::memory_order_acquire);  // partner: try_get()
  if (code == 0) return;
  throw SystemError(str("reserving ", layout_.bytes(), " bytes of addresses for rank ", peer_,
                        " of another host (`ulimit -v` limits them)"),
                    code);
}

RemotePeer::RemotePeer(Wire& wire, uint64_t channel, const Ends& ends)
    : wire_(wire),
      channel_(channel),
      ends_(ends),
      shadow_(ends.layout, ends.peer),
      received_(ends.layout, ends.peer) {
  if (!ends.opened) wire_.open(channel_, this);
}

// ---- sending

void RemotePeer::put(std::byte* target, uint64_t bytes, const std::byte* source) {
  const bool goes_on = pending_.bytes > 0 && pending_.target + pending_.bytes == target &&
                       pending_.source == nullptr && source == nullptr;
  if (goes_on) {
    pending_.bytes += bytes;
    return;
  }
  if (pending_.bytes > 0) flush_put(kNoLane, 0, 0);
  pending_ = {target, bytes, source};
}

void RemotePeer::signal(int lane, int half, uint64_t stamp) {
  const auto called = ends_.own->of(Board::kHost).called.load(std::memory_order_relaxed);
  if (told_called_.load(std::memory_order_relaxed) != called) send_state();
  flush_put(lane, half, stamp);
  wire_.flush();
}

// Posts as many frames as it takes; the last one carries the signal.
void RemotePeer::flush_put(int lane, int half, uint64_t stamp) {
  const Pending put = std::exchange(pending_, {});
  sent_ += put.bytes;
  for (uint64_t done = 0; done < put.bytes || (put.bytes == 0 && lane != kNoLane);) {
    const uint64_t bytes = std::min(put.bytes - done, kFramePayload);
    const bool last = done + bytes == put.bytes;
    std::byte* target = put.target + done;
    Frame frame{
        .type = FrameType::kPut, .channel = channel_, .bytes = static_cast<uint32_t>(bytes)};
    if (bytes > 0) frame.offset = shadow_.get().offset_of(target);
    if (last && lane != kNoLane) {
      frame.lane = static_cast<uint8_t>(lane);
      frame.half = static_cast<uint8_t>(half);
      frame.stamp = stamp;
    }
    const bool lent = put.source != nullptr;
    wire_.post(frame, lent ? Payload(put.source + done, target) : Payload(target));
    if (last) return;
    done += bytes;
  }
}

void RemotePeer::stream_written(uint64_t begin, uint64_t end) {
  const Segment& shadow = shadow_.get();
  const uint64_t ring = shadow.mailbox_bytes();
  while (begin < end) {
    const uint64_t at = begin % ring;
    const uint64_t bytes = std::min({end - begin, ring - at, kFramePayload});
    std::byte* data = shadow.mailbox_data(0) + at;
    begin += bytes;
    wire_.post({.type = FrameType::kStream,
                .channel = channel_,
                .offset = shadow.offset_of(data),
                .stamp = begin,
                .bytes = static_cast<uint32_t>(bytes)},
               Payload(data));
  }
  wire_.flush();
}

// Credit goes back a quarter of the ring at a time: more often costs frames, less often waits.
void RemotePeer::stream_read(uint64_t cursor) {
  const uint64_t known = credited_.load(std::memory_order_relaxed);
  if (cursor - known < ends_.layout.mailbox_bytes / 4) return;
  credited_.store(cursor, std::memory_order_relaxed);
  wire_.post({.type = FrameType::kCredit, .channel = channel_, .stamp = cursor}, {});
  wire_.flush();
}

void RemotePeer::send_state() {
  wire_.post({.type = FrameType::kState, .channel = channel_}, Payload(state()));
}

void RemotePeer::send_failure_of(Rank other, const RankState& state) {
  const auto offset = static_cast<uint64_t>(other) + 1;  // 0: of the one that tells
  wire_.post({.type = FrameType::kState, .channel = channel_, .offset = offset},
             Payload(bytes_of(state)));
  wire_.flush();
}

std::vector<std::byte> RemotePeer::news() {
  const Header::Progress& progress = ends_.own->of(Board::kHost);
  const bool known = progress.called.load(std::memory_order_acquire) == told_called_ &&
                     progress.finished.load(std::memory_order_acquire) == told_finished_ &&
                     mark(read_blame(*ends_.own)) == told_blame_;
  return known ? std::vector<std::byte>() : state();
}

std::vector<std::byte> RemotePeer::state() {
  const Header& header = *ends_.own;
  const Header::Progress& progress = header.of(Board::kHost);
  RankState state;
  state.called = progress.called.load(std::memory_order_acquire);
  state.finished = progress.finished.load(std::memory_order_acquire);
  state.left = header.left.load(std::memory_order_acquire);
  state.failed = header.failed.load(std::memory_order_acquire);
  state.asked = header.asked.load(std::memory_order_acquire);
  state.blame = read_blame(header);
  if (const auto current = read_board(header, Board::kHost, state.called)) state.current = *current;
  if (state.failed != 0) std::memcpy(state.failure, header.failure, kFailureBytes);
  told_called_ = state.called;
  told_finished_ = state.finished;
  told_blame_ = mark(state.blame);
  return bytes_of(state);
}

// ---- receiving

bool RemotePeer::allowed(const Segment& received, const Frame& frame) {
  const auto within = [&](const std::byte* begin, uint64_t bytes) {
    const uint64_t first = received.offset_of(begin);
    return frame.offset >= first && frame.bytes <= bytes &&
           frame.offset - first <= bytes - frame.bytes;
  };
  if (frame.type == FrameType::kStream) {
    return within(received.mailbox_data(0), received.mailbox_bytes());
  }
  for (int half = 0; half < 2; ++half) {
    if (within(received.inbox(0, half), received.inbox_bytes())) return true;
    if (within(received.line(0, 0, half).payload, kLinePayload)) return true;
  }
  return false;
}

std::byte* RemotePeer::place(const Frame& frame) {
  const Segment* received = received_.try_get();
  if (received == nullptr) return nullptr;  // the group fails by check_memory()
  if (!allowed(*received, frame)) {
    throw FlowError("a frame for memory that is not its sender's to write");
  }
  return received->at(frame.offset);
}

void RemotePeer::deliver(const Frame& frame, std::span<const std::byte> payload) {
  const bool about_mine = frame.type == FrameType::kPut || frame.type == FrameType::kStream;
  const Segment* segment = (about_mine ? received_ : shadow_).try_get();
  if (segment == nullptr) return;  // the group fails by check_memory()
  switch (frame.type) {
    case FrameType::kPut: {
      if (frame.lane >= kLineLanes || frame.half > 1) return;
      Line& line = segment->line(0, frame.lane, frame.half);
      line.stamp.store(frame.stamp, std::memory_order_relaxed);  // ordered by the store of count
      line.count.store(++arrived_[frame.lane], std::memory_order_seq_cst);  // partner: arrived()
      return;
    }
    case FrameType::kStream:
      segment->mailbox(0).written.store(frame.stamp, std::memory_order_seq_cst);
      return;
    case FrameType::kCredit:
      segment->mailbox(0).read.store(frame.stamp, std::memory_order_seq_cst);
      return;
    default: {
      RankState state;
      if (payload.size() > sizeof state || payload.size() < offsetof(RankState, failure)) return;
      std::memcpy(&state, payload.data(), payload.size());
      state.failure[kFailureBytes - 1] = '\0';
      frame.offset == 0 ? heard(state, segment->header()) : heard_of(frame.offset - 1, state);
    }
  }
}

void RemotePeer::heard(const RankState& state, Header& header) {
  Header::Progress& progress = header.of(Board::kHost);
  // Words that are read first may have been sent last. So numbers never go back.
  if (state.called > progress.called.load(std::memory_order_relaxed)) {
    if (state.current.sequence != 0) write_board(header, Board::kHost, state.current);
    progress.called.store(state.called, std::memory_order_release);  // partner: state()
  }
  if (state.finished > progress.finished.load(std::memory_order_relaxed)) {
    progress.finished.store(state.finished, std::memory_order_release);
  }
  if (state.blame.sequence >= read_blame(header).sequence) write_blame(header, state.blame);
  if (state.failed != 0 && header.failed.load(std::memory_order_relaxed) == 0) {
    std::memcpy(header.failure, state.failure, kFailureBytes);
    header.failed.store(1, std::memory_order_release);  // partner: failure()
    note_failure(*ends_.own, ends_.peer);
    wire_.alarm();
  }
  if (state.asked > header.asked.load(std::memory_order_relaxed)) {
    header.asked.store(static_cast<uint32_t>(state.asked), std::memory_order_release);
    wire_.alarm();
  }
  if (state.left != 0) header.left.store(1, std::memory_order_seq_cst);
}

// The other rank may never speak to this one.
void RemotePeer::heard_of(uint64_t other, const RankState& state) {
  if (ends_.remote_ranks == nullptr || other >= ends_.remote_ranks->size() || state.failed == 0)
    return;
  const auto rank = static_cast<Rank>(other);
  if (!ends_.remote_ranks->keep_failure_of(rank, state)) return;
  note_failure(*ends_.own, rank);
  wire_.alarm();
}

}  // namespace ringcomm
