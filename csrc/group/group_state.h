// The engines of a group share its state: ranks, transport, timeout, lifecycle and error. The state
// lies below every engine, and tells them when the group fails.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>

#include "base/config.h"
#include "base/log.h"
#include "base/mutex.h"
#include "group/engine.h"
#include "plan/rules.h"
#include "report/diagnosis.h"
#include "report/recorder.h"
#include "transport/transport.h"

namespace ringcomm {

struct CommunicatorOptions {
  Rank rank = 0;
  int size = 1;
  std::string name = "default";
  std::vector<int> global_ranks;  // of its ranks; empty: the same
  std::chrono::milliseconds timeout{std::chrono::minutes(30)};
  bool may_be_late = false;  // to the meeting: then it lasts as long as the whole job's group waits
  Rules algorithm;           // else as the table says
  GroupConfig config;        // whose algorithm is the same as text
  // Called now and then by a caller's thread that waits: its exception ends the wait (Ctrl-C).
  std::function<void()> interrupt;
  std::function<void()> interrupt_meeting;  // the same while the ranks meet
  std::string unusable = "' has failed before (destroy it and make a new one): ";
};

class GroupState {
 public:
  // `neighbours`: ranks on this host, this one included.
  GroupState(const CommunicatorOptions& options, std::shared_ptr<Transport> transport,
             const Reach& reach, int neighbours);

  Rank rank() const { return options_.rank; }
  int size() const { return options_.size; }
  const std::string& name() const { return options_.name; }
  const GroupConfig& config() const { return options_.config; }
  const Reach& reach() const { return reach_; }
  int neighbours() const { return neighbours_; }  // ranks on this host, this one included
  bool alone_on_host() const { return neighbours_ == 1 && size() > 1; }
  Transport& transport() const { return *transport_; }
  const Logger& logger() const { return logger_; }
  Recorder& recorder() { return recorder_; }  // of the host's operations
  const Recorder& recorder() const { return recorder_; }
  const Diagnosis& diagnosis() const { return diagnosis_; }  // the same
  Recorded recorded(bool device) const;                      // for the header of its flight records
  Patience patience() const;
  // The algorithm that was asked for, if the ranks' reach allows it.
  std::optional<Algorithm> requested_algorithm(const Shape& shape) const;
  std::optional<Algorithm> requested_kernel(const Shape& shape) const {
    return options_.algorithm.find(shape, true);
  }
  const Rules& rules() const { return options_.algorithm; }
  // Logs the group's first operation, once.
  template <typename Text>
  void log_first_operation(Text&& text) {
    if (logged_.load(std::memory_order_relaxed) || logged_.exchange(true)) return;
    logger_.info("first operation: ", text(), ", over ", transport_->name(), " between ", size(),
                 " ranks");
  }

  void set_timeout(std::chrono::milliseconds timeout) { timeout_ms_.store(timeout.count()); }
  std::chrono::milliseconds timeout() const {
    return std::chrono::milliseconds(timeout_ms_.load());
  }
  // The timeout that a caller asked for, or where that is 0 the group's.
  std::chrono::milliseconds timeout_or(std::chrono::milliseconds asked) const {
    return asked.count() > 0 ? asked : timeout();
  }

  // ---- the lifecycle

  bool failed() const { return (marks_.load() & (kFailed | kForked)) == kFailed; }
  bool left() const { return (marks_.load() & (kLeft | kForked)) == kLeft; }
  bool forked() const { return (marks_.load(std::memory_order_acquire) & kForked) != 0; }
  // Throws where the group takes no calls: it has failed, was destroyed, or a handler calls.
  void check_usable() const {
    if (marks_.load(std::memory_order_acquire) == 0 &&
        in_handler_.load(std::memory_order_relaxed) == std::thread::id()) {
      return;
    }
    refuse();
  }
  // The first failure counts: tells the peers and the engines. Returns `error`.
  std::exception_ptr fail(const std::exception_ptr& error);
  std::exception_ptr fail(const std::string& why);  // this rank's own
  // Fails the group, and ends all that is pending, because a user's exception has ended `during`.
  void give_up(const std::exception& by, const std::string& during);
  // True for the first call.
  bool leave() { return (marks_.fetch_or(kLeft) & (kLeft | kForked)) == 0; }
  void fork();
  // Empty while the group works, else why it failed.
  std::string failure() const;
  std::exception_ptr error() const;
  // The same; a peer's failure that this rank has not yet seen fails the group now.
  std::exception_ptr why_failed();
  // Throws the failure that ends `during`, if there is one.
  void check_failure(const std::string& during) const;
  // The caller's interrupt fails the group if it throws.
  void check_interrupt(const std::string& during);
  // The interrupt alone: the caller handles its exception.
  void call_interrupt() const {
    if (options_.interrupt) options_.interrupt();
  }
  // Throws UsageError in a signal handler that interrupts a call of this group.
  void check_no_handler() const;

  // ---- the engines

  // The last one comes first in loops: streams and messages, then collectives, whose driver sleeps.
  void add(Engine& engine);
  template <typename Visit>
  void each_engine(Visit&& visit) const {
    for (auto place = engines_.rbegin(); place != engines_.rend(); ++place) {
      if (Engine* const it = place->load(std::memory_order_seq_cst)) visit(*it);  // partner: add()
    }
  }
  // Asks all engines, and counts those that say yes.
  template <typename Ask>
  int count_engines(const Engine* except, Ask&& ask) const {
    int count = 0;
    each_engine([&](Engine& engine) { count += &engine != except && ask(engine) ? 1 : 0; });
    return count;
  }
  // The slow path of all engines.
  void check();
  // Call it with no lock held: callbacks may ask for more.
  void end_failed();
  // A worker must look at this group.
  std::function<void()> kick;

 private:
  // What has become of the group. A mark is set once, and stays. A group without any takes calls.
  enum Mark : uint8_t {
    kFailed = 1,  // refuses them with its error; the peers know
    kLeft = 2,    // was destroyed; pending operations may still end
    kForked = 4,  // belongs to the process that forked this one: then no other mark counts
  };
  void refuse() const;

  const CommunicatorOptions options_;
  const Reach reach_;
  const int neighbours_;
  const Logger logger_;
  const std::shared_ptr<Transport> transport_;
  Recorder recorder_;
  const Diagnosis diagnosis_;
  std::atomic<int64_t> timeout_ms_;
  std::atomic<bool> logged_{false};

  std::atomic<uint8_t> marks_{0};
  mutable Mutex mutex_;
  std::exception_ptr error_ RINGCOMM_GUARDED_BY(mutex_);
  std::string failure_ RINGCOMM_GUARDED_BY(mutex_);

  std::atomic<std::thread::id> in_handler_;  // runs a signal handler in the middle of a call
  std::array<std::atomic<Engine*>, 3> engines_{};
};

}  // namespace ringcomm
