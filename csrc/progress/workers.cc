#include "progress/workers.h"

#include <unistd.h>

#include <thread>

#include "progress/progress.h"

namespace ringcomm {

template class PerProcess<Workers>;
namespace {

// The worker shares its core with the computation it overlaps with: it never spins long.
constexpr auto kWorkerSpin = std::chrono::nanoseconds(1000);
constexpr auto kTidy = std::chrono::milliseconds(20);  // by then a caller has released it
constexpr size_t kMostHelped = 8;  // groups that a waiting thread looks at before it sleeps
constexpr auto kLongTurn = std::chrono::microseconds(100);  // of one worker: worth waking another

}  // namespace

// A worker, as it and step_down() see it.
struct Workers::Worker {
  static Worker*& of_this_thread() {
    static thread_local Worker* it = nullptr;
    return it;
  }
  // Gives the group back that it has taken.
  void let_go() {
    if (Progress* const group = std::exchange(claimed, nullptr)) group->unclaim();
  }

  bool drives = true;  // else it is in the pool, or in code that may block
  Groups groups;       // those listed
  uint64_t seen = 0;   // changes of the list
  Progress* claimed = nullptr;
};

// ---- the list

void Workers::kick(const std::shared_ptr<Progress>& group) {
  {
    const Lock lock(mutex_);
    if (std::ranges::find(listed_, group) == listed_.end()) listed_.push_back(group);
    changes_.fetch_add(1, std::memory_order_seq_cst);  // partner: work()
    want(1);
  }
  bell_.notify(kLocalNews);  // a worker may be waiting for a peer
}

// The list loses it, unless there is something to drive again: a kick() comes before this lock, and
// its work is seen, or after it, and lists the group anew.
void Workers::unlist(const std::shared_ptr<Progress>& group) {
  const Lock lock(mutex_);
  if (group->idle() && std::erase(listed_, group) > 0) {
    changes_.fetch_add(1, std::memory_order_seq_cst);  // partner: work()
  }
}

bool Workers::help_others(const Progress& own) {
  if (watched_.load(std::memory_order_relaxed)) return false;  // a stale one only delays
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

// ---- the pool

// Sees to it that so many drive, at least. If no thread can be made, the next kick tries again, and
// waiting threads drive.
void Workers::want(int count) {
  wanted_ = std::max(wanted_, count);
  if (driving_ >= wanted_) return;
  if (idle_ > 0) return wake_.notify_one();
  try {
    std::thread(&Workers::work, this).detach();
    ++driving_;
  } catch (const std::system_error& error) {
    wanted_ = driving_;
    if (driving_ > 0) most_ = driving_;  // so many will do
    Logger(Process::get().config().log, "")
        .warning("the worker thread cannot be started: ", error.what());
  }
}

// More is to be driven than this worker can.
void Workers::call_another() {
  if (watched_.load(std::memory_order_relaxed)) return bell_.notify(kLocalNews);  // it looks again
  const Process& process = Process::get();
  const int fit = std::min(process.cpus() / process.ranks_here(), kMostWorkers);
  const Lock lock(mutex_);
  if (driving_ < (most_ > 0 ? most_.load() : fit)) want(driving_ + 1);
}

void Workers::leave(Worker& worker) {
  worker.drives = false;
  --driving_;
  wanted_ = std::max(driving_, listed_.empty() ? 0 : 1);
}

void Workers::step_down() {
  Worker* const worker = Worker::of_this_thread();
  if (worker == nullptr || !worker->drives) return;
  worker->let_go();
  {
    const Lock lock(mutex_);
    const int wanted = wanted_;
    leave(*worker);
    const auto needs = [](const auto& group) { return group->needs_worker(); };
    if (std::ranges::any_of(listed_, needs)) want(wanted);
  }
  bell_.notify(kLocalNews);  // as in work()
}

// Waits in the pool until one more is wanted. Tidies up meanwhile.
void Workers::stand_by() {
  ++idle_;
  while (driving_ >= wanted_) {
    if (tidies_ || !deferred_.filled()) {
      wake_.wait(mutex_);
      continue;
    }
    tidies_ = true;
    wake_.wait_for(mutex_, kTidy);
    tidies_ = false;
    if (driving_ < wanted_ || !deferred_.filled()) continue;
    --idle_;  // it may take its time
    mutex_.unlock();
    call([&] { deferred_.clear(); });
    mutex_.lock();
    ++idle_;
  }
  --idle_;
}

// Returns when this worker is to drive, with the groups that are listed.
void Workers::join(Worker& worker) {
  worker.groups.clear();  // a group's end needs the lock
  const Lock lock(mutex_);
  if (worker.drives && listed_.empty()) leave(worker);
  if (!worker.drives) {
    stand_by();
    worker.drives = true;
    ++driving_;
    want(wanted_);  // if it is not the only one
  }
  worker.groups = listed_;
  worker.seen = changes_.load(std::memory_order_relaxed);
}

// ---- a worker

void Workers::work() {
  Worker self;
  Worker::of_this_thread() = &self;
  ThreadPool::stay_beside();
  Patience patience(SpinPolicy{kWorkerSpin, 0, 32});
  // One busy group must not hide another's trouble.
  Waiter waiter(patience, [&](Clock::time_point) {
    for (const auto& group : self.groups) group->state().check();
    if (!deferred_.filled() || !self.drives) return;
    step_down();
    call([&] { deferred_.clear(); });
  });
  while (true) {
    const bool stale = self.seen != changes_.load(std::memory_order_seq_cst);
    if (stale || self.groups.empty() || !self.drives) join(self);
    if (waiter.again(drive(self)) || self.groups.empty() || !self.drives) continue;
    if (!watched_.exchange(true)) {  // partner: the store below, of another worker
      sleep(self, waiter.until_check());
      watched_.store(false);
      waiter.woke(false);
      continue;
    }
    bell_.notify(kLocalNews);  // the one that sleeps may have left a group to this one: it looks
    const Lock lock(mutex_);
    leave(self);
  }
}

// One turn of the groups. Several workers drive side by side, each another group. True when
// something moved.
bool Workers::drive(Worker& worker) {
  const size_t count = worker.groups.size();
  auto began = count > 1 ? Clock::now() : Clock::time_point::max();
  size_t moved = 0;
  for (size_t i = 0; i < count && worker.drives; ++i) {
    const auto& group = worker.groups[i];
    if (!group->claim()) continue;
    worker.claimed = group.get();
    const bool some = group->drive();
    worker.let_go();
    moved += some ? 1 : 0;
    if (!some && group->idle()) unlist(group);
    if (!some || moved < 2 || Clock::now() - began < kLongTurn) continue;
    began = Clock::time_point::max();  // once a turn
    call_another();
  }
  return moved > 0;
}

void Workers::sleep(const Worker& worker, Clock::duration most) {
  const auto awake = [&] {
    if (changes_.load(std::memory_order_seq_cst) != worker.seen) return true;
    return std::ranges::any_of(worker.groups, [](const auto& group) {
      if (!group->claim()) return false;  // the worker that has it rings when it goes
      const Finally over{[&] { group->unclaim(); }};
      return group->ready();
    });
  };
  uint32_t news = kLocalNews;
  for (const auto& group : worker.groups) {
    most = std::min(most, group->poll_interval());
    news |= group->news();
  }
  if (worker.groups.size() > 1 || !worker.groups[0]->sleep(awake, most)) {
    for (const auto& group : worker.groups) group->state().transport().hand_over();
    bell_.sleep(news, awake, most);
  }
}

// ---- code of the user's

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
  if (!tidies_) wake_.notify_one();
}

}  // namespace ringcomm
