#include "comm/communicator.h"

#include <algorithm>
#include <utility>

namespace ringcomm {
namespace {

constexpr auto kSlice = std::chrono::milliseconds(50);  // between looks at peers and deadlines

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return known.what();
  } catch (...) {
    return "unknown error";
  }
}

}  // namespace

Communicator::~Communicator() {
  shutdown();
  if (!forked_) Runtime::get().detach(this);
}

// ---- asking

void Communicator::check_usable() {
  if (!failed_.load(std::memory_order_acquire) && !left_.load(std::memory_order_acquire) &&
      !forked_.load(std::memory_order_acquire)) {
    return;
  }
  if (forked_) {
    throw PeerError(rank(), str("group '", name(),
                                "' belongs to the process that forked this one: "
                                "make a group of its own in the child"));
  }
  if (const std::string why = failure(); !why.empty()) {
    throw PeerError(rank(), str("group '", name(),
                                "' has failed before (destroy it and make a new "
                                "one): ",
                                why));
  }
  throw PeerError(rank(), str("group '", name(), "' was destroyed: make a new one"));
}

void Communicator::run(const Operation& operation) {
  check_usable();
  if (queued_.load(std::memory_order_acquire) == 0) {
    std::exception_ptr error;
    {
      const HandOver afterwards{*this};
      const Driver driver(drive_, std::try_to_lock);
      if (driver && queued_.load(std::memory_order_acquire) == 0) {
        asked_.fetch_add(1, std::memory_order_relaxed);
        try {
          return run_here(operation);
        } catch (const std::exception&) {
          error = std::current_exception();
        }
      }
    }
    if (error) {
      fail_messages();
      std::rethrow_exception(error);
    }
  }
  const TaskPtr task = submit(operation);
  wait(*task);
  if (task->error) std::rethrow_exception(task->error);
}

TaskPtr Communicator::submit(Operation operation, decltype(Request::on_done) on_done) {
  check_usable();
  validate(operation, size(), rank());
  const auto limit = operation.timeout.count() > 0 ? operation.timeout : timeout();
  auto task = std::make_shared<Task>(std::move(operation), limit);
  task->on_done = std::move(on_done);
  {
    const std::lock_guard lock(queue_mutex_);
    queue_.push_back(task);
    asked_.fetch_add(1, std::memory_order_relaxed);
    queued_.fetch_add(1, std::memory_order_seq_cst);  // partner: hand_over()
  }
  Runtime::get().kick(shared_from_this());
  return task;
}

