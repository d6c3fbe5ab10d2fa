#include "comm/group_device.h"

#include "stream/library.h"

namespace ringcomm {

constexpr auto kReleased = std::chrono::seconds(1);  // by then streams that were let go have ended
constexpr auto kUncalled = std::chrono::seconds(1);  // by then peers have called the same

GroupDevice::~GroupDevice() {
  if (!state_.forked()) delete in_use();
}

DeviceEngine& GroupDevice::engine(int index) {
  state_.check_usable();
  const Lock lock(mutex_);
  DeviceEngine* engine = in_use();
  if (engine == nullptr) {
    engine = new DeviceEngine(state_, progress_, device_api(), index);
    engine_.store(engine, std::memory_order_release);
    state_.engines().add(*engine);  // partner: GroupState::fail()
    if (state_.failed()) engine->fail(state_.error());
  }
  RINGCOMM_CHECK(engine->device() == index, "group '", state_.name(),
                 "' of this rank works on device ", engine->device(),
                 ", and this tensor is on device ", index,
                 ": each rank uses one device in a group");
  return *engine;
}

bool GroupDevice::wait(const Completion& end, Clock::duration at_most) {
  const Deadline limit(at_most);
  end.expect();
  std::optional<Deadline> failed;  // since then streams are free; one may hang in a kernel
  progress_.wait_for_streams("a wait for a device", [&] {
    if (!failed && state_.failed()) failed.emplace(kReleased);
    return end.reached() || limit.passed() || (failed && failed->passed());
  });
  return end.reached();
}

void GroupDevice::wait_for_all() {
  DeviceEngine* const engine = in_use();
  if (engine == nullptr || state_.forked() || state_.left()) return;
  engine->verdicts().expect();                            // a stream that hangs meets a deadline
  const uint64_t last = engine->verdicts().last_batch();  // other threads may go on
  const Deadline called(kUncalled);
  progress_.wait_for_streams("destroy", [&] {
    return !engine->pending(last) || state_.failed() ||
           (!engine->verdicts().expected() && called.passed());
  });
}

}  // namespace ringcomm
