// The facts of a group that hold from its beginning to its end: its ranks, its options, its log and
// its flight records. Only the timeout may change.
#pragma once

#include <chrono>

#include "base/config.h"
#include "base/log.h"
#include "exec/thread_pool.h"
#include "plan/rules.h"
#include "report/diagnosis.h"
#include "report/recorder.h"
#include "transport/transport.h"

namespace ringcomm {

struct CommunicatorOptions {
  Rank rank = 0;
  int size = 1;
  std::string name = "default";
  std::string meeting;            // the name under which the ranks meet; empty: the group's
  std::vector<int> global_ranks;  // its ranks in the whole job; empty: the same
  std::chrono::milliseconds timeout{std::chrono::minutes(30)};
  bool may_be_late = false;  // then the ranks meet for as long as the whole job's group waits
  Rules algorithm;           // the table decides where they leave it open
  GroupConfig config;        // its `algorithm` is the same as a text
  // Called now and then by a caller's thread that waits: its exception ends the wait (Ctrl-C).
  std::function<void()> interrupt;
  std::function<void()> interrupt_meeting;  // the same while the ranks meet
  std::string unusable = "' has failed before (destroy it and make a new one): ";
};

class GroupFacts {
 public:
  // `where`: empty where all ranks are on this host.
  GroupFacts(const CommunicatorOptions& options, std::shared_ptr<Transport> transport,
             const Reach& reach, const Whereabouts& where);

  Rank rank() const { return options_.rank; }
  int size() const { return options_.size; }
  const std::string& name() const { return options_.name; }
  const GroupConfig& config() const { return options_.config; }
  const Reach& reach() const { return reach_; }
  bool alone_on_host() const { return neighbours_ == 1 && size() > 1; }
  Transport& transport() const { return *transport_; }
  const Whereabouts& where() const { return where_; }
  const Logger& logger() const { return logger_; }

  Recorder& recorder() { return recorder_; }  // for the host's operations
  const Recorder& recorder() const { return recorder_; }
  const Diagnosis& diagnosis() const { return diagnosis_; }  // the same
  Recorded recorded(bool device) const;                      // for the header of its flight records

  void set_timeout(std::chrono::milliseconds timeout) { timeout_ms_.store(timeout.count()); }
  std::chrono::milliseconds timeout() const {
    return std::chrono::milliseconds(timeout_ms_.load());
  }
  // Returns the timeout that a caller asked for, or where that is 0 the group's.
  std::chrono::milliseconds timeout_or(std::chrono::milliseconds asked) const {
    return asked.count() > 0 ? asked : timeout();
  }

  // Returns how many threads `rank`, of this host, has for a long step of an operation.
  Threads threads_of(Rank rank) const;
  // Returns how long a thread that waits spins before it sleeps. `shares_core`: see Patience.
  Patience patience(std::function<bool()> shares_core = {}) const;
  // Returns the algorithm that was asked for, if the ranks' reach allows it.
  std::optional<Algorithm> requested_algorithm(const Shape& shape) const;
  std::optional<Algorithm> requested_kernel(const Shape& shape) const {
    return options_.algorithm.find(shape, true);
  }
  // Logs the group's first operation, once.
  template <typename Text>
  void log_first_operation(Text&& text) {
    if (logged_.load(std::memory_order_relaxed) || logged_.exchange(true)) return;
    logger_.info("first operation: ", text(), ", over ", transport_->name(), " between ", size(),
                 " ranks");
  }

 protected:
  const CommunicatorOptions& options() const { return options_; }

 private:
  size_t place_of(Rank rank) const;

  const CommunicatorOptions options_;
  const Reach reach_;
  const Whereabouts where_;
  const int neighbours_;  // ranks on this host, this one included
  const Logger logger_;
  const std::shared_ptr<Transport> transport_;
  Recorder recorder_;
  const Diagnosis diagnosis_;
  std::atomic<int64_t> timeout_ms_;
  std::atomic<bool> logged_{false};
};

}  // namespace ringcomm
