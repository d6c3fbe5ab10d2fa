// Creates communicators.
#include <algorithm>
#include <ranges>

#include "comm/communicator.h"

namespace ringcomm {
namespace {

constexpr auto kTold = std::chrono::seconds(1);  // for remote ranks to hear that there is no group

// Returns the bytes that the stream of send/recv from each peer can hold.
uint64_t mailbox_bytes(int size) {
  uint64_t bytes = 1 << 20;  // smaller ones keep both sides in step: twice the time
  while (bytes > (16 << 10) && bytes * static_cast<uint64_t>(size) > (4 << 20)) bytes /= 2;
  return bytes;
}

// Returns the ranks' reach by rank 0's word. Without one a message takes what fits the distance.
Reach reach_in(const MappedGroup& memory) {
  const Topology topology = Groups::get().adopt(memory.costs_text);
  Reach reach = reach_of(topology, memory.host_of, memory.names);
  constexpr double kFits[] = {Costs().alpha, 1e-3, 8e-3};
  if (memory.costs_text.empty()) reach.costs.alpha = kFits[memory.distance];
  return reach;
}

void warn_of_stranger(const MappedGroup& memory, const Logger& logger) {
  const Topology topology = Groups::get().adopt(memory.costs_text);
  if (topology.hosts.empty() || memory.hosts() == 1) return;
  const std::string name = stranger(topology, memory.names);
  if (name.empty()) return;
  logger.warning("the file of RINGCOMM_COSTS has no host '", name,
                 "', or two hosts have that name: its order of hosts is not used; run `ringcomm "
                 "tune` again, or give each host its name there with RINGCOMM_HOST");
}

// How the ranks are to meet. `world`: the group of the whole job, if this one is a part of it.
RendezvousOptions how_to_meet(const CommunicatorOptions& options, const Geometry& geometry,
                              const Communicator* world, const Logger& logger) {
  Groups& groups = Groups::get();
  const ProcessConfig& config = Process::get().config();
  const uint64_t devices = cuda::Area::bytes(options.size);
  RendezvousOptions rendezvous;
  rendezvous.rank = options.rank;
  rendezvous.size = options.size;
  rendezvous.name = options.meeting.empty() ? options.name : options.meeting;
  rendezvous.members = options.global_ranks;
  if (world != nullptr) rendezvous.world = world->state().transport().group_id();
  rendezvous.layout = {options.size, geometry.window_room(), geometry.inbox_bytes,
                       mailbox_bytes(options.size), devices};
  rendezvous.across = [=, size = options.size](int here, int most,
                                               int distance) -> RendezvousOptions::Across {
    const Geometry across = Geometry::across_hosts(size, distance, most);
    return {{here, across.window_room(), across.inbox_bytes, mailbox_bytes(most), devices},
            {1, 0, across.inbox_bytes, mailbox_bytes(1) << (2 * distance)}};
  };
  rendezvous.cores = own_cores();
  rendezvous.cores.sharers = static_cast<uint32_t>(Process::get().sharers());
  rendezvous.cores.threads = static_cast<uint32_t>(options.config.threads);
  rendezvous.tcp = config.transport == "tcp";
  rendezvous.host = config.host;
  if (options.rank == 0) rendezvous.costs_text = groups.costs_text();
  rendezvous.algorithm = [&options]() -> std::string {
    const std::string& by_code = options.algorithm.text();
    return by_code.empty() ? Rules(options.config.algorithm.value_or("")).text() : by_code;
  };
  rendezvous.network = [&groups](const std::string& host) -> Network& {
    return groups.network(host);
  };
  if (config.distance) rendezvous.distance = config.distance;
  if (options.interrupt) rendezvous.interrupt = options.interrupt;
  if (options.interrupt_meeting) rendezvous.interrupt = options.interrupt_meeting;
  rendezvous.lingers = !options.interrupt_meeting;  // which tells ranks of those that gave up
  rendezvous.warn = [&logger](const std::string& text) { logger.warning(text); };
  return rendezvous;
}

}  // namespace

std::shared_ptr<Communicator> Communicator::create(Store& store,
                                                   const CommunicatorOptions& options) {
  RINGCOMM_CHECK(options.size >= 1 && options.size <= kMostRanks, "a group of ", options.size,
                 " ranks: ringcomm takes 1 to ", kMostRanks);
  RINGCOMM_CHECK(options.rank >= 0 && options.rank < options.size, "rank ", options.rank,
                 " is not in a group of ", options.size);
  const bool part = !options.global_ranks.empty();
  const auto world = part ? Groups::get().world() : nullptr;
  const Geometry geometry = Geometry::for_ranks(options.size);
  Process& process = Process::get();
  const Logger logger(process.config().log,
                      str("rank ", options.rank, " of group '", options.name, "'"));
  const RendezvousOptions rendezvous = how_to_meet(options, geometry, world.get(), logger);
  auto limit = options.timeout;
  if (world && options.may_be_late) limit = std::max(limit, world->state().timeout());
  const auto memory =
      std::make_shared<MappedGroup>(meet(store, rendezvous, process.neighbours(), Deadline(limit)));
  for (const ShmPeer& peer : memory->peers) memory->cores.push_back(peer.segment.header().cores);
  const std::shared_ptr<Transport> transport = std::make_unique<Transport>(
      options.rank, std::move(memory->peers), std::move(memory->remote_ranks));
  try {
    const bool mapped = memory->hosts() == 1;
    if (options.rank == 0) warn_of_stranger(*memory, logger);
    CommunicatorOptions agreed = options;
    agreed.interrupt_meeting = nullptr;  // it may be Python's, which ends before groups do
    agreed.algorithm = Rules(memory->algorithm);
    const Geometry across =
        Geometry::across_hosts(options.size, memory->distance, memory->most_ranks());
    auto group =
        std::make_shared<Communicator>(transport, mapped ? geometry : across, agreed, memory);
    if (!part) Groups::get().offer_world(group);
    return group;
  } catch (const std::exception& error) {  // the others have a group: they hear why it ends
    transport->mark_failed(error.what());
    transport->tell_failure();
    const Deadline told(kTold);
    poll_until([&] { return transport->undelivered() == 0 || told.passed(); },
               std::chrono::milliseconds(1), [] {});
    throw;
  }
}

Communicator::Communicator(std::shared_ptr<Transport> transport, const Geometry& geometry,
                           const CommunicatorOptions& options, std::shared_ptr<MappedGroup> memory)
    : geometry_(geometry),
      memory_(std::move(memory)),
      state_(options, std::move(transport), reach_in(*memory_), *memory_),
      host_(state_, geometry),
      messages_(state_, host_),
      progress_(state_, host_, messages_),
      device_(state_, progress_) {
  state_.kick = [this] {
    if (auto self = weak_from_this().lock()) Workers::get().kick({std::move(self), &progress_});
  };
  state_.engines().add(host_);
  state_.engines().add(messages_);
  Groups::get().attach(this);
}

}  // namespace ringcomm
