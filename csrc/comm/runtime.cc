#include "comm/runtime.h"

#include <pthread.h>
#include <unistd.h>

#include "comm/communicator.h"

namespace ringcomm {
namespace {

// The worker shares its core with the computation it overlaps with: it never spins long.
constexpr auto kWorkerSpin = std::chrono::nanoseconds(1000);
constexpr auto kTidy = std::chrono::milliseconds(20);  // by then a caller has released it

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
    network_ = std::make_unique<Network>(NetworkOptions{
        config_, places, resume, neighbours_.bell(), [this] { pass_on(); }});
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

void Runtime::attach(Communicator* group) {
  const Lock lock(mutex_);
  if (!bell_) bell_ = neighbours_.bell();
  groups_.push_back(group);
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

// FAILED of ringcomm/_flight.py.
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

void Runtime::kick(const std::shared_ptr<Communicator>& group) {
  {
    const Lock lock(mutex_);
    if (std::find(inbox_.begin(), inbox_.end(), group) == inbox_.end()) inbox_.push_back(group);
    has_inbox_.store(true, std::memory_order_seq_cst);  // partner: work()
    elect();
  }
  bell_->notify(kLocalNews);  // the worker may be waiting for a peer
}

// Sees to it that a worker takes the inbox. The lock is held. If no thread can be made, the next
// kick tries again, and waiting threads drive.
void Runtime::elect() {
  if (leader_.load(std::memory_order_relaxed) != std::thread::id()) return;
  if (standby_ > 0) {
    wake_.notify_one();
    return;
  }
  try {
    std::thread(&Runtime::work, this).detach();
    ++standby_;  // it has to pass this lock first
  } catch (const std::system_error& error) {
    Logger(config_.log, "").warning("the worker thread cannot be started: ", error.what());
  }
}

void Runtime::step_down() {
  if (leader_.load(std::memory_order_relaxed) != std::this_thread::get_id()) return;
  const Lock lock(mutex_);
  for (const auto& group : *driven_) {
    if (group->progress().needs_worker()) inbox_.push_back(group);
  }
  leader_.store(std::thread::id(), std::memory_order_relaxed);
  driven_ = nullptr;
  has_inbox_.store(!inbox_.empty(), std::memory_order_seq_cst);
  if (!inbox_.empty()) elect();
}

// Waits until there is something to drive and nobody drives. The lock is held. Tidies up meanwhile.
void Runtime::stand_by() {
  const auto called = [&] {
    mutex_.assert_held();
    return !inbox_.empty() && leader_.load(std::memory_order_relaxed) == std::thread::id();
  };
  while (!called()) {
    if (tidies_ || !deferred_.filled()) {
      wake_.wait(mutex_, [&] {
        mutex_.assert_held();
        return called() || (!tidies_ && deferred_.filled());
      });
      continue;
    }
    tidies_ = true;
    const bool wanted = wake_.wait_for(mutex_, kTidy, called);
    tidies_ = false;
    if (wanted || !deferred_.filled()) continue;
    --standby_;  // it may take its time
    mutex_.unlock();
    call([&] { deferred_.clear(); });
    mutex_.lock();
    ++standby_;
  }
}

// Returns when this thread is the leader and has something to drive.
void Runtime::lead(Groups& active, bool fresh) {
  const auto self = std::this_thread::get_id();
  const bool leads = leader_.load(std::memory_order_relaxed) == self;
  if (!leads) active.clear();  // step_down() gave them away; a group's end needs the lock
  Groups taken;                // its references go after the lock
  const Lock lock(mutex_);
  if (active.empty()) {
    if (leads) leader_.store(std::thread::id(), std::memory_order_relaxed);
    if (!fresh) ++standby_;
    stand_by();
    --standby_;
  }
  leader_.store(self, std::memory_order_relaxed);
  driven_ = &active;
  taken.swap(inbox_);
  for (const auto& group : taken) {
    if (std::find(active.begin(), active.end(), group) == active.end()) active.push_back(group);
  }
  has_inbox_.store(false, std::memory_order_seq_cst);
}

void Runtime::work() {
  Groups active;
  Patience patience(SpinPolicy{kWorkerSpin, 0, 32});
  const auto inbox = [&] { return has_inbox_.load(std::memory_order_seq_cst); };
  const auto leads = [&, self = std::this_thread::get_id()] {
    return leader_.load(std::memory_order_relaxed) == self;  // only this thread makes it so
  };
  // One busy group must not hide another's trouble.
  Waiter waiter(patience, [&](Clock::time_point) {
    for (const auto& group : active) group->state().check();
    if (!deferred_.filled() || !leads()) return;
    step_down();
    call([&] { deferred_.clear(); });
  });
  bool fresh = true;
  while (true) {
    if (active.empty() || inbox() || !leads()) lead(active, std::exchange(fresh, false));
    bool moved = false;
    for (size_t i = 0; i < active.size() && leads();) {  // step_down() reads the list meanwhile
      const auto result = active[i]->progress().drive();
      moved = moved || result == Progress::Driven::kMoved;
      if (result != Progress::Driven::kIdle) {
        ++i;
        continue;
      }
      const auto idle = std::move(active[i]);  // which may end with this reference
      active.erase(active.begin() + static_cast<std::ptrdiff_t>(i));
    }
    if (!waiter.again(moved || active.empty())) {
      const auto awake = [&] {
        const auto ready = [](const auto& group) { return group->progress().ready(); };
        return inbox() || std::ranges::any_of(active, ready);
      };
      Clock::duration most = waiter.until_check();
      uint32_t news = kLocalNews;
      for (const auto& group : active) {
        most = std::min(most, group->progress().poll_interval());
        news |= group->progress().news();
      }
      if (active.size() > 1 || !active[0]->progress().sleep(awake, most)) {
        bell_->sleep(news, awake, most);
      }
      waiter.woke(false);
    }
  }
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
