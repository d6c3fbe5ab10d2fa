// The workers of a process advance asynchronous operations of all its groups. They are a pool of
// threads, made when they are first needed, and a worker claims a group while it drives it. Mostly
// one drives them all in turn. Where several groups keep it busy it calls another, while there are
// cores for them. A worker that finds nothing to move sleeps on the doorbell if nobody does, or
// goes back to the pool. From there another takes the place of one that is in a callback of the
// user's.
#pragma once

#include <condition_variable>

#include "base/doorbell.h"
#include "group/process.h"
#include "progress/deferred_release.h"

namespace ringcomm {

class Progress;

class Workers;
extern template class PerProcess<Workers>;  // libringcomm.so has the only one

class Workers {
 public:
  static Workers& get() { return PerProcess<Workers>::get(); }
  Workers() : bell_(Process::get().neighbours().bell()) {}

  // Sets how many workers may drive at once. Without it: one for each core that a rank of this host
  // has, and kMostWorkers at most.
  void set_most(int most) { most_ = most; }
  // Has the workers look at `group`: it has work that no thread may be driving.
  void kick(const std::shared_ptr<Progress>& group);
  // Moves one of the groups, if the workers have more than they can do. A thread that waits for
  // `own` calls it instead of a sleep.
  bool help_others(const Progress& own);
  // Leaves the driving to others, before this worker runs code that may block.
  void step_down();
  // Runs code of the user's, unless the program ends.
  void call(const std::function<void()>& code);
  // Has no thread of ours begin code of the user's any more, for the program ends. Returns the ids
  // of threads that are still in such code after the deadline.
  std::vector<int> end(const Deadline& deadline);

  // Keeps the thing until it is `over`, and then for some milliseconds at most.
  void release_later(std::shared_ptr<void> thing, DeferredRelease::Over over = nullptr);
  DeferredRelease& deferred() { return deferred_; }

  // Do nothing: a child never uses its parent's workers, and may find them in any state.
  void before_fork() {}
  void after_fork() {}
  void forked() {}

 private:
  using Groups = std::vector<std::shared_ptr<Progress>>;

  struct Worker;
  static constexpr int kMostWorkers = 4;

  void work();
  void join(Worker& worker);
  bool drive(Worker& worker);
  void sleep(const Worker& worker, Clock::duration most);
  void unlist(const std::shared_ptr<Progress>& group);
  void call_another();
  void leave(Worker& worker) RINGCOMM_REQUIRES(mutex_);
  void want(int count) RINGCOMM_REQUIRES(mutex_);
  void stand_by() RINGCOMM_REQUIRES(mutex_);

  const Doorbell bell_;
  std::atomic<int> most_{0};          // 0: not set
  std::atomic<uint64_t> changes_{0};  // of listed_; partner: work()
  std::atomic<bool> watched_{false};  // a worker sleeps on the doorbell; partner: work()

  Mutex mutex_;
  std::condition_variable_any wake_;                 // of the pool
  Groups listed_ RINGCOMM_GUARDED_BY(mutex_);        // that workers look at
  int driving_ RINGCOMM_GUARDED_BY(mutex_) = 0;      // workers, the one on the doorbell included
  int wanted_ RINGCOMM_GUARDED_BY(mutex_) = 0;       // as many are to drive
  int idle_ RINGCOMM_GUARDED_BY(mutex_) = 0;         // workers in the pool
  size_t helped_ RINGCOMM_GUARDED_BY(mutex_) = 0;    // whose turn it is in help_others()
  bool tidies_ RINGCOMM_GUARDED_BY(mutex_) = false;  // one of those will clear what is deferred
  std::vector<int> calling_ RINGCOMM_GUARDED_BY(mutex_);  // threads in code of the user's
  std::condition_variable_any returned_;                  // one of them
  bool ended_ RINGCOMM_GUARDED_BY(mutex_) = false;        // the program has
  DeferredRelease deferred_;
};

}  // namespace ringcomm
