// Fuzz target: two sessions, and an input that says what they post, which bytes arrive, and what
// somebody puts between them: cuts, changed bytes, and frames and cursors whose checksums are right
// and whose content is the input's.
//
// Always: a frame is delivered once, in its turn, and only with a payload that came whole; what
// waits to be written stays small; what makes no sense closes its flow. And as long as nobody has
// told a lie that a true peer could have told, all that was posted is delivered in the end.
#include "fuzz_pair.h"

namespace ringcomm::testing {
namespace {

constexpr size_t kMostSteps = 600;
constexpr uint64_t kMostWaiting = 3 * kFramePayload + 1024;  // bytes to be written to one flow

class World : public Pair {
 public:
  using Pair::Pair;

  void run() {
    for (int flow = 0; flow < flows_; ++flow) connect(flow, 0, 3);
    for (size_t step = 0; step < kMostSteps && !input_.empty(); ++step) act();
    heal();
  }

 private:
  int any_flow() { return static_cast<int>(input_.below(static_cast<uint64_t>(flows_))); }

  void act() {
    const auto choice = input_.take();
    const int side = choice >> 7, flow = any_flow();
    switch (choice % 16) {
      case 0:
      case 1:
        return post(side);
      case 2:
      case 3:
        return write(side, flow, kAll);
      case 4:
        return write(side, flow, 1 + input_.below(256));
      case 5:
      case 6:
        return read(side, flow, kAll);
      case 7:
        return read(side, flow, 1 + input_.below(256));
      case 8:
        end(side).close(flow);
        if (input_.below(2) == 0) end(1 - side).close(flow);
        return;
      case 9:
        return connect(flow, side, input_.below(4));
      case 10:
        return corrupt(side, flow);
      case 11:
        return pass_time(side, std::chrono::milliseconds(input_.below(256) * 30));
      case 12:
        return give_back(side);
      case 13:
        return resume_with_any_cursor(side, flow);
      default:
        return inject(side, flow);
    }
  }

  // ---- an attacker's steps

  void corrupt(int side, int flow) {
    const auto at = input_.take<uint32_t>();
    const auto connection = end(side).connection(flow);
    if (!connection || connection->to[static_cast<size_t>(side)].bytes.empty()) return;
    Pipe& pipe = connection->to[static_cast<size_t>(side)];
    pipe.bytes[at % pipe.bytes.size()] ^= static_cast<std::byte>(1 + input_.below(255));
    pipe.changed = true;
  }

  // A handshake with somebody who has the key and says anything.
  void resume_with_any_cursor(int side, int flow) {
    End& self = end(side);
    const Cursor truth = end(1 - side).session.cursor();
    const uint64_t last = self.last_sent();
    Cursor told = input_.below(2) == 0 ? truth : Cursor{};
    told.all = input_.one_of({told.all, 0, last, last + 1});
    if (input_.below(2) == 0) told.more[input_.below(2)] |= input_.take<uint64_t>();
    const uint64_t generation = self.session.generation(flow) + input_.below(3);
    pending_[static_cast<size_t>(flow)].reset();
    self.close(flow);
    lied_ = lied_ || is_lie(told, truth, last);
    try {
      if (!self.session.up(flow, generation, told, now_)) return;
      require(told.all <= last, "a cursor of what was never sent is believed");
      self.connection(flow) = std::make_shared<Connection>();  // its other end has no reader
    } catch (const FlowError&) {
      require(told.all > last, "a cursor that makes sense is refused");
    }
  }

  Frame make_frame(int side) {
    End& self = end(side);
    const Session& session = self.session;
    const Cursor mine = session.cursor();
    const uint64_t last = self.last_sent(), window = rules_.window;
    const auto how = input_.take();
    Frame frame;
    frame.type = static_cast<FrameType>(how % 11);
    const bool numbered = is_sequenced(frame.type);
    frame.lane = how >> 4;
    frame.half = static_cast<uint8_t>(input_.one_of({0, 1}));
    frame.sequence = input_.one_of({numbered ? mine.all : 0, numbered ? mine.all + 1 : 0,
                                    mine.all + 2, mine.all + window, mine.all + window + 1, 1});
    frame.ack = input_.one_of({0, end(1 - side).session.cursor().all, last, last + 1});
    frame.channel = input_.one_of({1, kChannels, kChannels + 1});
    const auto flow = static_cast<uint64_t>(any_flow());
    const uint64_t generation = session.generation(static_cast<int>(flow));
    frame.offset =
        input_.one_of({flow, flow, kMemory - 128, kMemory, static_cast<uint64_t>(flows_)});
    frame.stamp = input_.one_of({0, generation, generation - 1, generation + 1});
    frame.bytes = static_cast<uint32_t>(
        input_.one_of({0, 128, 1, 1024, kFramePayload, kFramePayload + 1, UINT32_MAX}));
    return frame;
  }

  // Up to the next frame of the pipe.
  bool reach_boundary(int side, int flow) {
    const auto connection = end(side).connection(flow);
    if (!connection) return false;
    const Pipe& pipe = connection->to[static_cast<size_t>(side)];
    const auto good = [&] { return end(side).connection(flow) == connection && !pipe.changed; };
    while (good() && !pipe.reader.at_boundary() && !pipe.bytes.empty()) {
      read(side, flow, pipe.reader.missing());
    }
    return good() && pipe.reader.at_boundary();
  }

