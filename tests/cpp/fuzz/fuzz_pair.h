// The regular work of the two processes of fuzz_session.cc, in steps that the input chooses: they
// post, give memory back, move bytes, and connect.
#pragma once

#include <utility>

#include "fuzz_session.h"

namespace ringcomm::testing {

constexpr size_t kMostPosts = 200, kAll = SIZE_MAX;

class Pair {
 public:
  explicit Pair(Input& input) : input_(input) {
    const auto how = input_.take();
    flows_ = 1 + how % 3;
    rules_.window = (how & 4) != 0 ? 8 : kFrameWindow;
    rules_.apply_once = !without("apply_once");
    rules_.fence = !without("fence");
    rules_.verify = !without("verify");
    rules_.bounded = !without("bounded");
    for (auto& end : ends_) end = std::make_unique<End>(flows_, rules_);
    pending_.resize(static_cast<size_t>(flows_));
  }

 protected:
  End& end(int side) { return *ends_[static_cast<size_t>(side)]; }

  void post(int side) {
    End& self = end(side);
    const auto how = input_.take();
    const auto size = input_.take();
    Frame frame;
    frame.type = static_cast<FrameType>(1 + how % 4);
    frame.channel = 1 + (how >> 2) % kChannels;
    if (self.posted.size() == kMostPosts || !self.landing.is_open(frame.channel)) return;
    frame.lane = how >> 3 & 1;
    frame.stamp = self.posted.size() + 1;
    frame.bytes = size == 255 ? kFramePayload : size * 4;
    if (frame.type == FrameType::kCredit) frame.bytes = 0;
    if (frame.type == FrameType::kState) frame.bytes %= 1024;
    frame.offset = frame.stamp % 100;
    std::vector<std::byte> payload(frame.bytes, static_cast<std::byte>(frame.stamp));
    frame.payload_crc = frame.bytes == 0 ? 0 : checksum(payload.data(), payload.size());
    self.posted.push_back(frame);
    if (frame.type == FrameType::kState || (how & 16) != 0) {
      return self.session.post(frame, Payload(std::move(payload)));
    }
    const bool keep = (how & 32) != 0;
    self.memory.push_back({frame.channel, std::move(payload), {}});
    auto& memory = self.memory.back();
    if (keep) memory.shadow.resize(frame.bytes);
    self.session.post(frame, Payload(memory.lent.data(), keep ? memory.shadow.data() : nullptr));
  }

  // An operation ends, or the channel goes.
  void give_back(int side) {
    End& self = end(side);
    const uint64_t channel = 1 + input_.below(kChannels);
    const bool all = input_.below(4) == 0;
    if (all) {
      self.landing.close(channel);
      self.session.release(channel);
    } else {
      self.session.reclaim_lent(channel);
    }
    for (auto& memory : self.memory) {
      if (memory.channel != channel || (!all && memory.shadow.empty())) continue;
      std::ranges::fill(memory.lent, std::byte{0xee});  // seen without a sanitizer, too
      std::vector<std::byte>().swap(memory.lent);
      if (all) std::vector<std::byte>().swap(memory.shadow);
    }
  }

  void write(int side, int flow, size_t most) {
    End& self = end(side);
    const auto connection = self.connection(flow);
    if (!connection) return;
    Pipe& pipe = connection->to[static_cast<size_t>(1 - side)];
    std::array<iovec, 32> parts;
    const bool any = self.session.has_output(flow);
    const size_t count = self.session.gather(flow, parts);
    require(any || count == 0, "output that was not told of");
    size_t written = 0;
    for (size_t i = 0; i < count && written < most; ++i) {
      const auto* data = static_cast<const std::byte*>(parts[i].iov_base);
      const size_t bytes = std::min(parts[i].iov_len, most - written);
      pipe.bytes.insert(pipe.bytes.end(), data, data + bytes);
      pipe.writer.follow({data, bytes}, [&](const Frame& frame) { check_said(side, flow, frame); });
      written += bytes;
    }
    self.session.wrote(flow, written);
  }

