#include "stream/device_engine.h"

#include <ranges>
#include <thread>

#include "group/process.h"
#include "plan/registry.h"

namespace ringcomm {

constexpr auto kParting = std::chrono::microseconds(100);  // between looks at what is still mapped
constexpr auto kReleaseInterval = std::chrono::milliseconds(1);
constexpr auto kBusy = std::chrono::milliseconds(200);  // a wait for imports lasts at most
constexpr uint64_t kBusyLooks = 64;                     // that it is put off

// The host times staged operations once the stream reaches them, and kernels time their waits; this
// margin lets the timeout that can tell more come first.
constexpr auto kOwnStream = std::chrono::seconds(1);

// Half of what boards and slots hold: so far behind may a peer be.
constexpr uint32_t kMostUnderWay = cuda::kOperations / 2;

DeviceEngine::DeviceEngine(GroupState& state, Progress& progress, cuda::Api& api, int device)
    : state_(state),
      progress_(progress),
      api_(api),
      device_(device),
      connections_(Process::get().config().cuda_connections),
      group_(state),
      verdicts_(group_),
      events_(state, api),
      staging_(state, progress, api,
               [this](const Point& point) {
                 if (!verdicts_.reached(point)) return false;
                 verdicts_.note_progress();  // before the result is overwritten
                 return true;
               }),
      announcements_(group_, verdicts_),
      on_device_(std::make_unique<Device>(
          cuda::ExportContext{api, state.transport(),
                              [this](const std::string& text) {
                                const bool first = Process::get().neighbours().first_time(text);
                                if (first) state_.logger().warning(text);
                              },
                              [this] { return verdicts_.is_idle(); }},
          cuda::Peers::Place{device, Process::get().neighbours(),
                             state.config().cuda_memory.value_or(0), state.config().cuda_blocks,
                             state.config().cuda_mode == "host" ? "RINGCOMM_CUDA_MODE=host" : ""})),
      timelines_(state, api, events_),
      rendezvous_(group_, verdicts_, on_device_->peers),
      registered_(verdicts_, announcements_, rendezvous_, on_device_->peers, state.logger()) {}

DeviceEngine::~DeviceEngine() {
  if (state_.forked() || kept_) {
    const Device* const kept = on_device_.release();
    static_cast<void>(kept);
    return;  // what streams still do stays under way
  }
  verdicts_.forget();
  const Lock lock(enqueue_mutex_);
  if (on_device_) give_back();
  try {
    const cuda::OnDevice here(api_, device_);
    events_.destroy();
  } catch (const std::exception& error) {  // the device has failed for good
    state_.logger().info("events cannot be given back to the device: ", error.what());
  }
}

// Waits for the device's streams: not for the worker, on which those may depend.
void DeviceEngine::give_back() {
  const std::unique_ptr<Device> last = std::move(on_device_);
  try {
    const cuda::OnDevice here(api_, device_);
    timelines_.destroy();
    staging_.give_back();
  } catch (const std::exception& error) {
    state_.logger().info("nothing can be given back to the device: ", error.what());
  }
}

// ---- calls

// Any error but a refusal fails the group: of what was asked for, a part may have been enqueued.
CompletionPtr DeviceEngine::guarded(const std::string& asked, auto&& enqueue) {
  const Lock lock(enqueue_mutex_);
  if (verdicts_.gave_up()) verdicts_.check();  // the worker may not have looked yet
  state_.check_usable();  // it may have been closed while this thread waited for the lock
  try {
    const cuda::OnDevice here(api_, device_);
    const bool relaxed = api_.relax_captures(true);
    const Finally restore{[&] { api_.relax_captures(relaxed); }};
    return enqueue();
  } catch (const UsageError&) {
    throw;
  } catch (const cuda::DeviceError& error) {
    std::rethrow_exception(state_.fail(str(asked, ": ", error.what())));
  } catch (const std::exception&) {
    std::rethrow_exception(state_.fail(std::current_exception()));
  }
}

void DeviceEngine::guard(const std::string& asked, const std::function<void()>& call) {
  guarded(asked, [&]() -> CompletionPtr {
    call();
    return nullptr;
  });
}

void DeviceEngine::meet(const std::vector<Rank>& peers, const std::string& asked) {
  rendezvous_.meet(peers, asked);
  staging_.streams_can_signal = rendezvous_.streams_can_signal();
  timelines_.make_streams(connections_);
}

bool DeviceEngine::connect() {
  bool reaches = false;
  guard("connect", [&] {
    enqueue_mutex_.assert_held();
    meet({kGroup}, "the group's first meeting");
    reaches = rendezvous_.runs_kernels();
  });
  return reaches;
}

std::optional<Algorithm> DeviceEngine::kernel_for(const Operation& operation) {
  if (!connect()) return std::nullopt;
  const Lock lock(enqueue_mutex_);
  return kernel_of(operation);
}

void DeviceEngine::synchronize(cuda::Stream stream) const {
  const cuda::OnDevice here(api_, device_);
  api_.synchronize(stream);
}

void DeviceEngine::register_memory(const std::string& asked,
                                   const RegisteredMemory::Named& memory) {
  guard(asked, [&] {
    enqueue_mutex_.assert_held();
    meet({kGroup}, asked);
    registered_.add(asked, memory, Deadline(state_.timeout()));
  });
}

bool DeviceEngine::deregister_memory(const std::string& name) {
  bool known = false;
  guard("deregistering memory", [&] {
    enqueue_mutex_.assert_held();
    known = registered_.remove(name);
  });
  return known;
}

void DeviceEngine::offer(const Span& memory) {
  guard("allocate_tensor", [&] {
    enqueue_mutex_.assert_held();
    if (rendezvous_.reaches_group()) on_device_->peers.exports().offer(memory);
  });
}

// ---- operations

// The registered algorithm that was asked for. It is a plan, and those need the host's memory.
std::optional<Algorithm> DeviceEngine::by_hand(const Operation& operation) const {
  const Shape shape = shape_of(operation);
  const auto asked = state_.requested_algorithm(shape);
  return asked && is_registered(*asked) && same_on_all_ranks(shape) ? asked : std::nullopt;
}

// Nothing if the host runs it. Ranks have met.
std::optional<Algorithm> DeviceEngine::kernel_of(const Operation& operation) const {
  if (!rendezvous_.runs_kernels() || by_hand(operation)) return std::nullopt;
  const Shape shape = shape_of(operation);
  return on_device_->peers.kernel_for(shape, state_.requested_kernel(shape));
}

CompletionPtr DeviceEngine::enqueue(const Operation& operation, cuda::Stream caller,
                                    bool on_own_stream, const Finish& finish) {
  validate(operation, state_.size(), state_.rank());
  const std::string asked = to_text(make_descriptor(operation, 0));
  return guarded(asked, [&]() -> CompletionPtr {
    enqueue_mutex_.assert_held();
    if (const uint64_t id = api_.capture_of(caller); id != 0) {
      return capture(operation, id, caller, asked, finish);
    }
    meet({kGroup}, asked);
    const cuda::Stream stream = timelines_.begin({kGroupTimeline}, caller, on_own_stream);
    const auto limit = state_.timeout_or(operation.timeout);
    Pending pending{.end = timelines_.next(kGroupTimeline), .timeout = limit};
    pending.deadline = Deadline(limit);
    make_room();
    const auto plan = by_hand(operation), kernel = kernel_of(operation);
    if (rendezvous_.runs_kernels()) {
      refresh_imports();
      const Algorithm algorithm = plan ? *plan : kernel.value_or(kHandOver);
      pending.operation = announcements_.announce(operation, algorithm, !kernel);
      pending.number = pending.operation.sequence;
    }
    if (kernel) {
      pending.ticket = group_.recorder.begin(pending.operation, operation.line);
      run(*kernel, operation, stream, false);
    } else {
      pending.result = staging_.run(operation, stream, pending.end, plan.has_value());
      pending.operation = make_descriptor(operation, progress_.host().sequence() + sequence());
      pending.deadline = Deadline(limit + kOwnStream);
    }
    finish_in(stream, finish);
    return end({kGroupTimeline}, stream, {pending});
  });
}

void DeviceEngine::run(Algorithm kernel, const Operation& operation, cuda::Stream stream,
                       bool captured) {
  const Shape shape = shape_of(operation);
  const uint64_t call = hash_of(make_descriptor(operation, 0)) | 1;  // not 0
  on_device_->kernels.collective(
      stream,
      {shape, call, make_reduction(operation, state_.size()), Spans(operation.input),
       Spans(operation.output), captured, state_.timeout_or(operation.timeout) + kOwnStream},
      kernel);
}

void DeviceEngine::finish_in(cuda::Stream stream, const Finish& finish) {
  if (!finish) return;
  on_device_->words.flush(stream);
  finish(stream);
}

// Boards and slots hold the last so many operations: more are never under way.
void DeviceEngine::make_room() {
  const std::string during = "the operations before it";
  const Point behind{kGroupTimeline, timelines_.next(kGroupTimeline).value - kMostUnderWay};
  poll_until([&] { return verdicts_.reached(behind); }, std::chrono::microseconds(20),
             [&] {
               state_.check();
               state_.check_failure(during);
               state_.check_interrupt(during);
             });
}

// Now and then it waits until nothing is under way, not for long.
void DeviceEngine::refresh_imports() {
  cuda::Peers& peers = on_device_->peers;
  if (!peers.has_news()) return;
  if (!verdicts_.is_idle() && busy_looks_++ % kBusyLooks == 0) verdicts_.await_idle(kBusy);
  if (verdicts_.is_idle()) peers.refresh_imports();
}

// ---- messages

CompletionPtr DeviceEngine::enqueue(const std::vector<DeviceMessage>& messages, cuda::Stream caller,
                                    const Finish& finish) {
  const std::string asked = to_text(make_descriptor(messages[0].kind));
  return guarded(asked, [&] {
    enqueue_mutex_.assert_held();
    RINGCOMM_CHECK(api_.capture_of(caller) == 0, asked,
                   " cannot be captured into a CUDA graph: messages are matched at each call");
    std::vector<int> timelines;
    std::vector<Rank> peers;
    for (const DeviceMessage& message : messages) {
      peers.push_back(message.kind.peer);
      if (std::ranges::find(timelines, message.timeline()) == timelines.end())
        timelines.push_back(message.timeline());
    }
    meet(peers, asked);
    const cuda::Stream stream = timelines_.begin(timelines, caller, true);
    std::vector<Pending> pending;
    std::vector<cuda::Transfer> transfers;
    std::vector<DeviceMessage> staged;
    std::vector<Point> ends;
    for (const DeviceMessage& message : messages) {
      const auto& [kind, data, timeout] = message;
      Pending& added = pending.emplace_back(Pending{.operation = make_descriptor(kind),
                                                    .end = timelines_.next(message.timeline()),
                                                    .peer = kind.peer,
                                                    .timeout = state_.timeout_or(timeout)});
      if (rendezvous_.reach(kind.peer)) {
        announcements_.announce(added);
        added.ticket = group_.recorder.begin(added.operation, kind.line);
        transfers.push_back({kind.sending, kind.peer, data, size_of(kind.dtype)});
      } else {
        staged.push_back(message);
        ends.push_back(added.end);
      }
    }
    refresh_imports();
    if (!transfers.empty()) on_device_->kernels.transfer(stream, transfers);
    on_device_->words.flush(stream);  // before the stream waits for the host
    const auto results = staging_.post(staged, ends, stream);
    for (size_t i = 0, next = 0; i < pending.size() && !results.empty(); ++i) {
      if (!pending[i].ticket) pending[i].result = results[next++];
    }
    finish_in(stream, finish);
    return end(timelines, stream, std::move(pending));
  });
}

// ---- CUDA graphs

// The host takes part once, at the capture: ranks meet and map one another's memory. At each replay
// streams do the same work again, with the same words (device/handover.h), and no host knows of it.
// Only kernels that wait for one another have a deadline. The worker looks now and then whether a
// replay waits for a rank that is gone.
CompletionPtr DeviceEngine::capture(const Operation& operation, uint64_t capture,
                                    cuda::Stream caller, const std::string& asked,
                                    const Finish& finish) {
  meet({kGroup}, asked);
  const auto kernel = kernel_of(operation);
  RINGCOMM_CHECK(kernel || by_hand(operation), asked,
                 " cannot be captured into a CUDA graph: its tensors go through memory of the "
                 "host, as ",
                 rendezvous_.reason());
  RINGCOMM_CHECK(kernel, asked,
                 " cannot be captured into a CUDA graph: it runs by an algorithm by hand, whose "
                 "tensors go through memory of the host");
  timelines_.begin_captured(capture, caller);
  // The other kernels work in the group's own memory.
  if (*kernel == kByTwoShot || *kernel == kHandOver) {
    on_device_->kernels.offer(shape_of(operation), Spans(operation.input), Spans(operation.output));
  }
  const uint64_t sequence = announcements_.announce(operation, kByGraph).sequence;
  rendezvous_.meet_at(sequence, Deadline(state_.timeout_or(operation.timeout)), asked);
  verdicts_.watch_replays(true);
  state_.kick();
  on_device_->words.watch(true);
  run(*kernel, operation, caller, true);
  finish_in(caller, finish);
  on_device_->words.watch(false);
  on_device_->words.flush(caller);
  timelines_.end_captured(capture, caller);
  return end({}, caller, {});
}

// ---- ends

CompletionPtr DeviceEngine::end(const std::vector<int>& timelines, cuda::Stream stream,
                                std::vector<Pending> pending) {
  std::vector<Point> points;
  for (const int timeline : timelines) {
    Point point = timelines_.next(timeline);
    // Peers take the count of the group's operations for a sequence number, which captured ones
    // have, too.
    if (timeline == kGroupTimeline && rendezvous_.runs_kernels())
      point.value = static_cast<uint32_t>(announcements_.last());
    if (staging_.streams_can_signal) {
      on_device_->words.mark(stream, timeline, point.value);
    } else {
      api_.synchronize(stream);
      group_.own.done(timeline).store(point.value, std::memory_order_seq_cst);
    }
    timelines_.end(point, stream);
    for (Pending& item : pending) {
      if (item.end.timeline == timeline) item.end = point;
    }
    points.push_back(point);
  }
  const cuda::Event over = events_.take();
  api_.record(over, stream);
  uint64_t batch = 0;
  if (!pending.empty()) {
    bool first = false;
    std::tie(batch, first) = verdicts_.add(std::move(pending));
    // The worker knows when to look for the next gate.
    if (first || staging_.gated()) state_.kick();
    verdicts_.note_progress();
  }
  return std::make_shared<Completion>(verdicts_, events_, api_, device_, batch, std::move(points),
                                      over, stream);
}

bool DeviceEngine::progress(Driver& driver) {
  if (!staging_.gated()) return false;
  driver.let_go();
  return staging_.open_gates();
}

Clock::duration DeviceEngine::poll_interval() {
  if (staging_.gated()) return kStreamInterval;
  const bool releases = verdicts_.failed() && (verdicts_.pending() || watched());
  return releases ? kReleaseInterval : Engine::poll_interval();
}

// Has the peer let go of this rank's memory, or is it gone?
bool DeviceEngine::has_peer_let_go(Rank peer) const {
  if (state_.transport().device_area(peer) == nullptr) return true;
  if (state_.transport().connection_lost(peer)) return true;
  for (const int info : {0, 1 + state_.rank()}) {
    const uint32_t step = group_.area(peer).info(info).step.load(std::memory_order_acquire);
    if (step != 0 && step <= cuda::Peers::kSteps) return false;
  }
  return true;
}

bool DeviceEngine::close(Clock::duration grace) {
  const Deadline deadline(grace);
  poll_until([&] { return !pending() || deadline.passed(); }, kParting, [&] { state_.check(); });
  if (verdicts_.failed()) verdicts_.release_now();  // nobody looks any more
  while (!enqueue_mutex_.try_lock()) {              // another thread waits for ranks to meet
    if (deadline.passed()) {
      state_.fail(str("group '", state_.name(), "' was destroyed by rank ", state_.rank(),
                      " while its ranks met"));
    }
    std::this_thread::sleep_for(kParting);
  }
  const Lock lock(enqueue_mutex_, std::adopt_lock);
  try {
    if (!pending()) on_device_->peers.let_go();  // else streams may still use it
  } catch (const std::exception& error) {
    state_.logger().warning("letting go of peers' device memory: ", error.what());
  }
  // Memory that a peer has mapped is not freed under its feet.
  const auto all_gone = [&] {
    return std::ranges::all_of(std::views::iota(0, state_.size()),
                               [&](Rank peer) { return has_peer_let_go(peer); });
  };
  while (!all_gone() && !deadline.passed()) std::this_thread::sleep_for(kParting);
  kept_ = !all_gone() || pending();
  if (!kept_) give_back();
  verdicts_.watch_replays(false);  // replays are errors from now on
  group_.recorder.close();
  return !kept_;
}

}  // namespace ringcomm