  void inject(int side, int flow) {
    if (!reach_boundary(side, flow)) return;
    End& self = end(side);
    Frame frame = make_frame(side);
    const auto how = input_.take();
    std::vector<std::byte> bytes(sizeof frame + std::min<uint64_t>(frame.bytes, kFramePayload + 1));
    const std::span payload = std::span(bytes).subspan(sizeof frame);
    std::ranges::fill(payload, static_cast<std::byte>(input_.take()));
    frame.payload_crc = checksum(payload.data(), payload.size()) + (how % 4 == 0 ? 1 : 0);
    seal(frame);
    std::memcpy(bytes.data(), &frame, sizeof frame);
    const auto verdict = judge({frame, payload, how % 4 != 0}, self, end(1 - side), rules_.window);
    lied_ = lied_ || verdict == Verdict::kLie;
    const std::string refused = take(side, flow, bytes);
    if (verdict == Verdict::kRefused)
      require(!refused.empty(), "nonsense is taken: ", describe(frame));
    if (verdict == Verdict::kHarmless) require(refused.empty(), refused, ": ", describe(frame));
    if (how < 252 || !refused.empty() || payload.size() > 128) return;
    // A peer that asks again and again, and reads no answer, is not heard for ever.
    for (int copy = 0; copy < 1 << 14 && self.session.is_up(flow); ++copy) take(side, flow, bytes);
    check_waiting(self, flow);
  }

  static void check_waiting(End& self, int flow) {
    std::vector<iovec> parts(1 << 16);
    const size_t count = self.session.gather(flow, parts);
    uint64_t bytes = 0;
    for (size_t i = 0; i < count; ++i) bytes += parts[i].iov_len;
    require(bytes <= kMostWaiting, bytes, " bytes wait to be written to one flow");
  }

  // ---- the end: connections are whole again, and all is said

  void heal() {
    for (int flow = 0; flow < flows_; ++flow) {
      pending_[static_cast<size_t>(flow)].reset();
      connect(flow, 0, 3);
      require(lied_ || (end(0).connection(flow) && end(1).connection(flow)),
              "no new flow is taken");
    }
    for (int round = 0; round < 1000 && !quiet(); ++round) {
      for (const int side : {0, 1}) {
        for (int flow = 0; flow < flows_; ++flow) {
          write(side, flow, kAll);
          read(1 - side, flow, kAll);
        }
        pass_time(side, std::chrono::milliseconds(10));
      }
      if (lied_ && round == 3) return;
    }
    if (lied_) return;
    require(quiet(), "not all is acknowledged");
    for (const int side : {0, 1}) compare(end(side).posted, end(1 - side).landing.delivered());
  }

  bool quiet() {
    return std::ranges::all_of(ends_, [](const auto& end) {
      return end->session.acknowledged() == end->session.posted();
    });
  }

  static void compare(const std::vector<Frame>& posted, const std::vector<Frame>& delivered) {
    require(posted.size() == delivered.size(), delivered.size(), " of ", posted.size(), " came");
    for (size_t i = 0; i < posted.size(); ++i) {
      const Frame &a = posted[i], &b = delivered[i];
      require(a.type == b.type && a.channel == b.channel && a.offset == b.offset &&
                  a.stamp == b.stamp && a.lane == b.lane && a.bytes == b.bytes,
              "frame ", i + 1, " has changed");
      require(a.payload_crc == b.payload_crc, "the payload of frame ", i + 1, " has changed");
    }
  }
};

}  // namespace

// ---- scripts

std::vector<std::string> rules() { return {"apply_once", "fence", "verify", "bounded"}; }

// Any bytes are a script. These hold much traffic and little harm, in small numbers: those that
// choose known ones.
std::vector<Bytes> corpus() {
  constexpr std::array<uint8_t, 8> kTraffic = {0, 0, 2, 2, 5, 5, 4, 7};
  std::vector<Bytes> scripts;
  constexpr auto kFlowDown = static_cast<uint8_t>(FrameType::kFlowDown), kOften = uint8_t{255};
  scripts.push_back(
      Output().add_each(1, 14, 0, kFlowDown, 0, 0, 1, 0, 0, 0, 0, 0, kOften, 0).take());
  for (uint64_t seed = 0; seed < 64; ++seed) {
    Random random(seed);
    Output out;
    out.add_each(seed % 8);
    const uint64_t harm = seed < 8 ? 0 : 1 + random.below(4), most = 3 + random.below(6);
    for (uint64_t action = 0; action < 40 + 4 * seed; ++action) {
      const bool quiet = random.below(8) >= harm;
      const uint64_t choice = quiet ? kTraffic[random.below(8)] : 8 + random.below(8);
      out.add_each(choice | (random.below(2) << 7), random.below(3));
      const uint64_t length = choice >= 14 ? 9 : choice < 2 ? 3 : 1 + random.below(2);
      for (uint64_t i = 0; i < length; ++i) out.add_each(random.below(most));
      if (choice >= 14) out.add_each(random.below(32) == 0 ? 255 : 1, 0);
    }
    scripts.push_back(out.take());
  }
  return scripts;
}

}  // namespace ringcomm::testing

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  ringcomm::testing::Input input(data, bytes);
  ringcomm::testing::World(input).run();
  return 0;
}
