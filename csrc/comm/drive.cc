// Who moves the operations of a group on: the queue, and the threads that wait.
#include "comm/communicator.h"

namespace ringcomm {
namespace {

constexpr auto kSlice = std::chrono::milliseconds(50);    // the worker's longest sleep
constexpr auto kGateNap = std::chrono::microseconds(50);  // streams ring no doorbell

}  // namespace

// A thread in wait(): while there is one, the worker leaves the messages to it, and the queue as
// well where it waits for a task.
class Communicator::Waiting {
 public:
  Waiting(Communicator& group, bool for_task)
      : group_(group), for_task_(for_task), outer_(innermost()) {
    innermost() = this;
    come();
  }
  ~Waiting() {
    go();
    innermost() = outer_;
  }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

  // The wait() that this thread is in and that no call_out() has left.
  static Waiting*& innermost() {
    static thread_local Waiting* it = nullptr;
    return it;
  }
  // Partner: drive(). The worker that has left something to this thread did so after come(); so
  // hand_over(), which follows go(), sees what that was, and kicks the worker.
  void come() { count(1); }
  void go() { count(-1); }
  void hand_over() { group_.hand_over(); }

 private:
  void count(int more) {
    if (for_task_) group_.waiting_for_tasks_.fetch_add(more, std::memory_order_seq_cst);
    group_.waiting_.fetch_add(more, std::memory_order_seq_cst);
  }

