// Who moves the operations of a group on: the queue, and the threads that wait.
#include "comm/communicator.h"

namespace ringcomm {
namespace {

constexpr auto kSlice = std::chrono::milliseconds(50);    // between looks at peers and deadlines
constexpr auto kGateNap = std::chrono::microseconds(50);  // streams ring no doorbell

}  // namespace

// A thread in wait(): while there is one, the worker leaves the group to it.
class Communicator::Waiting {
 public:
  explicit Waiting(Communicator& group) : group_(group), outer_(innermost()) {
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
  void come() { group_.waiting_.fetch_add(1, std::memory_order_seq_cst); }
  void go() { group_.waiting_.fetch_sub(1, std::memory_order_seq_cst); }
  void hand_over() { group_.hand_over(); }

 private:
  Communicator& group_;
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
  code();
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
  driver.unlock();
  complete(task, error);
  return true;
}

// Begins the next task of the queue; false when there is none.
bool Communicator::next_task() {
  {
    const std::lock_guard lock(queue_mutex_);
    if (queue_.empty()) return false;
    const std::atomic<uint32_t>* const gate = queue_.front()->gate;
    if (gate != nullptr && gate->load(std::memory_order_seq_cst) == 0 && !failed_) return false;
    task_ = queue_.front();
    queue_.pop_front();
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
  task->complete(error);
  fail_messages();
  transport_->doorbell().notify();
}

// After driving: whatever is left is the worker's.
void Communicator::hand_over() {
  if (forked_) return;
  if (busy()) Runtime::get().kick(shared_from_this());
}

bool Communicator::wait(Request& request, Clock::duration at_most) {
  const auto done = [&] { return request.done.load(std::memory_order_seq_cst); };
  if (done() || forked_) return done();
  check_no_handler();
  const Deadline limit(at_most);
  const bool limited = at_most != Clock::duration::max();
  Patience patience = this->patience();
  const HandOver afterwards{*this};
  const Waiting waiting(*this);
  Driving driving(*transport_);
  Driver driver(drive_, std::defer_lock);
  Deadline look(kSlice);
  DeviceGroup* const device = device_.load(std::memory_order_acquire);
  while (!done()) {
    if (limited && limit.passed()) break;
    bool moved = transport_->progress();
    if (device != nullptr) {
      if (driver) driver.unlock();
      moved = device->open_gates() || moved;
    }
    if (mailbox_.pending()) {  // callbacks must find the group free
      if (driver) driver.unlock();
      moved = move_messages([&] { return mailbox_.progress(); }) || moved;
    }
    if (driver || driver.try_lock()) moved = advance_queue(driver) || moved;
    if (moved) patience.reset();
    if (moved || patience.again()) continue;
    const auto awake = [&] {
      return done() || failed_.load(std::memory_order_seq_cst) || mailbox_.ready() ||
             ((driver || driver.try_lock()) && task_ && executor_.ready());
    };
    const bool arrived =
        driving.sleep(awaited(driver), awake, std::min<Clock::duration>(nap(), limit.left()));
    patience.reset();
    if (driver) driver.unlock();
    if (arrived && !look.passed() && !transport_->first_failed()) continue;
    look = Deadline(kSlice);
    watch();
    if (options_.interrupt) options_.interrupt();
  }
  return done();
}

Communicator::Driven Communicator::drive() {
  if (forked_ || waiting_.load(std::memory_order_seq_cst) > 0) return Driven::kIdle;
  transport_->progress();
  DeviceGroup* const device = device_.load(std::memory_order_acquire);
  bool moved = device != nullptr && device->open_gates();
  moved = (mailbox_.pending() && move_messages([&] { return mailbox_.progress(); })) || moved;
  if (queued_.load(std::memory_order_seq_cst) > 0) {
    Driver driver(drive_, std::try_to_lock);
    if (driver) moved = advance_queue(driver) || moved;
  }
  // Who began to wait while this thread had the driver's lock looks again now.
  if (waiting_.load(std::memory_order_seq_cst) > 0) transport_->doorbell().notify();
  if (moved) return Driven::kMoved;
  return busy() ? Driven::kBlocked : Driven::kIdle;
}

// A remote rank from which something has to come next; -1: none, or others may be the first.
Rank Communicator::awaited(const Driver& driver) const {
  if (mailbox_.pending()) return neighbours_ == 1 && size() > 1 ? (rank() + 1) % size() : -1;
  return driver && task_ ? executor_.peer() : -1;
}

// As Driving::sleep, for the worker. False when it has to sleep in another way.
bool Communicator::sleep(const std::function<bool()>& awake, Clock::duration most) {
  Driver driver(drive_, std::try_to_lock);
  const Rank from = driver && !forked_ ? awaited(driver) : -1;
  if (driver) driver.unlock();
  if (from < 0 || !transport_->is_remote(from)) return false;
  Driving driving(*transport_);
  driving.sleep(from, awake, most);
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
  if (failed_.load(std::memory_order_seq_cst) || mailbox_.ready()) return true;
  const Driver driver(drive_, std::try_to_lock);
  return driver && task_ && executor_.ready();
}

}  // namespace ringcomm