  // A session says only what its own kind takes.
  void check_said(int side, int flow, const Frame& frame) {
    const Session& session = end(side).session;
    check(frame);
    require(frame.sequence <= session.posted(), "a frame that nobody posted");
    require(frame.ack <= end(side).landing.delivered().size(), "it acknowledges what never came");
    if (frame.type != FrameType::kFenced) return;
    const int other = static_cast<int>(frame.offset);
    require(frame.stamp != session.generation(other) || !session.is_up(other), "flow ", flow,
            " tells what came over flow ", other, ", which is open");
  }

  void read(int side, int flow, size_t most) {
    const auto connection = end(side).connection(flow);
    if (!connection) return;
    Pipe& pipe = connection->to[static_cast<size_t>(side)];
    const auto length = static_cast<ptrdiff_t>(std::min(most, pipe.bytes.size()));
    const std::vector<std::byte> bytes(pipe.bytes.begin(), pipe.bytes.begin() + length);
    pipe.bytes.erase(pipe.bytes.begin(), pipe.bytes.begin() + length);
    if (!pipe.changed) pipe.reader.follow(bytes, [](const Frame&) {});
    const std::string refused = take(side, flow, bytes);
    require(refused.empty() || pipe.changed || lied_, "a flow of true frames: ", refused);
  }

  // As Network::read_from does; with why the flow was closed, if it was.
  std::string take(int side, int flow, std::span<const std::byte> bytes) {
    End& self = end(side);
    const bool directly = input_.below(2) == 0;
    std::string refused;
    try {
      while (!bytes.empty() && self.session.is_up(flow)) {
        const auto landing = self.session.landing(flow);
        size_t taken = std::min<size_t>(bytes.size(), 1000);
        if (directly && !landing.empty()) {
          taken = std::min(landing.size(), bytes.size());
          std::memcpy(landing.data(), bytes.data(), taken);
          self.session.landed(flow, taken);
        } else {
          self.session.read(flow, bytes.first(taken), now_);
        }
        bytes = bytes.subspan(taken);
      }
    } catch (const FlowError& error) {
      self.close(flow);
      refused = error.what();
    }
    self.close_those_it_closed();
    return refused;
  }

  // `steps` of the handshake: missing bytes got lost, or come when this is called again.
  void connect(int flow, int initiator, uint64_t steps) {
    auto& pending = pending_[static_cast<size_t>(flow)];
    End& caller = end(initiator);
    End& acceptor = end(1 - initiator);
    if (pending && steps > 1) {
      const auto [side, generation, cursor, connection] = *std::exchange(pending, std::nullopt);
      open(end(side), flow, {generation, cursor, connection});
      return;
    }
    const uint64_t generation =
        1 + std::max(caller.session.generation(flow), acceptor.session.generation(flow));
    caller.close(flow);
    pending.reset();
    if (steps == 0) return;
    const Cursor proof = caller.session.cursor();
    acceptor.close(flow);
    const Cursor resume = acceptor.session.cursor();
    const auto connection = std::make_shared<Connection>();
    open(acceptor, flow, {generation, proof, connection});
    if (steps < 3) {
      pending = {initiator, generation, resume, connection};
    } else {
      open(caller, flow, {generation, resume, connection});
    }
  }

  struct Greeting {
    uint64_t generation;
    Cursor theirs;
    std::shared_ptr<Connection> connection;
  };
  void open(End& self, int flow, const Greeting& greeting) {
    try {
      const bool up = self.session.up(flow, greeting.generation, greeting.theirs, now_);
      self.connection(flow) = up ? greeting.connection : nullptr;
    } catch (const FlowError& error) {
      require(lied_, "a true cursor: ", error.what());
    }
  }

  void pass_time(int side, Clock::duration time) {
    now_ += time;
    if (input_.below(8) == 0) end(side).session.ask_for_ack();
    end(side).session.tick(now_, input_.below(8) == 0 ? time : Clock::duration{});
    end(side).close_those_it_closed();
  }

  struct Pending {
    int side;
    uint64_t generation;
    Cursor cursor;
    std::shared_ptr<Connection> connection;
  };

  Input& input_;
  int flows_;
  SessionRules rules_;
  std::array<std::unique_ptr<End>, 2> ends_;
  std::vector<std::optional<Pending>> pending_;  // by flow
  Clock::time_point now_{std::chrono::hours(1)};
  bool lied_ = false;
};

}  // namespace ringcomm::testing
