// How the ranks of a DeviceEngine meet: at its first operation, or two of them at their first
// message.
#include <algorithm>
#include <thread>

#include "comm/device_engine.h"

namespace ringcomm {
namespace {

constexpr auto kMeeting = std::chrono::microseconds(100);  // between looks at their cards

}  // namespace

cuda::Circle DeviceEngine::circle_of(Rank peer) const {
  cuda::Circle circle;
  circle.pair = peer >= 0;
  if (circle.pair) {
    circle.ranks = {std::min(peer, state_.rank()), std::max(peer, state_.rank())};
  } else {
    for (Rank rank = 0; rank < state_.size(); ++rank) circle.ranks.push_back(rank);
  }
  return circle;
}

// Do this rank and `peer`, or where that is -1 all of the group, reach one another's devices? Where
// the group has met, so have any two of it.
bool DeviceEngine::reach(Rank peer) const {
  const auto pair = peer < 0 ? met_.end() : met_.find(circle_of(peer).card_of(state_.rank()));
  return pair != met_.end() ? pair->second : met_.at(0);  // what a pair has found out stays
}

std::string DeviceEngine::why_not(const cuda::Circle& circle) const {
  const bool near = std::all_of(circle.ranks.begin(), circle.ranks.end(), [&](Rank rank) {
    return state_.transport().device_area(rank) != nullptr;
  });
  if (!near) return "ranks are on several hosts";
  return state_.size() > cuda::kMostRanks ? "there are more than 32 ranks" : "";
}

// The first time that these circles are needed. Step by step for all of them, so that ranks that
// exchange messages in a ring do not wait for one another in turn.
void DeviceEngine::meet(const std::vector<cuda::Circle>& circles, const std::string& asked) {
  const Deadline deadline(state_.timeout());
  const Rank self = state_.rank();
  std::vector<cuda::Circle> fresh;
  for (const cuda::Circle& circle : circles) {
    const auto same = [&](const cuda::Circle& other) {
      return other.card_of(self) == circle.card_of(self);
    };
    const bool known = met_.contains(0) || met_.contains(circle.card_of(self)) ||
                       std::any_of(fresh.begin(), fresh.end(), same);
    if (!known) fresh.push_back(circle);
  }
  for (uint32_t step = 1; step <= cuda::Team::kSteps; ++step) {
    for (const cuda::Circle& circle : fresh) {
      if (step == 1 || why_not(circle).empty()) team_->meet(circle, step);
    }
    for (const cuda::Circle& circle : fresh) {
      if (why_not(circle).empty()) await_step(circle, step, deadline, asked);
    }
  }
  for (const cuda::Circle& circle : fresh) {
    cuda::Found found;
    found.why = why_not(circle);
    if (found.why.empty()) found = team_->found(circle);
    RINGCOMM_CHECK(found.reach || Runtime::get().config().cuda_mode != "ipc", asked,
                   ": RINGCOMM_CUDA_MODE=ipc is not possible: ", found.why);
    staging_.streams_can_signal = own().card(circle.card_of(self)).usable != 0;
    tell(circle, found, asked);
    if (!circle.pair) found_ = found;
    met_[circle.card_of(self)] = found.reach;
    // Now: while a stream waits for a peer, the driver may make no other.
    const Rank peer = circle.pair ? circle.ranks[circle.ranks[0] == self ? 1 : 0] : -1;
    for (const int timeline :
         circle.pair ? std::vector{1 + 2 * peer, 2 + 2 * peer} : std::vector{0}) {
      own_stream(timeline);
    }
  }
}

void DeviceEngine::await_step(const cuda::Circle& circle, uint32_t step, const Deadline& deadline,
                              const std::string& asked) {
  Rank rank = -1;
  Waiter waiter([&](Clock::time_point) {
    inquiry_.check_partner(rank, asked);
    state_.check_waiting(asked);
    if (!deadline.passed()) return;
    throw TimeoutError(str(asked, ": Timed out after ", to_seconds(deadline.elapsed()),
                           " s waiting for rank ", rank, " (", inquiry_.where_is(rank, 1),
                           ") to use its device with this group"));
  });
  for (const Rank next : circle.ranks) {
    rank = next;
    const cuda::Area area = area_of(rank);
    const auto& at = area.card(circle.card_of(rank)).step;
    while (at.load(std::memory_order_acquire) < step) {
      std::this_thread::sleep_for(kMeeting);
      waiter.look_when_due();
    }
  }
}

void DeviceEngine::tell(const cuda::Circle& circle, const cuda::Found& found,
                        const std::string& asked) {
  const char* kind = api_.simulated() ? "simulated device" : "CUDA";
  if (!found.reach) {
    state_.logger().warning(kind, " tensors go through memory of the host",
                            staging_.streams_can_signal ? "" : ", and calls wait for them", ": ",
                            found.why, " (", asked, ")");
  } else if (!circle.pair) {
    state_.logger().info("first operation on a device: ", asked, ", over ", kind, " IPC, ",
                         found.one_device    ? "ranks share one device"
                         : found.own_devices ? "each rank has a device"
                                             : "ranks share several devices");
  }
}

}  // namespace ringcomm
