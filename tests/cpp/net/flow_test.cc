// Which flow takes the next frame, and how fast a flow is.
#include "cpp/harness.h"
#include "net/meter.h"
#include "net/session.h"

namespace ringcomm::testing {
namespace {

using Millis = std::chrono::milliseconds;

constexpr Clock::time_point kBegin{std::chrono::hours(1)};

void meter() {
  Meter meter;
  uint64_t arrived = 0;
  auto now = kBegin;
  const auto look = [&](uint64_t bytes, bool full) {
    arrived += bytes;
    meter.look(now += Millis(10), arrived, full);
    return meter.bytes_per_second();
  };
  for (int i = 0; i < 100; ++i) require(look(50, false) == 0, "idle: that shows nothing");
  look(0, true);
  require(look(100'000, true) == 0, "10 ms show too little");
  require(look(100'000, true) == 10'000'000, "two looks");
  for (int i = 0; i < 200; ++i) look(50, false);
  require(meter.bytes_per_second() == 15'000'000, "idle for 2 s: it may have become faster");
  for (int i = 0; i < 1000; ++i) look(50, false);
  require(meter.bytes_per_second() == 20'000'000, "but not much faster without being measured");
  for (int i = 0; i < 300; ++i) look(i == 0 ? 0 : 10'000, true);
  const uint64_t slower = meter.bytes_per_second();
  require(slower >= 1'000'000 && slower < 1'050'000, "the old pace is forgotten: ", slower);
  for (int i = 0; i < 3000; ++i) look(0, true);
  require(meter.bytes_per_second() == 1, "nothing arrives, and that is known");
}

class Nowhere final : public Receiver {
 public:
  std::byte* place(const Frame&) override { return nullptr; }
  void deliver(const Frame&, std::span<const std::byte>) override {}
};

struct Sender {
  explicit Sender(int flows) : session(nowhere, flows), data(kFramePayload) {
    for (int flow = 0; flow < flows; ++flow) session.up(flow, 1, {}, kBegin);
  }
  void post(int frames, uint32_t bytes = kFramePayload) {
    for (int i = 0; i < frames; ++i) {
      Frame frame;
      frame.type = FrameType::kPut;
      frame.bytes = bytes;
      session.post(frame, Payload(data.data()));
    }
  }
  // What gather() takes for a flow whose connection takes all at once.
  int taken(int flow) {
    const uint64_t before = session.unacknowledged();
    const bool expected = session.has_output(flow);
    std::array<iovec, 64> parts;
    const size_t count = session.gather(flow, parts);
    require(expected == (count > 0), "has_output() says what gather() does");
    size_t bytes = 0;
    for (size_t i = 0; i < count; ++i) bytes += parts[i].iov_len;
    session.wrote(flow, bytes);
    return static_cast<int>(session.unacknowledged() - before);
  }
  Nowhere nowhere;
  Session session;
  std::vector<std::byte> data;
};

constexpr uint64_t kSlow = 2'500'000, kFast = 25'000'000;

void fast_first() {
  Sender sender(2);
  sender.session.pace(0, {kSlow, 0});
  sender.session.pace(1, {kFast, 0});
  sender.post(9);
  require(sender.taken(0) == 0, "all are there sooner over the fast one");
  require(sender.taken(1) == 1, "which takes them");
  sender.post(20);
  require(sender.taken(0) == 1, "while it brings all these, the slow one brings one");
  sender.session.pace(0, {kSlow, 2 * kFramePayload});
  require(sender.taken(0) == 0, "but no third one behind two");
  sender.session.down(1);
  require(sender.taken(0) == 1, "alone it takes what there is");
}

void unknown_is_tried() {
  Sender sender(3);
  sender.session.pace(0, {kSlow, 0});
  sender.session.pace(1, {0, 1 << 20});
  sender.post(3, 100);
  require(sender.taken(0) == 0, "the pace of others is not known yet");
  require(sender.taken(1) == 3, "so they are tried");
}

void another_connection() {
  Sender sender(2);
  sender.session.pace(0, {1, 0});
  sender.session.pace(1, {kFast, 0});
  sender.session.up(0, 2, {}, kBegin);
  sender.post(1);
  require(sender.taken(0) == 1, "of a new connection nothing is known");
}

void somebody_takes_it() {
  Random random(1);
  for (int round = 0; round < 2000; ++round) {
    const int flows = 1 + static_cast<int>(random.below(4));
    Sender sender(flows);
    sender.post(1 + static_cast<int>(random.below(40)),
                1 + static_cast<uint32_t>(random.below(kFramePayload)));
    for (int flow = 0; flow < flows; ++flow) {
      sender.session.pace(flow, {random.below(5) * random.below(kFast), random.below(1 << 20)});
    }
    int taken = 0;
    for (int flow = 0; flow < flows; ++flow) taken += sender.taken(flow);
    require(taken > 0, "round ", round, ": no flow takes anything");
  }
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  using namespace ringcomm::testing;
  return run_checks({{"meter", meter},
                     {"the fast one first", fast_first},
                     {"an unknown one is tried", unknown_is_tried},
                     {"another connection", another_connection},
                     {"somebody takes it", somebody_takes_it}},
                    argc, argv);
}
