// Two ends of a session and the connections between them, for the fuzz target of the same name: a
// receiver that believes nothing it is told, and pipes that know where a frame begins.
#pragma once

#include <array>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>

#include "fuzz_driver.h"
#include "net/checksum.h"
#include "net/session.h"

namespace ringcomm::testing {

constexpr uint64_t kMemory = 4 * kFramePayload;  // of each channel: offsets up to this
constexpr uint64_t kChannels = 2;                // 1 and 2; another one is not known

inline bool names_memory(const Frame& frame) {
  return frame.bytes <= kMemory && frame.offset <= kMemory - frame.bytes;
}

// Each payload lands in memory of its own, of just its size.
class Landing final : public Receiver {
 public:
  bool knows(const Frame& frame) const { return channels_.contains(frame.channel); }
  void close(uint64_t channel) { channels_.erase(channel); }
  bool is_open(uint64_t channel) const { return channels_.contains(channel); }

  std::byte* place(const Frame& frame) override {
    require(is_sequenced(frame.type) && frame.type != FrameType::kState && frame.bytes > 0,
            "a place for a frame that needs none");
    if (!knows(frame)) return nullptr;
    if (!names_memory(frame)) throw FlowError("outside");
    return placed_[frame.sequence].emplace_back(frame.bytes).data();
  }

  void deliver(const Frame& frame, std::span<const std::byte> payload) override {
    require(frame.sequence == delivered_.size() + 1, "frame ", frame.sequence, " is delivered as ",
            delivered_.size() + 1);
    const bool state = frame.type == FrameType::kState;
    require(payload.size() == (state ? frame.bytes : 0), "a payload of another size");
    if (state && frame.bytes > 0) {
      require(checksum(payload.data(), payload.size()) == frame.payload_crc,
              "a payload is delivered whose checksum is wrong");
    } else if (frame.bytes > 0 && knows(frame)) {
      require(names_memory(frame), "a payload outside the channel's memory");
      require(arrived(frame), "a payload is delivered that never came whole");
    }
    delivered_.push_back(frame);
    placed_.erase(frame.sequence);  // nothing may be written there any more
  }

  const std::vector<Frame>& delivered() const { return delivered_; }

 private:
  bool arrived(const Frame& frame) {
    return std::ranges::any_of(placed_[frame.sequence], [&](const auto& payload) {
      return payload.size() == frame.bytes &&
             checksum(payload.data(), payload.size()) == frame.payload_crc;
    });
  }

  std::set<uint64_t> channels_{1, kChannels};
  std::map<uint64_t, std::deque<std::vector<std::byte>>> placed_;  // by sequence
  std::vector<Frame> delivered_;
};

// Follows a stream of frames.
class Tracker {
 public:
  // Calls `seen` with each header that is whole.
  template <typename Seen>
  void follow(std::span<const std::byte> bytes, Seen&& seen) {
    while (!bytes.empty()) {
      const size_t taken = std::min(bytes.size(), missing());
      if (done_ < sizeof(Frame)) {
        std::memcpy(reinterpret_cast<std::byte*>(&frame_) + done_, bytes.data(), taken);
      }
      done_ += taken;
      if (done_ == sizeof(Frame)) seen(frame_);
      bytes = bytes.subspan(taken);
      if (done_ >= sizeof(Frame) && missing() == 0) done_ = 0;
    }
  }
  bool at_boundary() const { return done_ == 0; }
  // Counts the bytes that are missing from the header, or from the rest after it.
  size_t missing() const {
    return done_ < sizeof(Frame) ? sizeof(Frame) - done_ : sizeof(Frame) + frame_.bytes - done_;
  }

 private:
  Frame frame_;
  size_t done_ = 0;
};

// One direction of a connection.
struct Pipe {
  std::vector<std::byte> bytes;  // that have not been read yet
  Tracker writer, reader;
  bool changed = false;  // a byte was: the reader is lost
};

struct Connection {
  std::array<Pipe, 2> to;  // by receiving side
};

// One process's end. Memory that it lends goes as soon as the session says that it may.
struct End {
  End(int flows, const SessionRules& rules)
      : session(landing, flows, rules), connections(static_cast<size_t>(flows)) {}

