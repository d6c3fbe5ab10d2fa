#include "comm/runtime.h"

#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include "comm/communicator.h"

namespace ringcomm {
namespace {

// A quarter of the descriptors that this process may have, and 128 at most, or fewer where several
// ranks share a core: each costs a heartbeat twice a second.
size_t most_connections(int cpus, int ranks) {
  const auto share = static_cast<size_t>(std::clamp(128 * cpus / ranks, 32, 128));
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return share;
  return std::clamp<size_t>(limit.rlim_cur / 4, 16, share);
}

struct Global {
  Mutex mutex;
  Runtime* runtime = nullptr;
};

Global& global() {
  static Global* const instance = new Global;  // outlives every thread
  return *instance;
}

}  // namespace

Runtime& Runtime::get() {
  Global& here = global();
  const Lock lock(here.mutex);
  if (here.runtime == nullptr) here.runtime = new Runtime;
  return *here.runtime;
}

Runtime::Runtime() : cpus_(usable_cpus()) {
  static const int registered =
      ::pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  if (registered != 0) throw SystemError("pthread_atfork", registered);
  std::atexit(&Runtime::at_exit);
}

Network& Runtime::network(const std::string& store_host) {
  const auto made = [this] {
    const Lock lock(mutex_);
    return network_.get();
  };
  if (Network* const network = made()) return *network;
  // Without the lock: it may wait for Python.
  const Places places = config_.places ? config_.places(config_, store_host) : Places();
  const Lock lock(mutex_);
  if (!network_) {
    const std::chrono::seconds resume(config_.resume_seconds);
    NetworkOptions options{config_, places, resume, neighbours_.bell(), [this] { pass_on(); }};
    options.most_connections = most_connections(cpus_, ranks_here_);
    network_ = std::make_unique<Network>(options);
  }
  return *network_;
}

std::string Runtime::costs_word() {
  try {  // without the lock: it may wait for Python
    if (!config_.costs.empty() && config_.costs_word) return config_.costs_word(config_.costs);
  } catch (const UsageError& error) {
    return str("!RINGCOMM_COSTS (rank 0): ", error.what());
  }
  const Lock lock(mutex_);
  return costs_word_;
}

Topology Runtime::adopt(const std::string& costs_word) {
  if (costs_word.starts_with('!')) throw UsageError(costs_word.substr(1));
  Topology topology = parse_topology(costs_word);
  const Lock lock(mutex_);
  if (!costs_word.empty()) costs_word_ = costs_word;
  return topology;
}

std::shared_ptr<Communicator> Runtime::world() {
  const Lock lock(mutex_);
  auto world = world_.lock();
  return world && !world->state().left() && !world->state().forked() ? world : nullptr;
}

void Runtime::offer_world(const std::shared_ptr<Communicator>& group) {
  if (world()) return;
  const Lock lock(mutex_);
  world_ = group;
}

void Runtime::attach(Communicator* group) {
  const Lock lock(mutex_);
  if (!bell_) bell_ = neighbours_.bell();
  groups_.push_back(group);
  ranks_here_ = std::max(ranks_here_, group->state().neighbours());
  if (network_) network_->keep(most_connections(cpus_, ranks_here_));
}

void Runtime::detach(Communicator* group) {
  const Lock lock(mutex_);
  std::erase(groups_, group);
}

Runtime::Groups Runtime::groups() {
  Groups groups;
  const Lock lock(mutex_);
  for (Communicator* group : groups_) {
    auto alive = group->weak_from_this().lock();
    if (alive && !alive->state().forked()) groups.push_back(std::move(alive));
  }
  return groups;
}

std::vector<std::string> Runtime::flight_rings() {
  std::vector<std::string> rings;
  for (const auto& group : groups()) {
    std::ranges::move(group->flight_rings(), std::back_inserter(rings));
  }
  return rings;
}

void Runtime::ask_for_records() {
  for (const auto& group : groups()) {
    if (!group->state().failed()) group->state().transport().ask_for_records();
  }
}

uint64_t Runtime::look_at_groups() {
  uint64_t asked = 0;
  for (const auto& group : groups()) {
    group->state().why_failed();
    asked += group->state().transport().times_asked();
  }
  return asked;
}

void Runtime::pass_on() {
  for (const auto& group : groups()) group->state().transport().pass_on();
}

// FAILED of ringcomm/_flight/recorder.py.
void Runtime::tell_failure() const {
  if (const int pipe = failures_; pipe >= 0) (void)!::write(pipe, "\1", 1);  // full: it knows
}

std::vector<int> Runtime::close_groups(Clock::duration grace, const std::string& error) {
  Runtime* const runtime = global().runtime;
  if (runtime == nullptr) return {};
  const Deadline deadline(grace);
  for (const auto& group : runtime->groups()) {
    if (!error.empty()) group->abort("its program ended with " + error);
    group->shutdown(deadline.left());
  }
  const Lock lock(runtime->mutex_);
  runtime->returned_.wait_until(runtime->mutex_, deadline.at(), [&] {
    runtime->mutex_.assert_held();
    return runtime->calling_.empty();
  });
  runtime->ended_ = true;
  return runtime->calling_;
}

void Runtime::call(const std::function<void()>& code) {
  const int self = ::gettid();
  {
    const Lock lock(mutex_);
    if (ended_) return;
    calling_.push_back(self);
  }
  const Finally over{[&] {
    const Lock lock(mutex_);
    calling_.erase(std::ranges::find(calling_, self));
    returned_.notify_all();
  }};
  code();
}

void Runtime::release_later(std::shared_ptr<void> thing, DeferredRelease::Over over) {
  if (!deferred_.put(std::move(thing), std::move(over))) return;
  const Lock lock(mutex_);
  if (!tidies_) wake_.notify_all();
}

// A program may end without destroying its groups.
void Runtime::at_exit() {
  Runtime* const runtime = global().runtime;
  if (runtime == nullptr) return;
  if (!runtime->mutex_.try_lock()) return;
  for (Communicator* group : runtime->groups_) group->drain();
  runtime->mutex_.unlock();
}

void Runtime::before_fork() {
  Global& here = global();
  here.mutex.lock();
  if (here.runtime == nullptr) return;
  here.runtime->mutex_.lock();
  if (here.runtime->network_) here.runtime->network_->before_fork();
  here.runtime->neighbours_.before_fork();
}

void Runtime::after_fork_in_parent() {
  Global& here = global();
  if (here.runtime != nullptr) {
    here.runtime->neighbours_.after_fork();
    if (here.runtime->network_) here.runtime->network_->after_fork();
    here.runtime->mutex_.unlock();
  }
  here.mutex.unlock();
}

// The parent's runtime is left as it is, locked: nothing of it may be used here.
void Runtime::after_fork_in_child() {
  Global& here = global();
  if (here.runtime != nullptr) {
    for (Communicator* group : here.runtime->groups_) group->forked();
    if (here.runtime->network_) here.runtime->network_->forked();
    here.runtime->neighbours_.forked();
  }
  here.runtime = nullptr;
  here.mutex.unlock();
}

}  // namespace ringcomm
