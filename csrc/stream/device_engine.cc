#include "stream/device_engine.h"

#include <ranges>
#include <thread>

#include "group/process.h"

namespace ringcomm {

constexpr auto kParting = std::chrono::microseconds(100);  // between looks at what is still mapped
constexpr auto kReleaseInterval = std::chrono::milliseconds(1);
constexpr auto kIdle = std::chrono::milliseconds(200);
constexpr uint64_t kIdleEvery = 64;  // operations
constexpr int kReceiving = 3;        // streams
constexpr int kConnections = 8;      // CUDA's own choice

void DeviceEngine::Completion::block(cuda::Stream stream) const {
  const cuda::OnDevice here(engine_.api_, engine_.device_);  // which the default stream is of
  engine_.api_.wait(stream, event_);
}

bool DeviceEngine::Completion::good() const {
  engine_.note_progress();
  return std::ranges::all_of(
      points_, [&](const auto& each) { return engine_.is_good(each.timeline, each.value); });
}

bool DeviceEngine::Completion::reached() const {
  return std::ranges::all_of(
      points_, [&](const auto& each) { return engine_.reached(each.timeline, each.value); });
}

DeviceEngine::DeviceEngine(GroupState& state, Progress& group, cuda::Api& api, int device)
    : state_(state),
      api_(api),
      device_(device),
      own_(state.transport().device_area(state.rank()), state.size()),
      recorder_(state.recorded(true), Process::get().began()),
      diagnosis_(state.transport(), recorder_, Board::kDevice,
                 [this](Rank peer, uint64_t sequence) { return state_of(peer, sequence); }),
      timelines_(static_cast<size_t>(1 + 2 * state.size())),
      sent_(static_cast<size_t>(state.size())),
      received_(static_cast<size_t>(state.size())),
      staging_(group, api_,
               [this](const HostStaging::Point& point) {
                 if (!reached(point.timeline, point.value)) return false;
                 note_progress();  // before the result is overwritten
                 return true;
               }),
      good_until_(timelines_.size()),
      spoilt_(good_until_.size()) {
  const GroupConfig& config = state_.config();
  const std::string refusal = config.cuda_mode == "host" ? "RINGCOMM_CUDA_MODE=host" : "";
  const auto warn = [this](const std::string& text) {
    if (Process::get().neighbours().first_time(text)) state_.logger().warning(text);
  };
  const auto idle = [this] {
    note_progress();
    return under_way == 0;
  };
  comm_ = std::make_unique<cuda::DeviceComm>(cuda::Ends{api, state_.transport(), warn, idle},
                                             device, config.cuda_memory.value_or(0), refusal);
}

DeviceEngine::~DeviceEngine() {
  if (state_.forked() || kept_) {
    const cuda::DeviceComm* const kept = comm_.release();
    static_cast<void>(kept);
    return;  // what streams still do stays under way
  }
  under_way -= static_cast<int64_t>(pending_.size());
  const Lock lock(enqueue_mutex_);
  if (comm_) give_back();
  try {
    const cuda::OnDevice here(api_, device_);
    for (const cuda::Event event : events_) api_.destroy_event(event);
  } catch (const std::exception& error) {  // of the device, for good
    state_.logger().info("events cannot be given back to the device: ", error.what());
  }
}

// What waits for the device's streams: not for the worker, on which those may depend.
void DeviceEngine::give_back() {
  std::unique_ptr<cuda::DeviceComm> comm;
  {
    const Lock lock(mutex_);
    comm = std::move(comm_);
  }
  try {
    const cuda::OnDevice here(api_, device_);
    for (Timeline& timeline : timelines_) {
      for (cuda::Event* const event : {&timeline.event, &timeline.captured}) {
        if (*event != nullptr) api_.destroy_event(std::exchange(*event, nullptr));
      }
    }
    for (const cuda::Stream stream : std::exchange(streams_, {})) api_.destroy_stream(stream);
    staging_.give_back();
  } catch (const std::exception& error) {
    state_.logger().info("nothing can be given back to the device: ", error.what());
  }
}

void DeviceEngine::synchronize(cuda::Stream stream) const {
  const cuda::OnDevice here(api_, device_);
  api_.synchronize(stream);
}

// ---- events, streams, counts

bool DeviceEngine::reached(int timeline, uint32_t value) const {
  if (state_.forked()) return true;  // that memory is the parent's alone
  const uint32_t done = own_.done(timeline).load(std::memory_order_seq_cst);
  return static_cast<int32_t>(done - value) >= 0;
}

cuda::Event DeviceEngine::event() {
  {
    const Lock lock(mutex_);
    if (!events_.empty()) {
      const cuda::Event event = events_.back();
      events_.pop_back();
      return event;
    }
  }
  return api_.make_event();
}

// One for the group's operations, one for sending, and few for receiving: streams share connections
// to the device, on which one that waits holds up the others. They are made at once, before any of
// them waits: the driver may make no other then.
void DeviceEngine::make_streams() {
  if (!streams_.empty()) return;
  const int receiving = std::min(kReceiving, std::max(1, state_.size() - 1));
  for (int i = 0; i < 2 + receiving; ++i) streams_.push_back(api_.make_stream());
  timelines_[0].own = streams_[0];
  for (Rank peer = 0; peer < state_.size(); ++peer) {
    const int other = (peer < state_.rank() ? peer : peer - 1) % receiving;
    timeline(peer, true).own = streams_[1];
    timeline(peer, false).own = streams_[static_cast<size_t>(2 + std::max(0, other))];
  }
  const int connections = Process::get().config().cuda_connections;
  if (connections >= kConnections) return;
  state_.logger().warning("CUDA_DEVICE_MAX_CONNECTIONS=", connections, ": streams that wait for a ",
                          "rank hold up others, also the program's; ", kConnections,
                          " or more are safer");
}

// Now and then it is waited until nothing is under way, not for long.
void DeviceEngine::look() {
  if (!comm_->has_news()) return;
  note_progress();
  if (under_way > 0 && busy_looks_++ % kIdleEvery == 0) await_idle(Deadline(kIdle));
  if (under_way == 0) comm_->look();
}

bool DeviceEngine::await_idle(const Deadline& deadline) {
  poll_until([&] { return under_way == 0 || deadline.passed(); }, kParting,
             [&] {
               note_progress();
               state_.check();
             });
  return under_way == 0;
}

// The stream for what comes next in these timelines: after what came before in each of them.
cuda::Stream DeviceEngine::begin(const std::vector<int>& timelines, cuda::Stream caller,
                                 bool on_own_stream) {
  const cuda::Stream own = timelines_[static_cast<size_t>(timelines[0])].own;
  const cuda::Stream stream = on_own_stream ? own : caller;
  if (on_own_stream) {
    const cuda::Event ready = event();
    api_.record(ready, caller);
    api_.wait(stream, ready);
    keep(ready);
  }
  for (const int index : timelines) {
    const Timeline& timeline = timelines_[static_cast<size_t>(index)];
    if (timeline.event != nullptr) api_.wait(stream, timeline.event);
  }
  return stream;
}

DeviceEngine::CompletionPtr DeviceEngine::end(const std::vector<int>& timelines,
                                              cuda::Stream stream, std::vector<Pending> pending) {
  std::vector<HostStaging::Point> points;
  for (const int index : timelines) {
    Timeline& timeline = timelines_[static_cast<size_t>(index)];
    if (timeline.event == nullptr) timeline.event = api_.make_event();
    // Peers take that of the group's operations for a sequence number: captured ones have some,
    // too.
    const bool numbered = index == 0 && reach(-1);
    timeline.issued = numbered ? static_cast<uint32_t>(sequence_) : timeline.issued + 1;
    if (staging_.streams_can_signal) {
      comm_->mark(stream, index, timeline.issued);
    } else {
      api_.synchronize(stream);
      own_.done(index).store(timeline.issued, std::memory_order_seq_cst);
    }
    api_.record(timeline.event, stream);
    points.push_back({index, timeline.issued});
  }
  const cuda::Event over = event();
  api_.record(over, stream);
  for (Pending& each : pending) each.value = timelines_[static_cast<size_t>(each.timeline)].issued;
  bool first = false;
  uint64_t batch = 0;
  {
    const Lock lock(mutex_);
    first = pending_.empty();
    batch = ++batches_;
    for (Pending& each : pending) {
      each.batch = batch;
      pending_.push_back(each);
      ++under_way;
    }
  }
  if (first || staging_.gated()) state_.kick();  // the worker knows when to look for the next gate
  note_progress();
  return std::make_shared<Completion>(*this, batch, std::move(points), over, stream);
}

// ---- watching

bool DeviceEngine::pending(uint64_t until_batch) {
  const Lock lock(mutex_);
  return (!pending_.empty() && pending_.front().batch <= until_batch) || staging_.gated();
}

bool DeviceEngine::progress(Driver& driver) {
  if (!staging_.gated()) return false;
  driver.let_go();
  return staging_.open_gates();
}

Clock::duration DeviceEngine::poll_interval() {
  if (staging_.gated()) return kStreamInterval;
  const Lock lock(mutex_);
  const bool releases = failed() && (!pending_.empty() || watched());
  return releases ? kReleaseInterval : Engine::poll_interval();
}

void DeviceEngine::expect(std::optional<uint64_t> batch) {
  const Lock lock(mutex_);
  for (Pending& each : pending_) {
    if (batch.value_or(each.batch) == each.batch && !each.deadline) {
      each.deadline.emplace(each.timeout);
    }
  }
}

bool DeviceEngine::close(Clock::duration grace) {
  const Deadline deadline(grace);
  poll_until([&] { return !pending() || deadline.passed(); }, kParting, [&] { state_.check(); });
  if (failed()) release_now();          // nobody looks any more
  while (!enqueue_mutex_.try_lock()) {  // another thread waits for ranks to meet
    if (deadline.passed()) {
      state_.fail(str("group '", state_.name(), "' was destroyed by rank ", state_.rank(),
                      " while its ranks met"));
    }
    std::this_thread::sleep_for(kParting);
  }
  const Lock lock(enqueue_mutex_, std::adopt_lock);
  try {
    if (!pending()) comm_->let_go();  // else streams may still use it
  } catch (const std::exception& error) {
    state_.logger().warning("letting go of peers' device memory: ", error.what());
  }
  // Memory that a peer has mapped is not freed under its feet.
  const auto gone = [&](Rank peer) {
    if (state_.transport().device_area(peer) == nullptr) return true;
    if (state_.transport().connection_lost(peer)) return true;
    for (const int info : {0, 1 + state_.rank()}) {
      const uint32_t step = area_of(peer).info(info).step.load(std::memory_order_acquire);
      if (step != 0 && step <= cuda::DeviceComm::kSteps) return false;
    }
    return true;
  };
  const auto all_gone = [&] {
    return std::ranges::all_of(std::views::iota(0, state_.size()), gone);
  };
  while (!all_gone() && !deadline.passed()) std::this_thread::sleep_for(kParting);
  kept_ = !all_gone() || pending();
  if (!kept_) give_back();
  captured_ = false;  // replays are errors from now on
  recorder_.close();
  return !kept_;
}

}  // namespace ringcomm