  std::shared_ptr<Connection>& connection(int flow) {
    return connections[static_cast<size_t>(flow)];
  }
  uint64_t last_sent() const { return session.acknowledged() + session.unacknowledged(); }
  void close(int flow) {
    session.down(flow);
    connection(flow).reset();
  }
  void close_those_it_closed() {
    for (const int flow : session.take_closed()) connection(flow).reset();
  }

  struct Memory {
    uint64_t channel;
    std::vector<std::byte> lent, shadow;
  };
  Landing landing;
  Session session;
  std::vector<std::shared_ptr<Connection>> connections;  // by flow; null: down
  std::vector<Frame> posted;
  std::deque<Memory> memory;
};

// ---- the effect of words that no true peer said

// kEither: its effect is harmless. kLie: true frames may be lost afterwards.
enum class Verdict : uint8_t { kRefused, kHarmless, kEither, kLie };

inline std::string describe(const Frame& frame) {
  return str("type ", static_cast<int>(frame.type), " sequence ", frame.sequence, " ack ",
             frame.ack, " channel ", frame.channel, " offset ", frame.offset, " stamp ",
             frame.stamp, ", ", frame.bytes, " bytes");
}

struct Forged {
  Frame frame;
  std::span<const std::byte> payload;
  bool whole;  // its checksum is right
};

inline bool is_lie(const Cursor& told, const Cursor& truth, uint64_t last_sent) {
  for (uint64_t sequence = 1; sequence <= last_sent; ++sequence) {
    if (told.has(sequence) && !truth.has(sequence)) return true;
  }
  return false;
}

// Judges a control frame whose header makes sense.
inline Verdict judge_control(const Forged& forged, End& end, End& peer) {
  const Frame& frame = forged.frame;
  const bool about_flow = frame.type == FrameType::kFlowDown || frame.type == FrameType::kFenced;
  const bool cursor = frame.type == FrameType::kAck || frame.type == FrameType::kFenced;
  if (about_flow && frame.offset >= static_cast<uint64_t>(end.session.flows())) {
    return Verdict::kRefused;
  }
  if (frame.type == FrameType::kFlowDown) {
    const int flow = static_cast<int>(frame.offset);
    const bool known =
        frame.stamp <= std::max(end.session.generation(flow), peer.session.generation(flow));
    return known ? Verdict::kHarmless : Verdict::kLie;
  }
  if (!cursor) return Verdict::kHarmless;
  Cursor told;
  told.all = frame.ack;
  if (frame.bytes == sizeof told.more) {
    std::memcpy(told.more.data(), forged.payload.data(), sizeof told.more);
  } else if (frame.bytes > 0) {
    return about_flow ? Verdict::kEither : Verdict::kRefused;
  }
  const bool lie = is_lie(told, peer.session.cursor(), end.last_sent());
  return lie ? Verdict::kLie : Verdict::kHarmless;
}

// Judges it when `end` reads it, as `peer` stands now.
inline Verdict judge(const Forged& forged, End& end, End& peer, uint64_t window) {
  const Frame& frame = forged.frame;
  const auto type = static_cast<int>(frame.type);
  const bool numbered = type <= 4;
  if (type < 1 || type > 9 || frame.bytes > (type <= 2 ? 256 : 4) * 1024) return Verdict::kRefused;
  if (numbered != (frame.sequence > 0)) return Verdict::kRefused;
  const Cursor mine = end.session.cursor();
  if (numbered && frame.sequence > mine.all + window) return Verdict::kRefused;
  const bool again = numbered && mine.has(frame.sequence);
  const bool lands = type <= 3 && frame.bytes > 0 && !again;
  const bool known = end.landing.knows(frame);
  if (lands && known && !names_memory(frame)) return Verdict::kRefused;
  const bool dropped = again || (lands && !known);
  if (frame.bytes > 0 && !dropped && !forged.whole) return Verdict::kRefused;
  if (frame.ack > end.last_sent()) return Verdict::kRefused;
  if ((numbered && !again) || frame.ack > peer.session.cursor().all) return Verdict::kLie;
  return numbered ? Verdict::kHarmless : judge_control(forged, end, peer);
}

}  // namespace ringcomm::testing
