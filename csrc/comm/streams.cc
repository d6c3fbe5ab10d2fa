// What a Communicator has to do with the streams of a device.
#include "comm/communicator.h"

namespace ringcomm {
namespace {

constexpr auto kStreamNap = std::chrono::microseconds(50);  // streams ring no doorbell
constexpr auto kSettle = std::chrono::seconds(1);           // by then peers have called the same

}  // namespace

DeviceGroup& Communicator::device(int index) {
  check_usable();
  const std::lock_guard lock(device_mutex_);
  DeviceGroup* device = device_.load(std::memory_order_relaxed);
  if (device == nullptr) {
    device = new DeviceGroup(*this, device_library(), index);
    device_.store(device, std::memory_order_seq_cst);  // partner: fail(), watch()
    if (failed_.load(std::memory_order_seq_cst)) device->release(false);
  }
  RINGCOMM_CHECK(device->device() == index, "group '", name(), "' of this rank works on device ",
                 device->device(), ", and this tensor is on device ", index,
                 ": each rank uses one device in a group");
  return *device;
}

bool Communicator::wait(const DeviceGroup::End& end, Clock::duration at_most) {
  const Deadline limit(at_most);
  Patience patience = this->patience();
  Waiter waiter(patience, [&](Clock::time_point) {
    watch();
    if (options_.interrupt) check_interrupt("a wait for a device");
  });
  end.expect();
  while (!end.reached() && !limit.passed()) {
    if (!waiter.again(false)) {
      std::this_thread::sleep_for(kStreamNap);
      waiter.look_when_due();
    }
  }
  return end.reached();
}

void Communicator::settle() {
  DeviceGroup* const device = device_.load(std::memory_order_acquire);
  if (device == nullptr || forked_ || left_) return;
  const Deadline called(kSettle);  // peers may call what we have called a little later
  Waiter waiter([&](Clock::time_point) {
    watch();
    if (options_.interrupt) check_interrupt("destroy");
  });
  while (device->pending() && !failed_ && (device->expected() || !called.passed())) {
    std::this_thread::sleep_for(kStreamNap);
    waiter.look_when_due();
  }
}

}  // namespace ringcomm
