// Moves a group on: the threads that wait for something do, or else the workers of the process. All
// of them loop over the group's engines.
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

  // Waits until `request` is done or `at_most` has passed. Returns true when done. Throws no error
  // of the request, only the exception of `interrupt`; then messages and blocking tasks are done,
  // too. Only this wait gives a message a deadline: `at_most`, or else the message's timeout. When
  // it has passed, the message ends with an error. If a part of it has moved, the group fails, too.
  bool wait(Request& request, Clock::duration at_most = Clock::duration::max());
  // Waits, with the checks of a wait, for streams that make it `over`. Throws the failure or the
  // exception of the interrupt that ends `during`.
  void wait_for_streams(const std::string& during, const std::function<bool()>& over);
  // Runs code of the caller's from on_done: it may block for an operation that this very thread
  // would drive, so others drive meanwhile.
  static void call_out(const std::function<void()>& code);

  bool pending(const Engine* except = nullptr) const {
    return state_.engines().ask_all(except, [](Engine& engine) { return engine.pending(); });
  }
  // Tells whether it has pending work, or a thread is in a blocking collective.
  bool busy() const { return pending() || !Driver(host_.wheel()).take(); }
  // Tells whether there is anything that a worker must look at.
  bool needs_worker(const Engine* except = nullptr) const;

  // Takes the group for a worker, and gives it back. One worker at a time looks at a group, and
  // calls back, so callbacks keep their order. Partner of both: the other one.
  bool claim() { return !claimed_.exchange(true, std::memory_order_seq_cst); }
  void unclaim() { claimed_.store(false, std::memory_order_seq_cst); }
  // Moves what can be moved. Returns true when something did.
  bool drive();
  // Moves collectives for a thread that waits for another group, and leaves callbacks to workers.
  bool help();
  // Tells whether there is nothing to do, or another thread drives and will kick() the workers.
  bool idle() const;
  bool ready();
  // Sleeps as NetworkDuty::sleep() does. Returns false when the worker has to sleep in another way.
  bool sleep(const std::function<bool()>& awake, Clock::duration most);
  // Returns the news that wake the worker: no signals where there are only messages.
  uint32_t news() { return host_.pending() ? kAllNews : kMessageNews | kLocalNews; }
  // Returns how long the worker may sleep before it drives this group again.
  Clock::duration poll_interval() const {
    Clock::duration least = Clock::duration::max();
    state_.engines().for_each(
        [&](Engine& engine) { least = std::min(least, engine.poll_interval()); });
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
