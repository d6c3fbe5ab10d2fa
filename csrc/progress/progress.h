// Who moves a group on: the threads that wait for something, else the worker of the process. All of
// them loop over the group's engines.
#pragma once

#include "group/group_state.h"
#include "host/host_engine.h"
#include "message/message_engine.h"

namespace ringcomm {

class Progress {
 public:
  Progress(GroupState& state, HostEngine& host, MessageEngine& messages)
      : state_(state), host_(host), messages_(messages) {}

  GroupState& state() { return state_; }
  HostEngine& host() { return host_; }
  MessageEngine& messages() { return messages_; }

  // As Communicator::wait().
  bool wait(Request& request, Clock::duration at_most = Clock::duration::max());
  // Waits, with the checks of a wait, for streams that make it `over`. Throws the failure or the
  // exception of the interrupt that ends `during`.
  void wait_for_streams(const std::string& during, const std::function<bool()>& over);
  // Runs code of the caller's from on_done: it may block for an operation that this very thread
  // would drive, so others drive meanwhile.
  static void call_out(const std::function<void()>& code);

  bool pending(const Engine* except = nullptr) const {
    return state_.engines().count(except, [](Engine& engine) { return engine.pending(); }) > 0;
  }
  // Has it pending work, or is a thread in a blocking collective?
  bool busy() const { return pending() || !Driver(host_.wheel()).take(); }
  // Is there anything that a worker must look at?
  bool needs_worker(const Engine* except = nullptr) const;

  // For the workers. One at a time looks at a group, and calls back, so callbacks keep their order.
  // Partner of each: the other one.
  bool claim() { return !claimed_.exchange(true, std::memory_order_seq_cst); }
  void unclaim() { claimed_.store(false, std::memory_order_seq_cst); }
  // True when something moved.
  bool drive();
  // For a thread that waits for another group: moves collectives, and leaves callbacks to workers.
  bool help();
  // Nothing is to be done here, or another thread drives and will kick() the workers.
  bool idle() const;
  bool ready();
  // As Driving::sleep. False when the worker has to sleep in another way.
  bool sleep(const std::function<bool()>& awake, Clock::duration most);
  // The news that wake the worker: no signals where there are only messages.
  uint32_t news() { return host_.pending() ? kAllNews : kMessageNews | kLocalNews; }
  // The longest that the worker may sleep before it drives this group again.
  Clock::duration poll_interval() const {
    Clock::duration least = Clock::duration::max();
    state_.engines().each([&](Engine& engine) { least = std::min(least, engine.poll_interval()); });
    return least;
  }

 private:
  class Waiting;
  bool progress(Driver& driver, const Engine* except);
  bool ready(Driver& driver, const Engine* except) const;
  // Messages are moved by the threads that wait, if there are any. Such a thread came before this
  // load, and looks at all there is before it sleeps; or it has gone since, and Waiting::go() kicks
  // the worker anew.
  const Engine* left_to_waiters() const {
    return waiting_.load(std::memory_order_seq_cst) > 0 ? &messages_ : nullptr;
  }
  Rank awaited(const Driver& driver);
  void check_interrupt(Request& request);

  GroupState& state_;
  HostEngine& host_;
  MessageEngine& messages_;
  std::atomic<bool> claimed_{false};
  std::atomic<int> waiting_{0}, waiting_for_tasks_{0};  // threads in wait(); partner: drive()
};

}  // namespace ringcomm
