// The parts that a process has once: configuration, doorbell, and the workers that advance
// asynchronous operations of all its groups. One of them leads: it alone sleeps on the doorbell.
// Where several groups keep it busy, it calls others to help, while there are cores for them. They
// are threads that are made when they are first needed. Another worker also takes the place of one
// that is in a callback of the user's. This is the only global of ringcomm (tests/test_house.py).
#pragma once

#include <condition_variable>
#include <thread>

#include "base/config.h"
#include "base/mutex.h"
#include "base/ticks.h"
#include "plan/topology.h"
#include "progress/deferred_release.h"
#include "transport/rendezvous.h"

namespace ringcomm {

class Communicator;
class Progress;

class Runtime {
 public:
  // Made at first use, never destroyed: threads may still use it while the process exits. A forked
  // child gets one of its own; the groups of its parent are dead to it.
  static Runtime& get();

  const ProcessConfig& config() const { return config_; }
  // Before the first group. Later its run (the job's name in flight records) and resume_seconds may
  // change, when there is no group.
  void configure(const ProcessConfig& config) { config_ = config; }
  Neighbours& neighbours() { return neighbours_; }
  const Moment& began() const { return began_; }
  // Made when the first group needs it: threads and sockets that one host has no use for.
  Network& network(const std::string& store_host);
  int cpus() const { return cpus_; }
  // How many workers may drive at once. Without it: one for each core that a rank of this host has,
  // and kMostWorkers at most.
  void set_workers(int most) { workers_ = most; }
  // The word of a group's rank 0 to the others, as plan/topology.h has it: it reads the file that
  // RINGCOMM_COSTS names, for every group anew. If that fails, the word is "!" and the error. Other
  // processes keep the word: they may be rank 0 of the next group.
  std::string costs_word();
  // What rank 0's word says. Throws UsageError if the word is an error.
  Topology adopt(const std::string& costs_word);

  // The group of the whole job: the first that is not made of some ranks of another.
  std::shared_ptr<Communicator> world();
  void offer_world(const std::shared_ptr<Communicator>& group);

  // Groups of this process, so that a forked child can let go of them, and its end close them.
  void attach(Communicator* group);
  void detach(Communicator* group);

  // Ends the program's groups. Pending work has `grace` in all to end, and the peers get a goodbye.
  // If the program ends because of an error, the peers learn that error. From then on no thread of
  // ours begins code of the user's. Returns the ids of threads that are still in such code after
  // the grace.
  static std::vector<int> close_groups(Clock::duration grace, const std::string& error);

  // What the flight recorders of all groups hold, for files.
  std::vector<std::string> flight_rings();
  // Asks all peers of groups that have not failed to write their flight records.
  void ask_for_records();
  // Lets groups hear that they have failed at a peer, also where nobody calls anything. Returns how
  // often peers have asked for flight records.
  uint64_t look_at_groups();
  // What peers have told this process, other ranks are told.
  void pass_on();
  // From now on a byte goes to this pipe when a group fails.
  void tell_failures_to(int pipe) { failures_ = pipe; }
  void tell_failure() const;

  // `group` has work that no thread may be driving: the workers look at it.
  void kick(const std::shared_ptr<Communicator>& group);
  // Moves one of the groups, if the workers have more than they can do. A thread that waits for
  // `own` calls it instead of a sleep.
  bool help_others(const Progress& own);
  // Called before a worker runs code that may block. From now on others drive.
  void step_down();
  // Runs code of the user's, unless the program ends.
  void call(const std::function<void()>& code);

  // Keeps it until it is `over`, and then for some milliseconds at most.
  void release_later(std::shared_ptr<void> thing, DeferredRelease::Over over = nullptr);
  DeferredRelease& deferred() { return deferred_; }

 private:
  using Groups = std::vector<std::shared_ptr<Communicator>>;

  struct Worker;
  static constexpr int kMostWorkers = 4;

  Runtime();
  void work();
  void report(Worker& worker);
  bool drive(Worker& worker);
  void sleep(const Worker& worker, Clock::duration most);
  void rest(Worker& worker);
  void unlist(const std::shared_ptr<Communicator>& group);
  void call_help(const Worker& worker);
  void dismiss(Worker& worker) RINGCOMM_REQUIRES(mutex_);
  void elect() RINGCOMM_REQUIRES(mutex_);
  void stand_by() RINGCOMM_REQUIRES(mutex_);
  bool is_wanted() const RINGCOMM_REQUIRES(mutex_) {
    return called_ > 0 || (!led_ && helpers_ == 0 && !listed_.empty());
  }
  static void at_exit();
  static void before_fork() RINGCOMM_UNCHECKED_LOCKS;
  static void after_fork_in_parent() RINGCOMM_UNCHECKED_LOCKS;
  static void after_fork_in_child() RINGCOMM_UNCHECKED_LOCKS;

  Groups groups();

  ProcessConfig config_;
  const Moment began_;
  std::atomic<int> failures_{-1};
  Neighbours neighbours_;
  std::optional<Doorbell> bell_;  // from the first group on
  int cpus_;

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
  int ranks_here_ RINGCOMM_GUARDED_BY(mutex_) = 1;   // the most of a group on this host
  bool tidies_ RINGCOMM_GUARDED_BY(mutex_) = false;  // one of them will release what is deferred
  std::vector<int> calling_ RINGCOMM_GUARDED_BY(mutex_);  // threads in code of the user's
  std::condition_variable_any returned_;                  // one of them
  bool ended_ RINGCOMM_GUARDED_BY(mutex_) = false;        // the program has
  std::vector<Communicator*> groups_ RINGCOMM_GUARDED_BY(mutex_);
  std::unique_ptr<Network> network_ RINGCOMM_GUARDED_BY(mutex_);
  std::weak_ptr<Communicator> world_ RINGCOMM_GUARDED_BY(mutex_);
  std::string costs_word_ RINGCOMM_GUARDED_BY(mutex_);
  DeferredRelease deferred_;
};

}  // namespace ringcomm