void Communicator::post(const MessagePtr& message) {
  check_usable();
  RINGCOMM_CHECK(message->peer < size() && message->peer != rank() &&
                     (message->peer >= 0 || !message->sending),
                 message->describe(), ": rank ", rank(), " of ", size(), " has no such peer");
  move_messages([&] {
    mailbox_.post(message);
    return true;
  });
  if (!message->done) Runtime::get().kick(shared_from_this());
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

// ---- one operation

std::shared_ptr<const Plan> Communicator::plan_for(const Operation& operation) {
  const Shape shape = make_shape(operation, geometry_);
  Algorithm algorithm = select(shape, Reach{true});
  if (options_.algorithm) {
    const auto& possible = algorithms_of(shape.collective);
    const auto wished = std::find(possible.begin(), possible.end(), *options_.algorithm);
    if (wished != possible.end()) algorithm = *wished;
  }
  return plans_.get(shape, algorithm);
}

// Everything that can be refused is refused before the peers learn of it.
void Communicator::begin(const Operation& operation) {
  validate(operation, size(), rank());
  auto plan = plan_for(operation);
  current_ = make_descriptor(operation, sequence_ + 1);
  make_stamps(operation, current_, executor_.stamps());
  executor_.output().assign(operation.output);
  if (operation.op == ReduceOp::kPremulSum) {
    uint64_t bytes = 0;
    for (const Span& span : operation.input) bytes += span.bytes;
    scratch_.resize(bytes);
    std::byte* to = scratch_.data();
    for (const Span& span : operation.input) {
      const uint64_t count = span.bytes / size_of(operation.dtype);
      scale(operation.dtype, operation.factor, to, span.data, count);
      to += span.bytes;
    }
    executor_.input().assign({{scratch_.data(), bytes}});
  } else {
    executor_.input().assign(operation.input);
  }
  ++sequence_;
  transport_->announce(current_);
  executor_.start(std::move(plan), sequence_, make_reduction(operation, size()));
}

bool Communicator::advance() {
  switch (executor_.advance()) {
    case HostExecutor::Status::kDone:
      return true;
    case HostExecutor::Status::kMismatch:
      throw_mismatch(executor_.peer());
    case HostExecutor::Status::kBlocked:
      break;
  }
  return false;
}

void Communicator::end() { transport_->finish(sequence_); }

// The caller's thread does the work and the waiting: no hand-over, no wake-up.
void Communicator::run_here(const Operation& operation) {
  begin(operation);
  try {
    if (transport_->first_failed()) look_around(nullptr);
    std::optional<Deadline> deadline;  // the clock is read only when there is time to
    while (!advance()) {
      patience_.reset();
      while (!executor_.ready()) {
        if (patience_.again()) continue;
        if (!deadline) {
          deadline.emplace(operation.timeout.count() > 0 ? operation.timeout : timeout());
        }
        transport_->doorbell().sleep(
            [&] { return executor_.ready() || failed_.load(std::memory_order_seq_cst); },
            std::min<Clock::duration>(kSlice, deadline->left()));
        patience_.reset();  // time asleep was not taken by others
        if (!executor_.ready()) look_around(&*deadline);
      }
    }
    end();
  } catch (const std::exception&) {
    std::rethrow_exception(fail(std::current_exception()));
  }
}

// ---- the queue

// Moves the front of the queue on; true when something moved. Completes a task with the driver's
// lock released, so that on_done may ask for more.
bool Communicator::advance_queue(Driver& driver) {
  std::exception_ptr error;
  bool unblocked = true;
  try {
    if (!task_ && !next_task()) return false;
    if (failed_.load(std::memory_order_seq_cst) || transport_->first_failed()) look_around(nullptr);
    unblocked = executor_.peer() < 0 || executor_.ready();
    if (!advance()) return unblocked;
    end();
  } catch (const UsageError&) {  // harms only this task: begin() refused it
    error = std::current_exception();
  } catch (const std::exception&) {
    error = fail(std::current_exception());
  }
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
  queued_.fetch_sub(1, std::memory_order_seq_cst);  // on_done may destroy the group
  task->complete(error);
  fail_messages();
  transport_->doorbell().notify();
}

// After driving: whatever is left is the worker's.
void Communicator::hand_over() {
  if (forked_) return;
  if (queued_.load(std::memory_order_seq_cst) > 0 || mailbox_.pending()) {
    Runtime::get().kick(shared_from_this());
  }
}

bool Communicator::wait(Request& request, Clock::duration at_most) {
  const auto done = [&] { return request.done.load(std::memory_order_seq_cst); };
  if (done() || forked_) return done();
  const Deadline limit(at_most);
  const bool limited = at_most != Clock::duration::max();
  Patience patience = this->patience();
  const HandOver afterwards{*this};
  const Waiting waiting(waiting_);
  Driver driver(drive_, std::defer_lock);
  while (!done()) {
    if (limited && limit.passed()) break;
    bool moved = false;
    if (mailbox_.pending()) {  // callbacks must find the group free
      if (driver) driver.unlock();
      moved = move_messages([&] { return mailbox_.progress(); });
    }
    if (driver || driver.try_lock()) moved = advance_queue(driver) || moved;
    if (moved) patience.reset();
    if (moved || patience.again()) continue;
    const auto awake = [&] {
      return done() || failed_.load(std::memory_order_seq_cst) || mailbox_.ready() ||
             ((driver || driver.try_lock()) && task_ && executor_.ready());
    };
    transport_->doorbell().sleep(awake, std::min<Clock::duration>(kSlice, limit.left()));
    patience.reset();
    if (driver) driver.unlock();
    watch();
  }
  return done();
}

Communicator::Driven Communicator::drive() {
  if (forked_ || waiting_.load(std::memory_order_seq_cst) > 0) return Driven::kIdle;
  bool moved = mailbox_.pending() && move_messages([&] { return mailbox_.progress(); });
  if (queued_.load(std::memory_order_seq_cst) > 0) {
    Driver driver(drive_, std::try_to_lock);
    if (driver) moved = advance_queue(driver) || moved;
  }
  // Who began to wait while this thread had the driver's lock looks again now.
  if (waiting_.load(std::memory_order_seq_cst) > 0) transport_->doorbell().notify();
  if (moved) return Driven::kMoved;
  const bool pending = queued_.load(std::memory_order_seq_cst) > 0 || mailbox_.pending();
  return pending ? Driven::kBlocked : Driven::kIdle;
}

bool Communicator::ready() {
  if (forked_) return false;
  if (failed_.load(std::memory_order_seq_cst) || mailbox_.ready()) return true;
  const Driver driver(drive_, std::try_to_lock);
  return driver && task_ && executor_.ready();
}

// ---- ending

std::exception_ptr Communicator::fail(const std::exception_ptr& error) {
  {
    const std::lock_guard lock(queue_mutex_);
    if (error_) return error;
    error_ = error;
    failure_ = message_of(error);
  }
  failed_.store(true, std::memory_order_seq_cst);
  transport_->fail(failure_);  // rings this process's bell too
  return error;
}

// With no lock held: callbacks may ask for more.
void Communicator::fail_messages() {
  if (failed_.load(std::memory_order_seq_cst) && mailbox_.pending()) mailbox_.fail_all(error());
}

std::string Communicator::failure() {
  const std::lock_guard lock(queue_mutex_);
  return failure_;
}

std::exception_ptr Communicator::error() {
  const std::lock_guard lock(queue_mutex_);
  return error_;
}

void Communicator::abort(const std::string& reason) {
  if (forked_ || left_) return;
  fail(std::make_exception_ptr(
      PeerError(rank(), str("group '", name(), "' was aborted by rank ", rank(), ": ", reason))));
  fail_messages();
  if (queued_.load() > 0) Runtime::get().kick(weak_from_this().lock());
}

void Communicator::shutdown(Clock::duration grace) {
  if (forked_ || left_.exchange(true, std::memory_order_seq_cst)) return;
  const Deadline deadline(grace);
  const auto busy = [&] { return queued_.load() > 0 || mailbox_.pending(); };
  while (busy() && !failed_ && !deadline.passed()) {
    if (drive() == Driven::kMoved) continue;
    transport_->doorbell().sleep([&] { return !busy() || ready(); },
                                 std::min<Clock::duration>(kSlice, deadline.left()));
    watch();
  }
  if (busy()) {
    fail(
        std::make_exception_ptr(PeerError(rank(), str("group '", name(), "' was destroyed by rank ",
                                                      rank(), " while operations were pending"))));
    fail_messages();
    Driver driver(drive_, std::defer_lock);
    while (driver.try_lock() && advance_queue(driver)) {
      if (driver) driver.unlock();
    }
  }
  transport_->leave();
}

void Communicator::forked() {
  forked_.store(true);
  transport_->forget();
  for (Mapping& mapping : memory_.mappings) mapping.forget();
}

}  // namespace ringcomm
