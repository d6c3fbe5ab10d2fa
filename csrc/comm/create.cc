// Creates communicators.
#include <algorithm>

#include "comm/communicator.h"

namespace ringcomm {
namespace {

constexpr int kMostRanks = 200;  // operands of one reduce step

// The bytes that the stream of send/recv from each peer can hold.
uint64_t mailbox_bytes(int size) {
  uint64_t bytes = 1 << 20;  // smaller ones keep both sides in step: twice the time
  while (bytes > (16 << 10) && bytes * static_cast<uint64_t>(size) > (4 << 20)) bytes /= 2;
  return bytes;
}

int ranks_here(const std::vector<int>& host_of, const CommunicatorOptions& options) {
  if (host_of.empty()) return options.size;
  const int here = host_of[static_cast<size_t>(options.rank)];
  return static_cast<int>(std::count(host_of.begin(), host_of.end(), here));
}

Reach reach_of(const std::vector<int>& host_of) {
  const auto hosts = static_cast<size_t>(hosts_in(host_of));
  if (hosts == 1) return {.mapped = true};
  const size_t local = host_of.size() / hosts;
  for (size_t rank = 0; rank < host_of.size(); ++rank) {
    if (host_of[rank] != static_cast<int>(rank / local)) return {.mapped = false};
  }
  const bool equal = local * hosts == host_of.size();
  return {.mapped = false, .local = equal ? static_cast<int>(local) : 1};
}

// A message takes half a round trip at least.
Costs costs_at(int distance, Costs costs) {
  constexpr double kLeast[] = {0, 1e-3, 20e-3};
  costs.alpha = std::max(costs.alpha, kLeast[distance]);
  return costs;
}

}  // namespace

std::shared_ptr<Communicator> Communicator::create(Store& store,
                                                   const CommunicatorOptions& options) {
  RINGCOMM_CHECK(options.size >= 1 && options.size <= kMostRanks, "a group of ", options.size,
                 " ranks: ringcomm takes 1 to ", kMostRanks);
  RINGCOMM_CHECK(options.rank >= 0 && options.rank < options.size, "rank ", options.rank,
                 " is not in a group of ", options.size);
  Runtime& runtime = Runtime::get();
  const Geometry geometry = Geometry::for_ranks(options.size);
  RendezvousOptions meeting;
  meeting.rank = options.rank;
  meeting.size = options.size;
  meeting.scope = str(runtime.config().run, "/", options.name);
  const uint64_t devices = cuda::Area::bytes(options.size);
  meeting.layout = {options.size, geometry.half_bytes(), mailbox_bytes(options.size), devices};
  meeting.across = [&](int distance) -> RendezvousOptions::Across {
    const Geometry across = Geometry::across_hosts(options.size, distance);
    const uint64_t mailbox = mailbox_bytes(options.size) << (2 * distance);
    return {{options.size, across.half_bytes(), mailbox, devices},
            {across.inbox_offset(0), across.inbox_bytes}};
  };
  meeting.tcp = runtime.config().transport == "tcp";
  if (options.rank == 0) meeting.word = runtime.costs_word();
  meeting.algorithm = [&]() -> std::string {
    if (options.algorithm) return to_string(*options.algorithm);
    const auto& requested = options.config.algorithm;
    return requested ? to_string(algorithm_called(*requested)) : "";
  };
  meeting.network = [&](const std::string& host) -> Network& { return runtime.network(host); };
  if (options.interrupt) meeting.interrupt = options.interrupt;
  if (options.interrupt_meeting) meeting.interrupt = options.interrupt_meeting;
  const Logger logger(runtime.config().log,
                      str("rank ", options.rank, " of group '", options.name, "'"));
  meeting.warn = [&](const std::string& text) { logger.warning(text); };
  Neighbourhood memory = meet(store, meeting, runtime.neighbours(), Deadline(options.timeout));
  const bool mapped = hosts_in(memory.host_of) == 1;
  CommunicatorOptions agreed = options;
  agreed.algorithm.reset();
  agreed.interrupt_meeting = nullptr;  // it may be Python's, which ends before groups do
  if (!memory.algorithm.empty()) agreed.algorithm = algorithm_called(memory.algorithm);
  auto transport = std::make_unique<Transport>(options.rank, std::move(memory.peers));
  const Geometry across = Geometry::across_hosts(options.size, memory.distance);
  return std::make_shared<Communicator>(std::move(transport), mapped ? geometry : across, agreed,
                                        std::move(memory));
}

Communicator::Communicator(std::unique_ptr<Transport> transport, const Geometry& geometry,
                           const CommunicatorOptions& options, Neighbourhood memory)
    : geometry_(geometry),
      memory_(std::move(memory)),
      state_(options, std::move(transport), reach_of(memory_.host_of),
             ranks_here(memory_.host_of, options)),
      host_(state_, geometry, costs_at(memory_.distance, Runtime::get().adopt(memory_.word))),
      messages_(state_, host_),
      progress_(state_, host_, messages_) {
  state_.kick = [this] {
    if (const auto self = weak_from_this().lock()) Runtime::get().kick(self);
  };
  state_.add(host_);
  state_.add(messages_);
  Runtime::get().attach(this);
}

}  // namespace ringcomm
