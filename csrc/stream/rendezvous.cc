#include "stream/rendezvous.h"

namespace ringcomm {

constexpr auto kLook = std::chrono::microseconds(100);  // between looks at peers' words
constexpr auto kQuiet = std::chrono::seconds(2);        // for what is under way

cuda::Subgroup DeviceRendezvous::subgroup_of(Rank peer) const {
  cuda::Subgroup subgroup;
  subgroup.pair = peer != kGroup;
  if (subgroup.pair) {
    subgroup.ranks = {std::min(peer, state_.rank()), std::max(peer, state_.rank())};
  } else {
    for (Rank rank = 0; rank < state_.size(); ++rank) subgroup.ranks.push_back(rank);
  }
  return subgroup;
}

// Where the group has met, so have any two of it. A pair keeps its findings.
bool DeviceRendezvous::reach(Rank peer) const {
  const auto pair =
      peer == kGroup ? met_.end() : met_.find(subgroup_of(peer).index_of(state_.rank()));
  return pair != met_.end() ? pair->second : met_.at(0);
}

std::string DeviceRendezvous::why_not(const cuda::Subgroup& subgroup) const {
  const bool near = std::ranges::all_of(
      subgroup.ranks, [&](Rank rank) { return state_.transport().device_area(rank) != nullptr; });
  if (!near) return "ranks are on several hosts";
  return state_.size() > cuda::kMostRanks ? "there are more than 32 ranks" : "";
}

void DeviceRendezvous::meet(const std::vector<Rank>& peers, const std::string& asked) {
  std::map<int, cuda::Subgroup> fresh;  // by this rank's info
  for (const Rank peer : peers) {
    const cuda::Subgroup subgroup = subgroup_of(peer);
    const int index = subgroup.index_of(state_.rank());
    if (!met_.contains(0) && !met_.contains(index)) fresh.emplace(index, subgroup);
  }
  take_steps(fresh, asked);
  for (const auto& [index, subgroup] : fresh) {
    cuda::PeerAccess access;
    access.why = why_not(subgroup);
    if (access.why.empty()) access = peers_.access(subgroup);
    RINGCOMM_CHECK(access.reach || state_.config().cuda_mode != "ipc", asked,
                   ": RINGCOMM_CUDA_MODE=ipc is not possible: ", access.why);
    if (peers_.own().info(index).usable != 0) streams_can_signal_ = true;
    log_access(subgroup, access, asked);
    if (!subgroup.pair) reason_ = access.why, bridged_ = access.bridged;
    met_[index] = access.reach;
  }
}

// Step by step for all subgroups, so that ranks that exchange messages in a ring do not wait for
// one another in turn.
void DeviceRendezvous::take_steps(const std::map<int, cuda::Subgroup>& fresh,
                                  const std::string& asked) {
  const Deadline deadline(state_.timeout());
  for (uint32_t step = 1; step <= cuda::Peers::kSteps; ++step) {
    for (const auto& [index, subgroup] : fresh) {
      if (step == 1 || why_not(subgroup).empty()) peers_.bootstrap(subgroup, step);
    }
    for (const auto& entry : fresh) {
      const cuda::Subgroup& subgroup = entry.second;
      if (!why_not(subgroup).empty()) continue;
      await_ranks(asked, deadline, subgroup, [&](Rank rank) {
        const auto& at = group_.area(rank).info(subgroup.index_of(rank)).step;
        return at.load(std::memory_order_acquire) >= step;
      });
    }
  }
}

void DeviceRendezvous::await_ranks(const std::string& asked, const Deadline& deadline,
                                   const cuda::Subgroup& subgroup,
                                   const std::function<bool(Rank peer)>& has_come) {
  for (const Rank rank : subgroup.ranks) {
    poll_until([&] { return has_come(rank); }, kLook,
               [&] {
                 group_.diagnosis.check_partner(rank, asked);
                 state_.check_failure(asked);
                 state_.check_interrupt(asked);
                 if (!deadline.passed()) return;
                 throw timed_out(asked, deadline,
                                 str("rank ", rank, " (", group_.diagnosis.where_is(rank, 1),
                                     ") to use its device with this group"));
               });
  }
}

void DeviceRendezvous::log_access(const cuda::Subgroup& subgroup, const cuda::PeerAccess& access,
                                  const std::string& asked) const {
  const char* kind = peers_.api().simulated() ? "simulated device" : "CUDA";
  if (!access.reach) {
    state_.logger().warning(
        kind, " tensors go through memory of the host",
        access.bridged ? ", though kernels of the devices still add them up" : "",
        streams_can_signal_ ? "" : ", and calls wait for them", ": ", access.why, " (", asked, ")");
  } else if (!subgroup.pair) {
    state_.logger().info("first operation on a device: ", asked, ", over ", kind, " IPC, ",
                         access.one_device    ? "ranks share one device"
                         : access.own_devices ? "each rank has a device"
                                              : "ranks share several devices");
    const std::string kernels = peers_.kernels_text();
    if (access.own_devices)
      state_.logger().info(
          !kernels.empty() ? "kernels by bytes of a message, or of a shard:\n" + kernels
          : access.shared  ? "streams hand over: ranks outside of this group use these devices, too"
                           : "streams hand over: other groups have the multiprocessors that "
                             "kernels which wait for one another need");
  }
}

// Work under way ends first, for closing a mapping may wait for it.
void DeviceRendezvous::meet_at(uint64_t sequence, const Deadline& deadline,
                               const std::string& asked) {
  const cuda::Subgroup group = subgroup_of(kGroup);
  const Deadline quiet(kQuiet);
  await_ranks(asked, deadline, group, [&](Rank peer) {
    return state_.transport().state(peer, Board::kDevice).called >= sequence;
  });
  if (verdicts_.await_idle(quiet.left())) {
    peers_.refresh_imports();
    state_.transport().finish(Board::kDevice, sequence);  // the host's part is over
  }
  peers_.own().mapped_for().store(sequence,
                                  std::memory_order_release);  // partner: the others' wait
  await_ranks(asked, deadline, group, [&](Rank peer) {
    return group_.area(peer).mapped_for().load(std::memory_order_acquire) >= sequence;
  });
}

}  // namespace ringcomm
