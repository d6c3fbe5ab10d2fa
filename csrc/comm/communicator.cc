#include "comm/communicator.h"

#include <algorithm>
#include <utility>

namespace ringcomm {
namespace {

constexpr auto kUnheard = std::chrono::seconds(1);  // then nobody takes the rest

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return known.what();
  } catch (...) {
    return "unknown error";
  }
}

// The error as it may be kept: those of others (an interrupt) may hold objects of Python's.
std::exception_ptr lasting(const std::exception_ptr& error, Rank rank) {
  try {
    std::rethrow_exception(error);
  } catch (const std::runtime_error&) {
    return error;
  } catch (...) {
    return std::make_exception_ptr(PeerError(rank, message_of(error)));
  }
}

}  // namespace

Communicator::~Communicator() {
  shutdown();
  if (forked_) return;
  Runtime::get().detach(this);
  delete device_.load();
}

// ---- asking

void Communicator::check_usable() {
  check_no_handler();
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
      Driver driver(wheel_);  // what is queued meanwhile is the worker's, or who waits drives it
      if (driver.take() && queued_.load(std::memory_order_seq_cst) == 0) {
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
  task->blocking = true;
  wait(*task);
  if (task->error) std::rethrow_exception(task->error);
}

TaskPtr Communicator::submit(Operation operation, decltype(Request::on_done) on_done, Sequel sequel,
                             const std::atomic<uint32_t>* gate, std::function<void()> on_end) {
  check_usable();
  validate(operation, size(), rank());
  const auto limit = operation.timeout.count() > 0 ? operation.timeout : timeout();
  auto task = std::make_shared<Task>(std::move(operation), limit);
  task->on_done = std::move(on_done);
  task->on_end = std::move(on_end);
  task->sequel = std::move(sequel);
  task->gate = gate;
  {
    const std::lock_guard lock(queue_mutex_);
    queue_.push_back(task);
    asked_.fetch_add(1 + task->sequel.operations, std::memory_order_relaxed);
    queued_.fetch_add(1, std::memory_order_seq_cst);  // partner: hand_over()
  }
  Runtime::get().kick(shared_from_this());
  return task;
}

// ---- one operation

// What the options or RINGCOMM_ALGORITHM ask for, where the collective has it and the ranks can
// reach one another so.
std::optional<Algorithm> Communicator::wished(Collective collective) const {
  if (!options_.algorithm) return std::nullopt;
  if (*options_.algorithm == Algorithm::kDirect && !reach_.mapped) return std::nullopt;
  if (*options_.algorithm == Algorithm::kHierarchical && reach_.local == 1) return std::nullopt;
  const auto& possible = algorithms_of(collective);
  const auto found = std::find(possible.begin(), possible.end(), *options_.algorithm);
  return found != possible.end() ? options_.algorithm : std::nullopt;
}

// The line at a group's first operation: what runs over what, and why.
void Communicator::tell_first(const std::string& text) {
  if (told_.exchange(true)) return;
  logger_.info("first operation: ", text, ", over ", transport_->name(), " between ", size(),
               " ranks");
}

std::string Communicator::choice_text(const Shape& shape, const Plan& plan) const {
  const bool asked = wished(shape.collective).has_value();
  return str(numbered(current_), ", ", to_string(plan.algorithm), " (",
             asked ? "the algorithm that was asked for" : selection_reason(shape, reach_), ")");
}

// Everything that can be refused is refused before the peers learn of it.
void Communicator::begin(const Operation& operation) {
  validate(operation, size(), rank());
  Shape shape = make_shape(operation, geometry_);
  shape.local = reach_.local;
  shape.costs = costs_;
  const Algorithm algorithm = wished(shape.collective).value_or(select(shape, reach_));
  const Manner manner = tuner_.next(shape, algorithm);
  auto plan = plans_.get(shape, algorithm);
  current_ = make_descriptor(operation, sequence_ + 1);
  set_plan(current_, plan->algorithm, terms_ ^ shape.geometry.segment_bytes);
  make_stamps(operation, current_, executor_.stamps());
  executor_.output().assign(operation.output);
  executor_.input().assign(operation.input);
  const bool scales = operation.op == ReduceOp::kPremulSum && scale_input(operation);
  ++sequence_;
  ticket_ = recorder_.begin(current_);
  if (!told_.load(std::memory_order_relaxed)) tell_first(choice_text(shape, *plan));
  transport_->announce(Board::kHost, current_);
  executor_.start(std::move(plan), sequence_, make_reduction(operation, size()), manner, scales);
}

// PREMUL_SUM multiplies the input first, and nobody's input but what becomes the result. Where
// there is a result of that size it is the place for it; else it happens as the input is read,
// which is true. Only where a small result lies within the input there is a copy.
bool Communicator::scale_input(const Operation& operation) {
  const auto within = [&](const Span& out) {
    return std::any_of(operation.input.begin(), operation.input.end(), [&](const Span& in) {
      return std::less<>()(out.data, in.data + in.bytes) &&
             std::less<>()(in.data, out.data + out.bytes);
    });
  };
  const uint64_t bytes = bytes_of(operation.input);
  std::vector<Span> scaled = operation.output;
  if (bytes_of(operation.output) != bytes) {
    if (std::none_of(operation.output.begin(), operation.output.end(), within)) return true;
    scratch_.resize(bytes);
    scaled = {{scratch_.data(), bytes}};
  }
  const uint64_t element = size_of(operation.dtype);
  const Spans from(operation.input), to(scaled);
  for (uint64_t done = 0; done < bytes;) {
    const Span src = from.at(done), dst = to.at(done);
    const uint64_t piece = std::min({src.bytes, dst.bytes, bytes - done});
    scale(operation.dtype, operation.factor, dst.data, src.data, piece / element);
    done += piece;
  }
  executor_.input().assign(scaled);
  return false;
}

bool Communicator::advance() {
  switch (executor_.advance()) {
    case HostExecutor::Status::kDone:
      return true;
    case HostExecutor::Status::kMismatch:
      inquiry_.throw_mismatch(current_, executor_.peer());
    case HostExecutor::Status::kBlocked:
      break;
  }
  return false;
}

// The operation in progress, if there is one, is over.
void Communicator::end(bool good) {
  if (!ticket_) return;
  transport_->settle();
  recorder_.end(*std::exchange(ticket_, std::nullopt), good);
  if (!scratch_.empty()) std::vector<std::byte>().swap(scratch_);  // "= {}" keeps the memory
  if (!good) return;
  if (executor_.timed()) tuner_.took(executor_.seconds());
  transport_->finish(Board::kHost, sequence_);
}

// The caller's thread does the work and the waiting: no hand-over, no wake-up.
void Communicator::run_here(const Operation& operation) {
  begin(operation);
  Driving driving(*transport_);
  try {
    if (transport_->first_failed()) look_around(nullptr);
    const auto limit = operation.timeout.count() > 0 ? operation.timeout : timeout();
    Waiter waiter(patience_, [&](Clock::time_point began) {
      const Deadline deadline(limit, began);
      look_around(&deadline);
      if (options_.interrupt) check_interrupt(numbered(current_));
    });
    const auto failed = [&] { return failed_.load(std::memory_order_seq_cst); };
    while (!advance()) {
      waiter.reset();
      while (!executor_.ready()) {
        if (waiter.again(transport_->progress())) continue;
        // Partners: signal() of the peer, and fail().
        driving.sleep(
            executor_.peer(), kSignalNews, [&] { return executor_.ready() || failed(); },
            waiter.nap());
        waiter.woke(failed() || transport_->first_failed());
      }
    }
    end(true);
  } catch (const std::exception&) {
    end(false);
    std::rethrow_exception(fail(std::current_exception()));
  }
}

// ---- ending

std::exception_ptr Communicator::fail(const std::exception_ptr& error) {
  {
    const std::lock_guard lock(queue_mutex_);
    if (error_) return error;
    error_ = lasting(error, rank());
    failure_ = message_of(error_);
  }
  DeviceGroup* const device = device_.load(std::memory_order_seq_cst);
  if (device != nullptr) device->note_progress();  // what is over by now is good
  failed_.store(true, std::memory_order_seq_cst);
  transport_->fail(failure_);  // rings this process's bell too
  if (DeviceGroup* const late = device_.load(std::memory_order_seq_cst)) {
    late->release(is_of_peer(error, rank()));
  }
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

std::exception_ptr Communicator::why_failed() {
  const auto by = transport_->first_failed();
  if (!failed_ && by) {
    fail(std::make_exception_ptr(PeerError(*by, inquiry_.told_by(*by))));
  }
  return error();
}

uint64_t Communicator::sequence() const {
  const DeviceGroup* const device = device_.load(std::memory_order_acquire);
  return asked_.load(std::memory_order_relaxed) + (device ? device->sequence() : 0);
}

std::vector<Record> Communicator::records() {
  std::vector<Record> records = recorder_.records();
  if (const DeviceGroup* const device = device_.load(std::memory_order_acquire)) {
    const std::vector<Record> more = device->records();
    records.insert(records.end(), more.begin(), more.end());
    std::stable_sort(records.begin(), records.end(),
                     [](const Record& a, const Record& b) { return a.began < b.began; });
  }
  const std::lock_guard lock(queue_mutex_);
  uint64_t sequence = asked_.load(std::memory_order_relaxed) + 1;
  for (const TaskPtr& task : queue_) sequence -= 1 + task->sequel.operations;
  for (const TaskPtr& task : queue_) {
    Record waiting;
    waiting.descriptor = make_descriptor(task->operation, sequence);
    sequence += 1 + task->sequel.operations;
    waiting.began = waiting.ended = task->deadline.start();
    records.push_back(waiting);
  }
  return records;
}

void Communicator::abort(const std::string& reason) {
  if (forked_ || left_) return;
  fail(std::make_exception_ptr(PeerError(rank(), reason)));
  fail_messages();
  if (queued_.load() > 0) Runtime::get().kick(weak_from_this().lock());
}

void Communicator::shutdown(Clock::duration grace) {
  if (forked_ || left_.exchange(true, std::memory_order_seq_cst)) return;
  const Deadline deadline(grace);
  Waiter waiter([&](Clock::time_point) { watch(); });
  while (busy() && !failed_ && !deadline.passed()) {
    if (waiter.again(drive() == Driven::kMoved)) continue;
    transport_->doorbell().sleep(
        kAllNews, [&] { return !busy() || ready(); }, std::min(waiter.nap(), deadline.left()));
    waiter.woke(failed_);
  }
  if (busy()) {
    fail(
        std::make_exception_ptr(PeerError(rank(), str("group '", name(), "' was destroyed by rank ",
                                                      rank(), " while operations were pending"))));
    fail_messages();
    Driver driver(wheel_);
    while (driver.take() && advance_queue(driver)) {
    }
  }
  if (DeviceGroup* const device = device_.load(std::memory_order_acquire)) {
    device->close(deadline.left());
  }
  transport_->leave();
  drain();
}

// Remote ranks get what is on its way, if they are there to take it: as long as there is progress.
void Communicator::drain() {
  if (forked_) return;
  const Deadline at_last(Runtime::get().config().resume);  // however slow the network is
  Deadline soon(kUnheard);
  uint64_t left = transport_->undelivered();
  while (left > 0 && !soon.passed() && !at_last.passed()) {
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    transport_->progress();
    const uint64_t before = std::exchange(left, transport_->undelivered());
    if (left < before) soon = Deadline(kUnheard);
  }
}

void Communicator::forked() {
  forked_.store(true);
  transport_->forget();
  if (DeviceGroup* const device = device_.load()) device->forked();
  for (Mapping& mapping : memory_.mappings) mapping.forget();
}

}  // namespace ringcomm
