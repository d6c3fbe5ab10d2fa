#include "progress/workers.h"

#include <unistd.h>

#include <thread>

#include "progress/progress.h"

namespace ringcomm {
namespace {

// The worker shares its core with the computation it overlaps with: it never spins long.
constexpr auto kWorkerSpin = std::chrono::nanoseconds(1000);
constexpr auto kTidy = std::chrono::milliseconds(20);  // by then a caller has released it
constexpr size_t kMostHelped = 8;  // groups that a waiting thread looks at before it sleeps
constexpr auto kLongTurn = std::chrono::microseconds(100);  // of one worker: worth waking another

}  // namespace

// One of them, as it and step_down() see it.
struct Workers::Worker {
  enum class Role { kNone, kLeads, kHelps };
  static Worker*& of_this_thread() {
    static thread_local Worker* it = nullptr;
    return it;
  }
  // Gives the group back that it has taken.
  void let_go() {
    if (Progress* const group = std::exchange(claimed, nullptr)) group->unclaim();
  }

  Role role = Role::kNone;
  bool fresh = true;
  Groups groups;      // those listed
  uint64_t seen = 0;  // changes of the list
  Progress* claimed = nullptr;
};

void Workers::kick(const std::shared_ptr<Progress>& group) {
  {
    const Lock lock(mutex_);
    if (std::ranges::find(listed_, group) == listed_.end()) listed_.push_back(group);
    changes_.fetch_add(1, std::memory_order_seq_cst);  // partner: work()
    quiet_.store(false, std::memory_order_relaxed);
    elect();
  }
  bell_.notify(kLocalNews);  // the leader may be waiting for a peer
}

bool Workers::help_others(const Progress& own) {
  if (quiet_.load(std::memory_order_relaxed)) return false;  // a stale one only delays
  Groups some;
  {
    const Lock lock(mutex_);
    for (size_t i = 0; i < std::min(listed_.size(), kMostHelped); ++i) {
      some.push_back(listed_[++helped_ % listed_.size()]);
    }
  }
  return std::ranges::any_of(
      some, [&](const auto& group) { return group.get() != &own && group->help(); });
}

// Sees to it that a worker comes where one is wanted. The lock is held. If no thread can be made,
// the next kick tries again, and waiting threads drive.
void Workers::elect() {
  if (!is_wanted()) return;
  if (standby_ > 0 && standby_ >= called_) return wake_.notify_one();
  try {
    std::thread(&Workers::work, this).detach();
    ++standby_;  // it has to pass this lock first
  } catch (const std::system_error& error) {
    called_ = 0;
    if (led_) workers_ = 1 + helpers_;  // so many will do
    Logger(Process::get().config().log, "")
        .warning("the worker thread cannot be started: ", error.what());
  }
}

// More is to be driven than this worker can.
void Workers::call_help(const Worker& worker) {
  {
    const Process& process = Process::get();
    const Lock lock(mutex_);
    const int most = workers_ > 0 ? workers_.load()
                                  : std::min(process.cpus() / process.ranks_here(), kMostWorkers);
    if (helpers_ + called_ + 1 < most) {
      ++called_;
      elect();
    }
  }
  if (worker.role == Worker::Role::kHelps) bell_.notify(kLocalNews);  // the leader may sleep
}

void Workers::dismiss(Worker& worker) {
  if (worker.role == Worker::Role::kLeads) led_ = false;
  if (worker.role == Worker::Role::kHelps) --helpers_;
  worker.role = Worker::Role::kNone;
}

void Workers::step_down() {
  Worker* const worker = Worker::of_this_thread();
  if (worker == nullptr || worker->role == Worker::Role::kNone) return;
  worker->let_go();
  {
    const Lock lock(mutex_);
    dismiss(*worker);
    const auto needs = [](const auto& group) { return group->needs_worker(); };
    if (std::ranges::any_of(listed_, needs)) elect();
  }
  bell_.notify(kLocalNews);
}

// Waits until it is wanted. The lock is held. Tidies up meanwhile.
void Workers::stand_by() {
  while (!is_wanted()) {
    if (tidies_ || !deferred_.filled()) {
      wake_.wait(mutex_);
      continue;
    }
    tidies_ = true;
    wake_.wait_for(mutex_, kTidy);
    tidies_ = false;
    if (is_wanted() || !deferred_.filled()) continue;
    --standby_;  // it may take its time
    mutex_.unlock();
    call([&] { deferred_.clear(); });
    mutex_.lock();
    ++standby_;
  }
}

// Returns when this worker has a role, with the groups that are listed.
void Workers::report(Worker& worker) {
  worker.groups.clear();  // a group's end needs the lock
  const Lock lock(mutex_);
  if (listed_.empty()) dismiss(worker);
  if (worker.role == Worker::Role::kNone) {
    if (!std::exchange(worker.fresh, false)) ++standby_;
    stand_by();
    --standby_;
    if (called_ > 0) --called_;
    if (led_) ++helpers_;
    worker.role = std::exchange(led_, true) ? Worker::Role::kHelps : Worker::Role::kLeads;
  }
  worker.groups = listed_;
  worker.seen = changes_.load(std::memory_order_relaxed);
}

// One turn of the groups, where helpers go the other way round. Several workers drive side by side,
// each another group. True when something moved.
bool Workers::drive(Worker& worker) {
  const size_t count = worker.groups.size();
  auto began = count > 1 ? Clock::now() : Clock::time_point::max();
  size_t moved = 0;
  for (size_t i = 0; i < count && worker.role != Worker::Role::kNone; ++i) {
    const bool helps = worker.role == Worker::Role::kHelps;
    const auto& group = worker.groups[helps ? count - 1 - i : i];
    if (!group->claim()) continue;
    worker.claimed = group.get();
    const bool some = group->drive();
    worker.let_go();
    moved += some ? 1 : 0;
    if (!some && group->idle()) unlist(group);
    if (!some || moved < 2 || Clock::now() - began < kLongTurn) continue;
    began = Clock::time_point::max();  // once a turn
    call_help(worker);
  }
  return moved > 0;
}

// The list loses it, unless there is something to drive again: a kick() comes before this lock, and
// its work is seen, or after it, and lists the group anew.
void Workers::unlist(const std::shared_ptr<Progress>& group) {
  const Lock lock(mutex_);
  if (group->idle() && std::erase(listed_, group) > 0) {
    changes_.fetch_add(1, std::memory_order_seq_cst);  // partner: work()
    if (listed_.empty()) quiet_.store(true, std::memory_order_relaxed);
  }
}

// A helper has found nothing to move. The leader may have left a group to it, and looks once more.
void Workers::rest(Worker& worker) {
  {
    const Lock lock(mutex_);
    dismiss(worker);
  }
  bell_.notify(kLocalNews);
}

// The leader sleeps.
void Workers::sleep(const Worker& worker, Clock::duration most) {
  const auto awake = [&] {
    if (changes_.load(std::memory_order_seq_cst) != worker.seen) return true;
    return std::ranges::any_of(worker.groups, [](const auto& group) {
      Progress& progress = *group;
      if (!progress.claim()) return false;  // the helper that has it rings: rest(), step_down()
      const Finally over{[&] { progress.unclaim(); }};
      return progress.ready();
    });
  };
  uint32_t news = kLocalNews;
  for (const auto& group : worker.groups) {
    most = std::min(most, group->poll_interval());
    news |= group->news();
  }
  quiet_.store(true, std::memory_order_relaxed);
  if (worker.groups.size() > 1 || !worker.groups[0]->sleep(awake, most)) {
    for (const auto& group : worker.groups) group->state().transport().hand_over();
    bell_.sleep(news, awake, most);
  }
  quiet_.store(false, std::memory_order_relaxed);
}

void Workers::work() {
  Worker self;
  Worker::of_this_thread() = &self;
  Patience patience(SpinPolicy{kWorkerSpin, 0, 32});
  // One busy group must not hide another's trouble.
  Waiter waiter(patience, [&](Clock::time_point) {
    for (const auto& group : self.groups) group->state().check();
    if (!deferred_.filled() || self.role == Worker::Role::kNone) return;
    step_down();
    call([&] { deferred_.clear(); });
  });
  while (true) {
    const bool stale = self.seen != changes_.load(std::memory_order_seq_cst);
    if (stale || self.groups.empty() || self.role == Worker::Role::kNone) report(self);
    if (waiter.again(drive(self)) || self.groups.empty()) continue;
    if (self.role == Worker::Role::kHelps) rest(self);
    if (self.role == Worker::Role::kNone) continue;
    sleep(self, waiter.until_check());
    waiter.woke(false);
  }
}

void Workers::call(const std::function<void()>& code) {
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

std::vector<int> Workers::end(const Deadline& deadline) {
  const Lock lock(mutex_);
  returned_.wait_until(mutex_, deadline.at(), [&] {
    mutex_.assert_held();
    return calling_.empty();
  });
  ended_ = true;
  return calling_;
}

void Workers::release_later(std::shared_ptr<void> thing, DeferredRelease::Over over) {
  if (!deferred_.put(std::move(thing), std::move(over))) return;
  const Lock lock(mutex_);
  if (!tidies_) wake_.notify_all();
}

}  // namespace ringcomm
