#include "comm/communicator.h"

#include "stream/library.h"

namespace ringcomm {

constexpr auto kReleased = std::chrono::seconds(1);  // by then streams that were let go have ended
constexpr auto kUncalled = std::chrono::seconds(1);  // by then peers have called the same
constexpr auto kUnheard = std::chrono::seconds(1);   // then nobody takes the rest

Communicator::~Communicator() {
  shutdown();
  if (state_.forked()) return;
  Runtime::get().detach(this);
  delete device_.load();
}

// ---- calls

void Communicator::run(const Operation& operation) {
  state_.check_usable();
  if (host_.run(operation)) return;
  const TaskPtr task = submit(operation);
  task->blocking = true;
  wait(*task);
  if (task->error) std::rethrow_exception(task->error);
}

TaskPtr Communicator::submit(Operation operation, decltype(Request::on_done) on_done,
                             Continuation continuation, const std::atomic<uint32_t>* gate) {
  state_.check_usable();
  validate(operation, size(), rank());
  const auto limit = state_.timeout_or(operation.timeout);
  auto task = std::make_shared<Task>(std::move(operation), limit);
  task->on_done = std::move(on_done);
  task->continuation = std::move(continuation);
  task->gate = gate;
  host_.submit(task);
  state_.kick();
  return task;
}

void Communicator::post(const MessagePtr& message) {
  state_.check_usable();
  messages_.post(message);
}

DeviceEngine& Communicator::device(int index) {
  state_.check_usable();
  const Lock lock(device_mutex_);
  DeviceEngine* device = device_in_use();
  if (device == nullptr) {
    Runtime& process = Runtime::get();
    cuda::Api& api = open_devices(process.config().cuda_library);
    device = new DeviceEngine(
        state_, *this, api, index,
        {process.began(), process.config().cuda_connections,
         [](const std::string& text) { return Runtime::get().neighbours().first_time(text); }});
    device_.store(device, std::memory_order_release);
    state_.add(*device);  // partner: GroupState::fail()
    if (state_.failed()) device->fail(state_.error());
  }
  RINGCOMM_CHECK(device->device() == index, "group '", state_.name(),
                 "' of this rank works on device ", device->device(),
                 ", and this tensor is on device ", index,
                 ": each rank uses one device in a group");
  return *device;
}

uint64_t Communicator::sequence() const {
  const DeviceEngine* const device = device_in_use();
  return host_.sequence() + (device ? device->sequence() : 0);
}

std::vector<std::string> Communicator::flight_rings() const {
  std::vector<std::string> rings = {state_.recorder().bytes()};
  if (const DeviceEngine* const device = device_in_use()) rings.push_back(device->flight_ring());
  return rings;
}

// ---- waiting

bool Communicator::wait(const Completion& end, Clock::duration at_most) {
  const Deadline limit(at_most);
  end.expect();
  std::optional<Deadline> failed;  // since then streams are free; one may hang in a kernel
  progress_.wait_for_streams("a wait for a device", [&] {
    if (!failed && state_.failed()) failed.emplace(kReleased);
    return end.reached() || limit.passed() || (failed && failed->passed());
  });
  return end.reached();
}

void Communicator::wait_for_device() {
  DeviceEngine* const device = device_in_use();
  if (device == nullptr || state_.forked() || state_.left()) return;
  Verdicts& verdicts = device->verdicts();
  verdicts.expect();                            // a stream that hangs meets a deadline
  const uint64_t last = verdicts.last_batch();  // other threads may go on
  const Deadline called(kUncalled);
  progress_.wait_for_streams("destroy", [&] {
    return !device->pending(last) || state_.failed() || (!verdicts.expected() && called.passed());
  });
}

// ---- ending

void Communicator::abort(const std::string& reason) {
  if (state_.forked() || state_.left()) return;
  state_.fail(reason);
  state_.end_failed();
  if (host_.pending()) state_.kick();
}

bool Communicator::busy() { return progress_.pending() || !Driver(host_.wheel()).take(); }

void Communicator::shutdown(Clock::duration grace, bool drains) {
  if (state_.forked() || !state_.leave()) return;
  const Deadline deadline(grace);
  Waiter waiter([&](Clock::time_point) { state_.check(); });
  while (progress_.pending() && !state_.failed() && !deadline.passed()) {
    if (waiter.again(progress_.drive())) continue;
    state_.transport().doorbell().sleep(
        kAllNews, [&] { return !progress_.pending() || progress_.ready(); },
        std::min(waiter.until_check(), deadline.left()));
    waiter.woke(state_.failed());
  }
  if (progress_.pending()) {
    state_.fail(str("group '", state_.name(), "' was destroyed by rank ", rank(),
                    " while operations were pending"));
    state_.end_failed();
    Driver driver(host_.wheel());
    while (host_.progress(driver)) {
    }
  }
  if (DeviceEngine* const device = device_in_use(); device && !device->close(deadline.left())) {
    for (Mapping& mapping : memory_->mappings) mapping.forget();  // streams may still use it
  }
  state_.transport().leave();
  state_.recorder().close();
  if (drains) drain();
}

// Remote ranks get all bytes that are on their way, as long as they take some.
void Communicator::drain() {
  if (state_.forked()) return;
  Transport& transport = state_.transport();
  const std::chrono::seconds most(Runtime::get().config().resume_seconds);
  const Deadline at_last(most);  // however slow the network is
  Deadline soon(kUnheard);
  uint64_t left = transport.undelivered();
  while (left > 0 && !soon.passed() && !at_last.passed()) {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    transport.progress();
    const uint64_t before = std::exchange(left, transport.undelivered());
    if (left < before) soon = Deadline(kUnheard);
  }
}

void Communicator::forked() {
  state_.fork();
  for (Mapping& mapping : memory_->mappings) mapping.forget();
}

}  // namespace ringcomm
