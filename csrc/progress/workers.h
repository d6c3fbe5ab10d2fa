// The workers of a process advance asynchronous operations of all its groups. One of them leads: it
// alone sleeps on the doorbell. Where several groups keep it busy, it calls others to help, while
// there are cores for them. They are threads that are made when they are first needed. Another
// worker also takes the place of one that is in a callback of the user's.
#pragma once

#include <condition_variable>

#include "base/doorbell.h"
#include "group/process.h"
#include "progress/deferred_release.h"

namespace ringcomm {

class Progress;

class Workers {
 public:
  static Workers& get() { return PerProcess<Workers>::get(); }
  Workers() : bell_(Process::get().neighbours().bell()) {}

  // How many workers may drive at once. Without it: one for each core that a rank of this host has,
  // and kMostWorkers at most.
  void set_most(int most) { workers_ = most; }
  // `group` has work that no thread may be driving: the workers look at it.
  void kick(const std::shared_ptr<Progress>& group);
  // Moves one of the groups, if the workers have more than they can do. A thread that waits for
  // `own` calls it instead of a sleep.
  bool help_others(const Progress& own);
  // Called before a worker runs code that may block. From now on others drive.
  void step_down();
  // Runs code of the user's, unless the program ends.
  void call(const std::function<void()>& code);
  // The program ends: no thread of ours begins code of the user's any more. Returns the ids of
  // threads that are still in such code after the deadline.
  std::vector<int> end(const Deadline& deadline);

  // Keeps it until it is `over`, and then for some milliseconds at most.
  void release_later(std::shared_ptr<void> thing, DeferredRelease::Over over = nullptr);
  DeferredRelease& deferred() { return deferred_; }

  void before_fork() RINGCOMM_UNCHECKED_LOCKS { mutex_.lock(); }
  void after_fork() RINGCOMM_UNCHECKED_LOCKS { mutex_.unlock(); }
  void forked() {}

 private:
  using Groups = std::vector<std::shared_ptr<Progress>>;

  struct Worker;
  static constexpr int kMostWorkers = 4;

  void work();
  void report(Worker& worker);
  bool drive(Worker& worker);
  void sleep(const Worker& worker, Clock::duration most);
  void rest(Worker& worker);
  void unlist(const std::shared_ptr<Progress>& group);
  void call_help(const Worker& worker);
  void dismiss(Worker& worker) RINGCOMM_REQUIRES(mutex_);
  void elect() RINGCOMM_REQUIRES(mutex_);
  void stand_by() RINGCOMM_REQUIRES(mutex_);
  bool is_wanted() const RINGCOMM_REQUIRES(mutex_) {
    return called_ > 0 || (!led_ && helpers_ == 0 && !listed_.empty());
  }

  const Doorbell bell_;
  Mutex mutex_;
  std::condition_variable_any wake_;
  std::atomic<bool> quiet_{
      true};                     // nothing is listed, or the leader sleeps; partner: help_others()
  std::atomic<int> workers_{0};  // 0: not set
  Groups listed_ RINGCOMM_GUARDED_BY(mutex_);        // that workers look at
  std::atomic<uint64_t> changes_{0};                 // of listed_; partner: work()
  bool led_ RINGCOMM_GUARDED_BY(mutex_) = false;     // by one of the workers
  int helpers_ RINGCOMM_GUARDED_BY(mutex_) = 0;      // workers that drive and do not lead
  size_t helped_ RINGCOMM_GUARDED_BY(mutex_) = 0;    // whose turn it is in help_others()
  int called_ RINGCOMM_GUARDED_BY(mutex_) = 0;       // to help, and not come yet
  int standby_ RINGCOMM_GUARDED_BY(mutex_) = 0;      // workers that could come
  bool tidies_ RINGCOMM_GUARDED_BY(mutex_) = false;  // one of them will release what is deferred
  std::vector<int> calling_ RINGCOMM_GUARDED_BY(mutex_);  // threads in code of the user's
  std::condition_variable_any returned_;                  // one of them
  bool ended_ RINGCOMM_GUARDED_BY(mutex_) = false;        // the program has
  DeferredRelease deferred_;
};

}  // namespace ringcomm
