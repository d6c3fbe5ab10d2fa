#include "group/group_facts.h"

#include "group/process.h"

namespace ringcomm {

GroupFacts::GroupFacts(const CommunicatorOptions& options, std::shared_ptr<Transport> transport,
                       const Reach& reach, const Whereabouts& where)
    : options_(options),
      reach_(reach),
      where_(where),
      neighbours_(where.host_of.empty() ? options.size : where.ranks_beside(options.rank)),
      logger_(Process::get().config().log,
              str("rank ", options.rank, " of group '", options.name, "'")),
      transport_(std::move(transport)),
      recorder_(recorded(false), Process::get().began()),
      diagnosis_(*transport_, recorder_, where_, Board::kHost),
      timeout_ms_(options.timeout.count()) {
  Process::get().note_ranks_here(neighbours_);
  if (where_.cores.empty()) return;
  Process::get().note_sharers(static_cast<int>(sharers_of(where_.cores, place_of(rank()))));
}

Recorded GroupFacts::recorded(bool device) const {
  return {.job = Process::get().config().run,
          .group = name(),
          .rank = rank(),
          .size = size(),
          .global_ranks = options_.global_ranks,
          .device = device,
          .registered = options_.algorithm.registered(),
          .group_id = transport_->group_id(),
          .ring = Process::get().config().ring};
}

// A rank with a core of its own may spin: waking a sleeper costs more than most waits. Ranks that
// share cores give theirs away at once.
Patience GroupFacts::patience(std::function<bool()> shares_core) const {
  const Process& process = Process::get();
  const bool own_core = neighbours_ <= process.cpus();
  SpinPolicy policy{std::chrono::microseconds(own_core ? 300 : 0), own_core ? 0 : 100,
                    own_core ? 256 : 16};
  policy.least_spin =
      std::min<std::chrono::nanoseconds>(policy.spin, std::chrono::microseconds(60));
  if (!reach_.mapped) {
    // A network's latency is worth some spinning, its transfers are not; a poll is a system call.
    policy.spin = std::min<std::chrono::nanoseconds>(policy.spin, std::chrono::microseconds(50));
    policy.free_polls = 4;
    if (own_core) policy.yields = 4;  // the others of this host may share it, unseen
    if (neighbours_ == 1) policy.yields = 0;
    policy.least_spin = policy.spin / 64;
  }
  if (const auto spin_us = config().spin_us) {
    policy.spin = policy.least_spin = std::chrono::microseconds(*spin_us);
  }
  return Patience(policy, std::move(shares_core));
}

// The index of a rank among those of this host.
size_t GroupFacts::place_of(Rank rank) const {
  const auto& hosts = where_.host_of;
  if (hosts.empty()) return static_cast<size_t>(rank);
  const int host = hosts[static_cast<size_t>(rank)];
  return static_cast<size_t>(std::count(hosts.begin(), hosts.begin() + rank, host));
}

// The thread of the network is busy while a message goes to another host. Beside computation a
// quarter of the cores will do, unless a number was asked for.
Threads GroupFacts::threads_of(Rank rank) const {
  if (where_.cores.empty()) return {};
  const size_t place = place_of(rank);
  const Cores& cores = where_.cores[place];
  const int all = ringcomm::threads_of(where_.cores, place, reach_.mapped ? 0 : 1);
  const bool awake = all * Process::get().sharers() <= cores.count() && config().spin_us != 0;
  return {all, cores.threads > 0 ? all : std::max(1, all / 4), awake};
}

std::optional<Algorithm> GroupFacts::requested_algorithm(const Shape& shape) const {
  const auto asked = options_.algorithm.find(shape);
  if (asked == Algorithm::kDirect && !reach_.mapped) return std::nullopt;
  const bool levels = reach_.local > 1 || reach_.site > 1;
  if (asked == Algorithm::kHierarchical && !levels) return std::nullopt;
  return asked;
}

}  // namespace ringcomm