  Communicator& group_;
  const bool for_task_;
  Waiting* const outer_;
};

void Communicator::call_out(const std::function<void()>& code) {
  struct Left {  // the wait() that this thread is in, until `code` returns or throws
    Waiting* const waiting = std::exchange(Waiting::innermost(), nullptr);
    Left() {
      if (waiting != nullptr) waiting->go();
    }
    ~Left() {
      if (waiting != nullptr) waiting->come();
      Waiting::innermost() = waiting;
    }
    Left(const Left&) = delete;
    Left& operator=(const Left&) = delete;
  };
  const Left left;
  left.waiting != nullptr ? left.waiting->hand_over() : Runtime::get().step_down();
  Runtime::get().call(code);
}

// ---- messages

void Communicator::post(const MessagePtr& message) {
  check_usable();
  RINGCOMM_CHECK(message->peer < size() && message->peer != rank() &&
                     (message->peer >= 0 || !message->sending),
                 message->describe(), ": rank ", rank(), " of ", size(), " has no such peer");
  if (!told_.load(std::memory_order_relaxed)) tell_first(message->describe() + ", a byte stream");
  move_messages([&] {
    mailbox_.post(message);
    return true;
  });
  if (!message->done) Runtime::get().kick(shared_from_this());
}

void Communicator::post_late(const MessagePtr& message) {
  if (failed_.load(std::memory_order_seq_cst)) return message->complete(error());
  move_messages([&] {
    mailbox_.post(message);
    return true;
  });
}

// A message that goes wrong fails the group: its peer waits for the rest of it.
template <typename Move>
bool Communicator::move_messages(Move&& move) {
  bool moved = false;
  try {
    moved = move();
  } catch (const std::exception&) {
    fail(std::current_exception());
  }
  if (const auto error = mailbox_.error()) fail(error);
  fail_messages();
  return moved;
}

// ---- the queue

// Moves the front of the queue on; true when something moved. Completes a task with the driver's
// lock released, so that on_done may ask for more.
bool Communicator::advance_queue(Driver& driver) {
  std::exception_ptr error;
  bool unblocked = true;
  const bool begun = task_ != nullptr;
  try {
    if (!begun && !next_task()) return false;
    if (failed_.load(std::memory_order_seq_cst) || transport_->first_failed()) look_around(nullptr);
    unblocked = executor_.ready();
    if (!advance()) return unblocked;
    end(true);
    if (task_->sequel.next && task_->sequel.next(task_->operation)) {
      begin(task_->operation);
      return true;
    }
  } catch (const UsageError&) {  // begin() refused the task: harms nothing else, unless begun
    error = begun ? fail(std::current_exception()) : std::current_exception();
  } catch (const std::exception&) {
    error = fail(std::current_exception());
  }
  if (error) end(false);
  const TaskPtr task = std::exchange(task_, nullptr);
  if (task->on_end) std::exchange(task->on_end, nullptr)();
  driver.let_go();
  complete(task, error);
  return true;
}

// The next task of the queue, if it may begin.
TaskPtr Communicator::front() {
  const std::lock_guard lock(queue_mutex_);
  if (queue_.empty()) return nullptr;
  const std::atomic<uint32_t>* const gate = queue_.front()->gate;
  const bool open = gate == nullptr || gate->load(std::memory_order_seq_cst) != 0 || failed_;
  return open ? queue_.front() : nullptr;
}

bool Communicator::next_task() {
  const TaskPtr next = front();
  if (!next) return false;
  task_ = next;
  {
    const std::lock_guard lock(queue_mutex_);
    queue_.pop_front();  // who drives is the only one to take from it
  }
  if (failed_.load(std::memory_order_acquire)) check_usable();
  begin(task_->operation);
  return true;
}

void Communicator::complete(const TaskPtr& task, const std::exception_ptr& error) {
  task->operation.input.clear();
  task->operation.output.clear();
  task->sequel = {};
  queued_.fetch_sub(1, std::memory_order_seq_cst);  // on_done may destroy the group
  task->end(error);
  transport_->doorbell().notify(kLocalNews);  // before the user's code, which may take its time
  task->call_back();
  fail_messages();
}

// After waiting: whatever is left is the worker's.
void Communicator::hand_over() {
  if (forked_) return;
  if (busy()) Runtime::get().kick(shared_from_this());
}

// Could this thread move the queue on? It is at the wheel then.
bool Communicator::takes_over(Driver& driver) {
  if (queued_.load(std::memory_order_seq_cst) == 0 || !driver.take()) return false;
  if (task_ || front()) return true;
  driver.let_go();  // the next one's time has not come
  return false;
}

// Who waits for a task drives the queue, or follows: sleeps until whoever drives lets go. Only the
// one at the wheel listens to signals, and he keeps it while he sleeps, for as long as an operation
// is in progress. Who waits for a message listens to messages alone, and the worker drives.
bool Communicator::wait(Request& request, Clock::duration at_most) {
  const auto done = [&] { return request.done.load(std::memory_order_seq_cst); };
  if (done() || forked_) return done();
  check_no_handler();
  Message* const message = request.as_message();
  const bool limited = at_most != Clock::duration::max();
  const Deadline limit(message != nullptr && !limited ? message->timeout : at_most);
  Patience patience = this->patience();
  const HandOver afterwards{*this};
  const Waiting waiting(*this, message == nullptr);
  Driving driving(*transport_);
  Driver driver(wheel_);
  bool late = false;
  Waiter waiter(patience, [&](Clock::time_point) {
    driver.let_go();
    watch();
    if (options_.interrupt) check_interrupt(request);
    late = limit.passed();
  });
  DeviceGroup* const device = device_.load(std::memory_order_acquire);
  // Partners of these loads: complete(), Mailbox::call_back(), fail(), stream_write(), submit().
  const auto awake = [&] {
    if (done() || failed_.load(std::memory_order_seq_cst) || mailbox_.ready()) return true;
    if (message != nullptr) return false;
    return driver.drives() ? executor_.ready() : takes_over(driver);
  };
  while (!done() && !late) {
    bool moved = transport_->progress();
    if (device != nullptr && device->gated()) {
      driver.let_go();
      moved = device->open_gates() || moved;
    }
    if (mailbox_.pending() && mailbox_.ready()) {  // callbacks must find the group free
      driver.let_go();
      moved = move_messages([&] { return mailbox_.progress(); }) || moved;
    }
    if (message == nullptr && driver.take()) moved = advance_queue(driver) || moved;
    if (waiter.again(moved)) continue;
    if (driver.drives() && !task_) driver.let_go();  // for callers on an idle group
    const uint32_t news = message != nullptr ? kMessageNews
                          : driver.drives()  ? kAllNews
                                             : kMessageNews | kLocalNews;
    driving.sleep(awaited(driver), news, awake, std::min({waiter.nap(), nap(), limit.left()}));
    late = limit.passed();
    waiter.woke(failed_.load(std::memory_order_seq_cst) || transport_->first_failed());
  }
  driver.let_go();
  if (done() || message == nullptr) return done();
  give_up(*message, late_error(*message, limit.elapsed()));
  while (!done()) std::this_thread::yield();  // another thread is about to say so
  return true;
}

Communicator::Driven Communicator::drive() {
  if (forked_) return Driven::kIdle;
  // Who waits for a task drives everything. He came before these loads, and looks at all there is
  // before he sleeps; or he has gone since, and hand_over() kicks the worker anew.
  if (waiting_for_tasks_.load(std::memory_order_seq_cst) > 0) return Driven::kIdle;
  transport_->progress();
  DeviceGroup* const device = device_.load(std::memory_order_acquire);
  bool moved = device != nullptr && device->open_gates();
  moved = (has_messages() && move_messages([&] { return mailbox_.progress(); })) || moved;
  if (queued_.load(std::memory_order_seq_cst) > 0) {
    Driver driver(wheel_);
    if (driver.take()) moved = advance_queue(driver) || moved;
  }
  if (moved) return Driven::kMoved;
  const bool more = queued_.load(std::memory_order_seq_cst) > 0 || has_messages();
  return more || (device != nullptr && device->pending()) ? Driven::kBlocked : Driven::kIdle;
}

// Are there messages that nobody but the worker moves?
bool Communicator::has_messages() const {
  return mailbox_.pending() && waiting_.load(std::memory_order_seq_cst) == 0;
}

// What the worker has to hear of: no signals where there are only messages.
uint32_t Communicator::news() const {
  return queued_.load(std::memory_order_seq_cst) > 0 ? kAllNews : kMessageNews | kLocalNews;
}

// A remote rank from which something has to come next; -1: none, or others may be the first.
Rank Communicator::awaited(const Driver& driver) const {
  if (mailbox_.pending()) return neighbours_ == 1 && size() > 1 ? (rank() + 1) % size() : -1;
  return driver.drives() && task_ ? executor_.peer() : -1;
}

// As Driving::sleep, for the worker. False when it has to sleep in another way.
bool Communicator::sleep(const std::function<bool()>& awake, Clock::duration most) {
  if (forked_) return false;
  Driver driver(wheel_);
  if (queued_.load(std::memory_order_seq_cst) > 0) driver.take();
  const Rank from = awaited(driver);
  driver.let_go();
  if (from < 0 || !transport_->is_remote(from)) return false;
  Driving driving(*transport_);
  driving.sleep(from, news(), awake, most);
  return true;
}

bool Communicator::busy() {
  if (queued_.load(std::memory_order_seq_cst) > 0 || mailbox_.pending()) return true;
  DeviceGroup* const device = device_.load(std::memory_order_acquire);
  return device != nullptr && device->pending();
}

Clock::duration Communicator::nap() {
  DeviceGroup* const device = device_.load(std::memory_order_acquire);
  if (device == nullptr) return kSlice;
  const std::lock_guard lock(queue_mutex_);
  const bool gated = !queue_.empty() && queue_.front()->gate != nullptr;
  return gated ? Clock::duration(kGateNap) : device->nap();
}

bool Communicator::ready() {
  if (forked_) return false;
  if (failed_.load(std::memory_order_seq_cst) || (has_messages() && mailbox_.ready())) return true;
  Driver driver(wheel_);
  return takes_over(driver) && (!task_ || executor_.ready());
}

}  // namespace ringcomm
