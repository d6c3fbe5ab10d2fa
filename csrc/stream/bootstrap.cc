// How the ranks of a DeviceEngine meet: at its first operation, or two of them at their first
// message.

#include "group/process.h"
#include "stream/device_engine.h"

namespace ringcomm {

constexpr auto kMeeting = std::chrono::microseconds(100);  // between looks at their RankInfo

cuda::Subgroup DeviceEngine::subgroup_of(Rank peer) const {
  cuda::Subgroup subgroup;
  subgroup.pair = peer >= 0;
  if (subgroup.pair) {
    subgroup.ranks = {std::min(peer, state_.rank()), std::max(peer, state_.rank())};
  } else {
    for (Rank rank = 0; rank < state_.size(); ++rank) subgroup.ranks.push_back(rank);
  }
  return subgroup;
}

// Do this rank and `peer`, or where that is -1 all of the group, reach one another's devices? Where
// the group has met, so have any two of it.
bool DeviceEngine::reach(Rank peer) const {
  const auto pair = peer < 0 ? met_.end() : met_.find(subgroup_of(peer).index_of(state_.rank()));
  return pair != met_.end() ? pair->second : met_.at(0);  // what a pair has found out stays
}

std::string DeviceEngine::why_not(const cuda::Subgroup& subgroup) const {
  const bool near = std::all_of(subgroup.ranks.begin(), subgroup.ranks.end(), [&](Rank rank) {
    return state_.transport().device_area(rank) != nullptr;
  });
  if (!near) return "ranks are on several hosts";
  return state_.size() > cuda::kMostRanks ? "there are more than 32 ranks" : "";
}

// The first time that these subgroups are needed. Step by step for all of them, so that ranks that
// exchange messages in a ring do not wait for one another in turn.
void DeviceEngine::bootstrap(const std::vector<cuda::Subgroup>& subgroups,
                             const std::string& asked) {
  const Deadline deadline(state_.timeout());
  const Rank self = state_.rank();
  std::map<int, cuda::Subgroup> fresh;  // by this rank's info
  for (const cuda::Subgroup& subgroup : subgroups) {
    const int index = subgroup.index_of(self);
    if (!met_.contains(0) && !met_.contains(index)) fresh.emplace(index, subgroup);
  }
  for (uint32_t step = 1; step <= cuda::DeviceComm::kSteps; ++step) {
    for (const auto& [index, subgroup] : fresh) {
      if (step == 1 || why_not(subgroup).empty()) comm_->bootstrap(subgroup, step);
    }
    for (const auto& entry : fresh) {
      const cuda::Subgroup& subgroup = entry.second;
      if (!why_not(subgroup).empty()) continue;
      await_ranks(asked, deadline, subgroup, [&](Rank rank) {
        const auto& at = area_of(rank).info(subgroup.index_of(rank)).step;
        return at.load(std::memory_order_acquire) >= step;
      });
    }
  }
  for (const auto& [index, subgroup] : fresh) {
    cuda::PeerAccess found;
    found.why = why_not(subgroup);
    if (found.why.empty()) found = comm_->access(subgroup);
    RINGCOMM_CHECK(found.reach || state_.config().cuda_mode != "ipc", asked,
                   ": RINGCOMM_CUDA_MODE=ipc is not possible: ", found.why);
    if (own_.info(index).usable != 0) staging_.streams_can_signal = true;
    tell(subgroup, found, asked);
    if (!subgroup.pair) access_ = found;
    met_[index] = found.reach;
  }
  make_streams();
}

void DeviceEngine::await_ranks(const std::string& asked, const Deadline& deadline,
                               const cuda::Subgroup& subgroup,
                               const std::function<bool(Rank peer)>& has_come) {
  for (const Rank rank : subgroup.ranks) {
    poll_until([&] { return has_come(rank); }, kMeeting,
               [&] {
                 diagnosis_.check_partner(rank, asked);
                 state_.check_failure(asked);
                 state_.check_interrupt(asked);
                 if (!deadline.passed()) return;
                 throw timed_out(asked, deadline,
                                 str("rank ", rank, " (", diagnosis_.where_is(rank, 1),
                                     ") to use its device with this group"));
               });
  }
}

void DeviceEngine::tell(const cuda::Subgroup& subgroup, const cuda::PeerAccess& found,
                        const std::string& asked) {
  const char* kind = api_.simulated() ? "simulated device" : "CUDA";
  if (!found.reach) {
    state_.logger().warning(kind, " tensors go through memory of the host",
                            staging_.streams_can_signal ? "" : ", and calls wait for them", ": ",
                            found.why, " (", asked, ")");
  } else if (!subgroup.pair) {
    state_.logger().info("first operation on a device: ", asked, ", over ", kind, " IPC, ",
                         found.one_device    ? "ranks share one device"
                         : found.own_devices ? "each rank has a device"
                                             : "ranks share several devices");
    const std::string kernels = comm_->kernels_text();
    if (found.own_devices)
      state_.logger().info(kernels.empty()
                               ? "streams hand over: other groups have the multiprocessors that "
                                 "kernels which wait for one another need"
                               : "kernels by bytes of a message, or of a shard:\n" + kernels);
  }
}

}  // namespace ringcomm
