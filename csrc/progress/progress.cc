#include "progress/progress.h"

#include "progress/workers.h"

namespace ringcomm {

// A thread in wait(): while there is one, the worker leaves the messages to it, and the queue as
// well where it waits for a task.
class Progress::Waiting {
 public:
  Waiting(Progress& group, bool for_task)
      : group_(group), for_task_(for_task), outer_(std::exchange(innermost(), this)) {
    come();
  }
  ~Waiting() {
    innermost() = outer_;
    go();
  }
  Waiting(const Waiting&) = delete;

  // The wait() that this thread is in and that no call_out() has left.
  static Waiting*& innermost() {
    static thread_local Waiting* it = nullptr;
    return it;
  }
  // Partner: drive(). The worker leaves work to this thread after come() only, so go() sees it,
  // and kicks the worker.
  void come() { count(1); }
  void go() {
    count(-1);
    if (!group_.state_.forked() && group_.needs_worker()) group_.state_.kick();
  }

 private:
  void count(int more) {
    if (for_task_) group_.waiting_for_tasks_.fetch_add(more, std::memory_order_seq_cst);
    group_.waiting_.fetch_add(more, std::memory_order_seq_cst);
  }

  Progress& group_;
  const bool for_task_;
  Waiting* const outer_;
};

void Progress::call_out(const std::function<void()>& code) {
  Waiting* const left = std::exchange(Waiting::innermost(), nullptr);
  const Finally back{[&] {
    if (left != nullptr) left->come();
    Waiting::innermost() = left;
  }};
  left != nullptr ? left->go() : Workers::get().step_down();
  Workers::get().call(code);
}

// ---- loops over the engines

bool Progress::needs_worker(const Engine* except) const {
  const auto needs = [](Engine& engine) { return engine.pending() || engine.watched(); };
  return state_.engines().ask_all(except, needs);
}

bool Progress::progress(Driver& driver, const Engine* except) {
  const bool moved = state_.transport().progress();
  return state_.engines().ask_all(except, [&](Engine& it) { return it.progress(driver); }) || moved;
}

bool Progress::ready(Driver& driver, const Engine* except) const {
  const bool ends = state_.failed() && (host_.pending() || messages_.pending());
  return ends || state_.engines().ask_all(except, [&](Engine& it) { return it.ready(driver); });
}

// ---- threads that wait

// A remote rank from which something has to come next; -1: none, or others may be the first.
Rank Progress::awaited(const Driver& driver) {
  if (!messages_.pending()) return host_.awaited(driver);
  return state_.alone_on_host() ? (state_.rank() + 1) % state_.size() : -1;
}

// A thread that waits for a task drives the queue, or follows: it sleeps until the driver lets go.
// Only the one at the wheel listens to signals, and it keeps the wheel while it sleeps, as long as
// an operation is in progress. A thread that waits for a message listens to messages alone, and
// the worker drives. Before it sleeps, it drives other groups for which no worker has the time.
bool Progress::wait(Request& request, Clock::duration at_most) {
  const auto done = [&] { return request.done.load(std::memory_order_seq_cst); };
  if (done() || state_.forked()) return done();
  state_.check_no_handler();
  const Message* const message = request.as_message();
  const Engine* const except = message != nullptr ? &host_ : nullptr;
  const bool limited = at_most != Clock::duration::max();
  const Deadline limit(message != nullptr && !limited ? message->timeout : at_most);
  const Waiting waiting(*this, message == nullptr);
  NetworkDuty network(state_.transport());
  Driver driver(host_.wheel());
  Patience patience = state_.patience(
      [this, &driver] { return state_.transport().shares_core(host_.awaited(driver)); });
  bool late = false;
  Waiter waiter(patience, [&](Clock::time_point) {
    driver.let_go();
    state_.check();
    check_interrupt(request);
    late = limit.passed();
  });
  // Partners: HostEngine::end_task(), Mailbox::call_back(), fail(), stream_write(), submit().
  const auto awake = [&] { return done() || ready(driver, except); };
  while (!done() && !late) {
    if (waiter.again(progress(driver, except))) continue;
    host_.rest(driver);
    if (Workers::get().help_others(*this)) continue;
    const uint32_t news = message != nullptr ? kMessageNews
                          : driver.drives()  ? kAllNews
                                             : kMessageNews | kLocalNews;
    network.sleep(awaited(driver), news, awake,
                  std::min({waiter.until_check(), poll_interval(), limit.left()}));
    late = limit.passed();
    waiter.woke(state_.failed() || state_.transport().first_failed());
  }
  driver.let_go();
  if (done() || message == nullptr) return done();
  messages_.time_out(*message, limit);
  while (!done()) {  // another thread is about to say so, or to fail the group
    state_.end_failed();
    std::this_thread::yield();
  }
  return true;
}

// The request ends with the wait for it. Handlers may use the group, nobody drives now.
void Progress::check_interrupt(Request& request) {
  try {
    state_.call_interrupt();
  } catch (const std::exception& error) {
    if (Message* const message = request.as_message()) {
      const PeerError why(state_.rank(), interrupted(message->describe(), state_.rank(), error));
      messages_.give_up(*message, std::make_exception_ptr(why));
      throw;
    }
    const auto& task = static_cast<const Task&>(request);
    if (!task.blocking) throw;  // somebody may wait for it again
    state_.fail(interrupted(to_text(task.asked), state_.rank(), error));
    state_.end_failed();
    while (!request.done.load(std::memory_order_seq_cst)) {
      Driver driver(host_.wheel());
      if (!host_.progress(driver)) std::this_thread::yield();
    }
    throw;
  }
}

void Progress::wait_for_streams(const std::string& during, const std::function<bool()>& over) {
  Patience patience = state_.patience();
  Waiter waiter(patience, [&](Clock::time_point) {
    state_.check();
    state_.check_interrupt(during);
  });
  while (!over()) {
    if (waiter.again(false)) continue;
    std::this_thread::sleep_for(Engine::kStreamInterval);
    waiter.check_when_due();
  }
}

// ---- the workers

// A thread that waits for a task drives everything; as left_to_waiters().
bool Progress::idle() const {
  return state_.forked() || waiting_for_tasks_.load(std::memory_order_seq_cst) > 0 ||
         !needs_worker(left_to_waiters());
}

bool Progress::drive() {
  if (idle()) return false;
  Driver driver(host_.wheel());
  return progress(driver, left_to_waiters());
}

bool Progress::help() {
  if (idle() || claimed_.load(std::memory_order_seq_cst)) return false;
  Driver driver(host_.wheel());
  const bool moved = host_.advance(driver);
  const bool over = host_.over(driver);
  driver.let_go();
  if (moved && over) state_.kick();
  return moved;
}

bool Progress::sleep(const std::function<bool()>& awake, Clock::duration most) {
  if (state_.forked()) return false;
  Driver driver(host_.wheel());
  if (host_.pending()) driver.take();
  const Rank from = awaited(driver);
  driver.let_go();
  if (from < 0 || !state_.transport().is_remote(from)) return false;
  NetworkDuty network(state_.transport());
  network.sleep(from, news(), awake, most);
  return true;
}

bool Progress::ready() {
  if (state_.forked()) return false;
  Driver driver(host_.wheel());
  if (host_.pending()) driver.take();
  return ready(driver, left_to_waiters());
}

}  // namespace ringcomm
