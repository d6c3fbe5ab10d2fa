// The parts of a process that do not depend on its groups: its configuration, and its neighbours,
// the processes of its host.
#pragma once

#include "base/config.h"
#include "base/ticks.h"
#include "group/per_process.h"
#include "transport/neighbours.h"

namespace ringcomm {

class Process;
extern template class PerProcess<Process>;  // libringcomm.so has the only one

class Process {
 public:
  static Process& get() { return PerProcess<Process>::get(); }

  const ProcessConfig& config() const { return config_; }
  // Call it before the first group. Later its run (the job's name in flight records) and
  // resume_seconds may change, when there is no group.
  void configure(const ProcessConfig& config) { config_ = config; }
  Neighbours& neighbours() { return neighbours_; }
  const Moment& began() const { return began_; }
  int cpus() const { return cpus_; }

  // Returns how many ranks share this host with this process: the most of any of its groups.
  int ranks_here() const { return ranks_here_.load(std::memory_order_relaxed); }
  void note_ranks_here(int ranks) { raise(ranks_here_, ranks); }

  // Returns how many ranks share the cores of this process: the most of any of its groups.
  int sharers() const { return sharers_.load(std::memory_order_relaxed); }
  void note_sharers(int ranks) { raise(sharers_, ranks); }

  // Has tell_failure(), which a failing group calls, write a byte to this pipe from now on.
  void tell_failures_to(int pipe) { failures_ = pipe; }
  void tell_failure() const;

  void before_fork() { neighbours_.before_fork(); }
  void after_fork() { neighbours_.after_fork(); }
  void forked() { neighbours_.forked(); }

 private:
  static void raise(std::atomic<int>& most, int number);

  ProcessConfig config_;
  const Moment began_;
  const int cpus_ = usable_cpus();
  std::atomic<int> ranks_here_{1};  // grows; a stale one only makes fewer or more workers
  std::atomic<int> sharers_{1};     // grows likewise
  std::atomic<int> failures_{-1};
  Neighbours neighbours_;
};

}  // namespace ringcomm
