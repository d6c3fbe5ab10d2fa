// Which flow takes the next frame, and with which bytes; how fast a flow is, and how many help.
#include "cpp/harness.h"
#include "net/flow_count.h"
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
  const auto sample = [&](uint64_t bytes, bool full) {
    arrived += bytes;
    meter.sample(now += Millis(10), arrived, full);
    return meter.bytes_per_second();
  };
  for (int i = 0; i < 100; ++i) require(sample(50, false) == 0, "idle: that shows nothing");
  sample(0, true);
  require(sample(100'000, true) == 0, "10 ms show too little");
  require(sample(100'000, true) == 10'000'000, "two looks");
  for (int i = 0; i < 200; ++i) sample(50, false);
  require(meter.bytes_per_second() == 15'000'000, "idle for 2 s: it may have become faster");
  for (int i = 0; i < 1000; ++i) sample(50, false);
  require(meter.bytes_per_second() == 20'000'000, "but not much faster without being measured");
  for (int i = 0; i < 300; ++i) sample(i == 0 ? 0 : 10'000, true);
  const uint64_t slower = meter.bytes_per_second();
  require(slower >= 1'000'000 && slower < 1'050'000, "the old pace is forgotten: ", slower);
  for (int i = 0; i < 3000; ++i) sample(0, true);
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
  // Counts the frames that gather() takes for a flow whose connection takes all at once.
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

// A fast flow goes on while another one holds what it has, up to the window.
void no_flow_stalls_another() {
  Sender sender(2);
  sender.post(2000, 1000);
  require(sender.taken(0) > 0, "the one that is about to stall takes frames");
  sender.session.pace(0, {1, 1 << 20});  // nothing of it arrives any more
  sender.session.pace(1, {kFast, 0});
  while (sender.session.has_output(1)) sender.taken(1);
  require(sender.session.unacknowledged() == kFrameWindow, "it stopped at frame ",
          sender.session.unacknowledged());
}

void unused_flows_are_idle() {
  Sender sender(3);
  sender.session.use(1);
  sender.post(1);
  require(sender.taken(1) == 0 && sender.taken(2) == 0, "new frames over a flow that is not used");
  require(sender.taken(0) == 1, "the used one takes nothing");
  sender.session.down(0);
  sender.post(1);
  require(sender.taken(2) == 1, "no other one is up, and an unused one does not help");
  require(sender.session.needs(0) && !sender.session.needs(1), "flow 0 is to be connected");
  sender.session.use(2);
  sender.session.down(1);
  sender.session.use(1);
  require(sender.session.needs(1), "frames of an unused flow wait for what came of it");
  sender.session.up(1, 2, {}, kBegin);
  sender.session.use(2);
  sender.post(1);
  require(sender.taken(1) == 1, "in use again, and takes nothing");
}

// ---- how many

// A path on which `speed(flows)` bytes a second arrive; looked at every 10 ms.
struct Path {
  double speed(int flows) const { return flow_speed * std::min<double>(flows, enough); }
  // For so many seconds. Returns those with another number of flows than `usual`.
  double run(double seconds, int usual) {
    double other = 0;
    for (double passed = 0; passed < seconds; passed += 0.01) {
      const double noise = 1 + spread * (2 * static_cast<double>(random.below(1000)) / 1000 - 1);
      const double bytes = speed(count.count()) * noise / 100;
      count.sample(now += Millis(10), static_cast<uint64_t>(bytes), full, round_trip);
      other += count.count() == usual ? 0 : 0.01;
    }
    return other;
  }
  FlowCount count{8};
  double flow_speed = 1e7, enough = 1,
         spread = 0.1;  // bytes a second of one flow; flows that fill it
  bool full = true;
  Clock::duration round_trip = Millis(50);
  Clock::time_point now = kBegin;
  Random random{1};
};

void as_many_as_help() {
  for (const int enough : {1, 2, 3, 8, 20}) {
    Path path;
    path.enough = enough;
    path.run(60, 1);
    require(std::abs(path.count.count() - std::min(enough, 8)) <= 1, path.count.count(),
            " flows where ", enough, " fill the path");
    const int most = std::min(enough, 8);
    const double other = path.run(3600, most);
    require(other < 60, other, " of 3,600 s with another number than ", most);
  }
}

void fewer_when_one_is_enough_again() {
  Path path;
  path.enough = 4;
  path.run(60, 4);
  path.enough = 1;
  path.flow_speed *= 4;
  path.run(3600, 1);
  require(path.run(3600, 1) < 60, "it stays with ", path.count.count());
}

void noise_wins_nothing_for_long() {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    Path path;
    path.random = Random(seed);
    path.spread = 0.5;
    path.run(600, 1);
    const double other = path.run(3600, 1);
    require(other < 900, "seed ", seed, ": ", other, " of 3,600 s with more than one flow");
  }
}

void a_path_that_changes_decides_nothing() {
  for (const double change : {0.9, 1.1}) {  // as fast after a second
    Path path;
    double other = 0;
    for (int second = 0; second < 60; ++second) {
      path.flow_speed = std::clamp(path.flow_speed * change, 1e6, 1e8);
      other += path.run(1, 1);
    }
    other += path.run(3600, 1);
    require(other < 60, other, " of 3,600 s with more than one flow");
  }
  Path path;  // it gets slower, as after a slow start, and two flows are twice as fast
  path.enough = 2;
  for (int second = 0; second < 20; ++second, path.flow_speed *= 0.9) path.run(1, 1);
  require(path.count.count() == 2, "a slower path hides what a second flow brings");
}

void idle_time_shows_nothing() {
  Path path;
  path.enough = 8;
  path.full = false;
  require(path.run(600, 1) == 0, "a flow more where there was nothing to send");
}

void a_near_and_fast_path_keeps_one() {
  Path path;
  path.enough = 8;
  path.round_trip = std::chrono::microseconds(100);
  path.flow_speed = 3e9;
  require(path.run(600, 1) == 0, "a flow more where processors set the pace");
  path.flow_speed = 1e8;
  path.run(60, 1);
  require(path.count.count() > 1, "near, and slow: a flow more would help");
}

// A slot is used twice in one operation, and the network takes nothing meanwhile: a long message is
// lent, and what follows into the same bytes is written there at once. The end of the loan must not
// bring the old bytes back.
void the_latest_bytes_stay() {
  Nowhere nowhere;
  Session session(nowhere, 1);
  session.up(0, 1, {}, kBegin);
  std::vector<std::byte> slot(8000), tensor(8000, std::byte{1}), other(100, std::byte{3});
  session.post({.type = FrameType::kPut, .bytes = 8000}, Payload(tensor.data(), slot.data()));
  std::fill_n(slot.data() + 20, 12, std::byte{2});
  session.post({.type = FrameType::kPut, .offset = 20, .bytes = 12}, Payload(slot.data() + 20));
  std::vector<std::byte> apart(100);
  session.post({.type = FrameType::kPut, .offset = 9000, .bytes = 100},
               Payload(other.data(), apart.data()));
  session.reclaim_lent(0);
  std::ranges::fill(tensor, std::byte{9});
  std::ranges::fill(other, std::byte{9});
  std::array<iovec, 8> parts;
  require(session.gather(0, parts) == 6, "three frames");
  const auto byte_of = [&](size_t part, size_t at) {
    return static_cast<int>(static_cast<const std::byte*>(parts[part].iov_base)[at]);
  };
  require(byte_of(3, 0) == 2 && byte_of(3, 11) == 2, "the later frame has byte ", byte_of(3, 0));
  require(byte_of(5, 0) == 3, "a loan that ends is copied: ", byte_of(5, 0));
}

// A process that did not run does not blame its peers for that time, and is not deaf for as long
// again: once it runs, silence counts from what it has heard since.
void a_pause_is_forgiven_once() {
  constexpr auto kPause = std::chrono::seconds(60);
  Sender sender(1);
  Session& session = sender.session;
  const Frame ping = [] {
    Frame made;
    seal(made);
    return made;
  }();
  const auto hears = [&](Clock::time_point now) {
    session.read(0, {reinterpret_cast<const std::byte*>(&ping), sizeof ping}, now);
  };
  hears(kBegin);
  const auto resumed = kBegin + kPause;
  hears(resumed);  // bytes in the socket are read before the tick
  session.tick(resumed, kPause);
  require(session.is_up(0), "the peer is blamed for the pause");
  require(session.last_heard() <= resumed, "it is heard of in the future");
  session.tick(resumed + session.silence() + std::chrono::milliseconds(1), {});
  require(!session.is_up(0), "the peer is silent, and nobody notices");
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  using namespace ringcomm::testing;
  return run_checks({{"meter", meter},
                     {"the fast one first", fast_first},
                     {"an unknown one is tried", unknown_is_tried},
                     {"another connection", another_connection},
                     {"somebody takes it", somebody_takes_it},
                     {"no flow stalls another", no_flow_stalls_another},
                     {"unused flows are idle", unused_flows_are_idle},
                     {"the latest bytes stay", the_latest_bytes_stay},
                     {"as many as help", as_many_as_help},
                     {"fewer when one is enough again", fewer_when_one_is_enough_again},
                     {"noise wins nothing for long", noise_wins_nothing_for_long},
                     {"a path that changes decides nothing", a_path_that_changes_decides_nothing},
                     {"idle time shows nothing", idle_time_shows_nothing},
                     {"a pause is forgiven once", a_pause_is_forgiven_once},
                     {"a near and fast path keeps one", a_near_and_fast_path_keeps_one}},
                    argc, argv);
}
