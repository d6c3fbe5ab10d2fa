#include "comm/groups.h"

#include <sys/resource.h>

#include "comm/communicator.h"

namespace ringcomm {

template class PerProcess<Groups>;
namespace {

// Returns a quarter of the descriptors that this process may have, and 128 at most, or fewer where
// several ranks share a core: each connection costs a heartbeat twice a second.
size_t most_connections() {
  const Process& process = Process::get();
  const int fair = std::clamp(128 * process.cpus() / process.ranks_here(), 32, 128);
  const auto share = static_cast<size_t>(fair);
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return share;
  return std::clamp<size_t>(limit.rlim_cur / 4, 16, share);
}

}  // namespace

Groups::Groups() { std::atexit(&Groups::at_exit); }

// ---- the list

void Groups::attach(Communicator* group) {
  const Lock lock(mutex_);
  groups_.push_back(group);
  arena_ = &Process::get().neighbours().arena();
  arena_->keep(true);
  if (network_) network_->keep(most_connections());
}

void Groups::detach(Communicator* group) {
  const Lock lock(mutex_);
  std::erase(groups_, group);
  if (groups_.empty() && arena_ != nullptr) arena_->keep(false);
}

std::vector<std::shared_ptr<Communicator>> Groups::alive() {
  std::vector<std::shared_ptr<Communicator>> alive;
  const Lock lock(mutex_);
  for (Communicator* group : groups_) {
    auto kept = group->weak_from_this().lock();
    if (kept && !kept->state().forked()) alive.push_back(std::move(kept));
  }
  return alive;
}

std::shared_ptr<Communicator> Groups::world() {
  const Lock lock(mutex_);
  auto world = world_.lock();
  return world && !world->state().left() && !world->state().forked() ? world : nullptr;
}

void Groups::offer_world(const std::shared_ptr<Communicator>& group) {
  if (world()) return;
  const Lock lock(mutex_);
  world_ = group;
}

// ---- between hosts

Network& Groups::network(const std::string& store_host) {
  const auto made = [this] {
    const Lock lock(mutex_);
    return network_.get();
  };
  if (Network* const network = made()) return *network;
  // Without the lock: it may wait for Python.
  Process& process = Process::get();
  const ProcessConfig& config = process.config();
  const Places places = config.places ? config.places(config, store_host) : Places();
  const Lock lock(mutex_);
  if (!network_) {
    const std::chrono::seconds resume(config.resume_seconds);
    NetworkOptions options{config, places, resume, process.neighbours().bell(),
                           [this] { pass_on(); }};
    options.most_connections = most_connections();
    network_ = std::make_unique<Network>(options);
  }
  return *network_;
}

// Tells other ranks what peers have told this process.
void Groups::pass_on() {
  for (const auto& group : alive()) group->state().transport().pass_on();
}

std::string Groups::costs_text() {
  const ProcessConfig& config = Process::get().config();
  try {  // without the lock: it may wait for Python
    if (!config.costs.empty() && config.costs_text) return config.costs_text(config.costs);
  } catch (const UsageError& error) {
    return str("!RINGCOMM_COSTS (rank 0): ", error.what());
  }
  const Lock lock(mutex_);
  return costs_text_;
}

Topology Groups::adopt(const std::string& costs_text) {
  if (costs_text.starts_with('!')) throw UsageError(costs_text.substr(1));
  Topology topology = parse_topology(costs_text);
  const Lock lock(mutex_);
  if (!costs_text.empty()) costs_text_ = costs_text;
  return topology;
}

// ---- all groups at once

std::vector<std::string> Groups::flight_rings() {
  std::vector<std::string> rings;
  for (const auto& group : alive()) {
    std::ranges::move(group->flight_rings(), std::back_inserter(rings));
  }
  return rings;
}

void Groups::ask_for_records() {
  for (const auto& group : alive()) {
    if (!group->state().failed()) group->state().transport().ask_for_records();
  }
}

uint64_t Groups::hear_peers() {
  uint64_t asked = 0;
  for (const auto& group : alive()) {
    group->state().why_failed();
    asked += group->state().transport().times_asked();
  }
  return asked;
}

std::vector<int> Groups::close_all(Clock::duration grace, const std::string& error) {
  Groups* const groups = PerProcess<Groups>::made();
  if (groups == nullptr) return {};
  const Deadline deadline(grace);
  for (const auto& group : groups->alive()) {
    if (!error.empty()) group->abort("its program ended with " + error);
    group->shutdown(deadline.left());
  }
  return Workers::get().end(deadline);
}

// A program may end without destroying its groups.
void Groups::at_exit() {
  Groups* const groups = PerProcess<Groups>::made();
  if (groups == nullptr || !groups->mutex_.try_lock()) return;
  for (Communicator* group : groups->groups_) group->drain();
  groups->mutex_.unlock();
}

// ---- forks

void Groups::before_fork() {
  mutex_.lock();
  if (network_) network_->before_fork();
}

void Groups::after_fork() {
  if (network_) network_->after_fork();
  mutex_.unlock();
}

void Groups::forked() {
  for (Communicator* group : groups_) group->forked();
  if (network_) network_->forked();
}

}  // namespace ringcomm
