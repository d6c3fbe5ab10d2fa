#include "host/host_engine.h"

namespace ringcomm {

HostEngine::HostEngine(GroupState& state, const Geometry& geometry)
    : state_(state),
      wheel_(state.transport().doorbell()),
      operation_(state, geometry),
      patience_(
          state.patience([this] { return state_.transport().shares_core(operation_.peer()); })) {}

// ---- on the caller's thread

bool HostEngine::run(const Operation& operation) {
  if (queued_.load(std::memory_order_acquire) != 0) return false;
  try {
    Driver driver(wheel_);  // the worker, or a thread that waits, drives a task queued meanwhile
    if (!driver.take() || queued_.load(std::memory_order_seq_cst) != 0) return false;
    run_to_end(operation);
    return true;
  } catch (const std::exception&) {
    state_.end_failed();
    throw;
  }
}

void HostEngine::run_to_end(const Operation& operation) {
  Transport& transport = state_.transport();
  NetworkDuty network(transport);
  bool begun = false;
  try {
    operation_.begin(operation);
    begun = true;
    asked_.fetch_add(1, std::memory_order_relaxed);
    if (transport.first_failed()) operation_.check(nullptr);
    const auto limit = state_.timeout_or(operation.timeout);
    Waiter waiter(patience_, [&](Clock::time_point began) {
      const Deadline deadline(limit, began);
      operation_.check(&deadline);
      state_.check_interrupt(operation_.text());
    });
    while (!operation_.advance()) {
      waiter.reset();
      while (!operation_.ready()) {
        if (waiter.again(transport.progress())) continue;
        operation_.idle();
        // Partners: signal() of the peer, and GroupState::fail().
        network.sleep(
            operation_.peer(), kSignalNews, [&] { return operation_.ready() || state_.failed(); },
            waiter.until_check());
        waiter.woke(state_.failed() || transport.first_failed());
      }
    }
    operation_.end_piece();
    operation_.end(true);
  } catch (const std::exception& error) {
    // begin() refused the operation: nothing has happened
    if (!begun && dynamic_cast<const UsageError*>(&error) != nullptr) throw;
    operation_.end(false);
    std::rethrow_exception(state_.fail(std::current_exception()));
  }
}

// ---- the queue

TaskPtr HostEngine::submit(Operation operation, decltype(Request::on_done) on_done,
                           Continuation continuation, PieceSource pieces) {
  state_.check_usable();
  validate(operation, state_.size(), state_.rank());
  const auto limit = state_.timeout_or(operation.timeout);
  auto task = std::make_shared<Task>(std::move(operation), limit);
  task->on_done = std::move(on_done);
  task->continuation = std::move(continuation);
  task->pieces = std::move(pieces);
  {
    const Lock lock(queue_mutex_);
    queue_.push_back(task);
    Descriptor asked = task->asked;
    const uint64_t operations = task->continuation ? 2 : 1;
    asked.sequence = 1 + asked_.fetch_add(operations, std::memory_order_relaxed);
    task->ticket = state_.recorder().call(asked, task->operation.line);
    queued_.fetch_add(1, std::memory_order_seq_cst);
  }
  state_.kick();
  return task;
}

// The next task of the queue, if it may begin.
TaskPtr HostEngine::front() const {
  const Lock lock(queue_mutex_);
  if (queue_.empty()) return nullptr;
  const Task& next = *queue_.front();
  const std::atomic<uint32_t>* const gate = next.pieces.gate;
  const bool open = gate == nullptr || gate->load(std::memory_order_seq_cst) > next.piece;
  return open || state_.failed() ? queue_.front() : nullptr;
}

bool HostEngine::next_task() {
  const TaskPtr next = front();
  if (!next) return false;
  task_ = next;
  {
    const Lock lock(queue_mutex_);
    queue_.pop_front();  // only the driver takes from it
  }
  if (state_.failed()) state_.check_usable();
  operation_.begin(task_->operation, task_->ticket);
  return true;
}

// After a piece that is not the last: the task waits for the next one's gate, before all others.
bool HostEngine::next_piece() {
  if (!task_->pieces.next || !task_->pieces.next(task_->operation)) return false;
  ++task_->piece;
  const Lock lock(queue_mutex_);
  queue_.push_front(std::exchange(task_, nullptr));
  return true;
}

// Moves the front of the queue on.
bool HostEngine::progress(Driver& driver) {
  const bool moved = advance(driver);
  if (!over(driver)) return moved;
  end_task(driver, *std::exchange(over_, std::nullopt));
  return true;
}

bool HostEngine::advance(Driver& driver) {
  if (!pending() || !driver.take() || over_) return false;
  std::exception_ptr error;
  bool unblocked = true;
  const bool begun = task_ != nullptr;
  try {
    if (!begun && !next_task()) return false;
    if (state_.failed() || state_.transport().first_failed()) operation_.check(nullptr);
    unblocked = operation_.ready();
    if (!operation_.advance()) return unblocked;
    operation_.end_piece();
    if (next_piece()) return true;
    operation_.end(true);
    if (task_->continuation && task_->continuation(task_->operation)) {
      operation_.begin(task_->operation);
      return true;
    }
  } catch (const UsageError&) {  // begin() refused the task: harms nothing else, unless begun
    error = begun ? state_.fail(std::current_exception()) : std::current_exception();
  } catch (const std::exception&) {
    error = state_.fail(std::current_exception());
  }
  over_ = error;
  return true;
}

// The driver lets go before on_done is called, which may ask for more, or destroy the group.
void HostEngine::end_task(Driver& driver, const std::exception_ptr& error) {
  const TaskPtr task = std::exchange(task_, nullptr);
  if (error) {
    operation_.end(false);
    state_.recorder().end(task->ticket, false);
  }
  driver.let_go();
  task->operation.input.clear();
  task->operation.output.clear();
  task->continuation = nullptr;
  task->pieces = {};
  queued_.fetch_sub(1, std::memory_order_seq_cst);
  task->end(error);
  state_.transport().doorbell().notify(kLocalNews);  // before callbacks, which may take their time
  task->call_back();
  state_.end_failed();
}

// A thread that could move the queue on is at the wheel then. Else it would hear of no signals.
bool HostEngine::ready(Driver& driver) {
  if (driver.drives()) return task_ ? over_ || operation_.ready() : front() != nullptr;
  if (!pending() || !driver.take()) return false;
  if (task_ || front()) return true;
  driver.let_go();  // the next one's time has not come
  return false;
}

void HostEngine::check() {
  Driver driver(wheel_);
  if (!pending() || !driver.take() || !task_ || over_ || operation_.ready()) return;
  try {
    operation_.check(&task_->deadline);
  } catch (const std::exception&) {
    end_task(driver, state_.fail(std::current_exception()));
  }
}

Clock::duration HostEngine::poll_interval() {
  const Lock lock(queue_mutex_);
  const bool gated = !queue_.empty() && queue_.front()->pieces.gate != nullptr;
  return gated ? Clock::duration(kStreamInterval) : Engine::poll_interval();
}

}  // namespace ringcomm
