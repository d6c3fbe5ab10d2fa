#include "comm/communicator.h"

namespace ringcomm {

constexpr auto kUnheard = std::chrono::seconds(1);  // then nobody takes the rest

Communicator::~Communicator() {
  shutdown();
  if (!state_.forked()) Groups::get().detach(this);
}

// ---- calls

void Communicator::run(const Operation& operation) {
  state_.check_usable();
  if (host_.run(operation)) return;
  const TaskPtr task = host_.submit(operation);
  task->blocking = true;
  wait(*task);
  if (task->error) std::rethrow_exception(task->error);
}

uint64_t Communicator::sequence() const {
  const DeviceEngine* const device = device_.in_use();
  return host_.sequence() + (device ? device->sequence() : 0);
}

std::vector<std::string> Communicator::flight_rings() const {
  std::vector<std::string> rings = {state_.recorder().bytes()};
  if (const DeviceEngine* const device = device_.in_use()) rings.push_back(device->flight_ring());
  return rings;
}

// ---- ending

void Communicator::abort(const std::string& reason) {
  if (state_.forked() || state_.left()) return;
  state_.fail(reason);
  state_.end_failed();
  if (host_.pending()) state_.kick();
}

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
  if (DeviceEngine* const device = device_.in_use(); device && !device->close(deadline.left())) {
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
  const std::chrono::seconds most(Process::get().config().resume_seconds);
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
