#include "comm/communicator.h"

#include <algorithm>
#include <utility>

namespace ringcomm {
namespace {

constexpr auto kSlice = std::chrono::milliseconds(50);      // between looks at peers and deadlines
constexpr auto kUnheard = std::chrono::seconds(1);          // then nobody takes the rest
constexpr auto kStreamNap = std::chrono::microseconds(50);  // streams ring no doorbell
constexpr auto kSettle = std::chrono::seconds(1);           // by then peers have called the same

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
  try {
    wait(*task);
  } catch (const std::exception& by) {  // the memory is the caller's: nobody may use it after this
    const std::string name = to_text(make_descriptor(operation, 0));
    fail(std::make_exception_ptr(interrupted(by, name)));
    while (!task->done) {
      if (drive() != Driven::kMoved) std::this_thread::yield();
    }
    throw;
  }
  if (task->error) std::rethrow_exception(task->error);
}

TaskPtr Communicator::submit(Operation operation, decltype(Request::on_done) on_done, Sequel sequel,
                             const std::atomic<uint32_t>* gate) {
  check_usable();
  validate(operation, size(), rank());
  const auto limit = operation.timeout.count() > 0 ? operation.timeout : timeout();
  auto task = std::make_shared<Task>(std::move(operation), limit);
  task->on_done = std::move(on_done);
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
  auto plan = plans_.get(shape, wished(shape.collective).value_or(select(shape, reach_)));
  current_ = make_descriptor(operation, sequence_ + 1);
  make_stamps(operation, current_, executor_.stamps());
  executor_.output().assign(operation.output);
  if (operation.op == ReduceOp::kPremulSum) {
    scratch_.resize(bytes_of(operation.input));
    std::byte* to = scratch_.data();
    for (const Span& span : operation.input) {
      const uint64_t count = span.bytes / size_of(operation.dtype);
      scale(operation.dtype, operation.factor, to, span.data, count);
      to += span.bytes;
    }
    executor_.input().assign({{scratch_.data(), scratch_.size()}});
  } else {
    executor_.input().assign(operation.input);
  }
  ++sequence_;
  ticket_ = recorder_.begin(current_);
  if (!told_.load(std::memory_order_relaxed)) tell_first(choice_text(shape, *plan));
  transport_->announce(Board::kHost, current_);
  executor_.start(std::move(plan), sequence_, make_reduction(operation, size()));
}

// ---- devices

DeviceGroup& Communicator::device(int index) {
  check_usable();
  const std::lock_guard lock(device_mutex_);
  DeviceGroup* device = device_.load(std::memory_order_relaxed);
  if (device == nullptr) {
    device = new DeviceGroup(*this, device_library(), index);
    device_.store(device, std::memory_order_seq_cst);  // partner: fail(), watch()
    if (failed_.load(std::memory_order_seq_cst)) device->release();
  }
  RINGCOMM_CHECK(device->device() == index, "group '", name(), "' of this rank works on device ",
                 device->device(), ", and this tensor is on device ", index,
                 ": each rank uses one device in a group");
  return *device;
}

bool Communicator::wait(const DeviceGroup::End& end, Clock::duration at_most) {
  const Deadline limit(at_most);
  Patience patience = this->patience();
  Deadline look(kSlice);
  while (!end.reached() && !limit.passed()) {
    if (patience.again()) continue;
    std::this_thread::sleep_for(kStreamNap);
    if (!look.passed()) continue;
    look = Deadline(kSlice);
    watch();
    if (options_.interrupt) check_interrupt("a wait for a device");
  }
  return end.reached();
}

// ---- one operation

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
  if (good) transport_->finish(Board::kHost, sequence_);
}

// The caller's thread does the work and the waiting: no hand-over, no wake-up.
void Communicator::run_here(const Operation& operation) {
  begin(operation);
  Driving driving(*transport_);
  try {
    if (transport_->first_failed()) look_around(nullptr);
    std::optional<Deadline> deadline, look;  // the clock is read only when there is time to
    while (!advance()) {
      patience_.reset();
      while (!executor_.ready()) {
        if (transport_->progress() || patience_.again()) continue;
        if (!deadline) {
          deadline.emplace(operation.timeout.count() > 0 ? operation.timeout : timeout());
          look.emplace(kSlice);
        }
        const bool arrived = driving.sleep(
            executor_.peer(),
            [&] { return executor_.ready() || failed_.load(std::memory_order_seq_cst); },
            std::min<Clock::duration>(kSlice, deadline->left()));
        patience_.reset();  // time asleep was not taken by others
        if (executor_.ready()) continue;
        if (arrived && !look->passed() && !transport_->first_failed()) continue;  // a part of it
        look = Deadline(kSlice);
        look_around(&*deadline);
        if (options_.interrupt) check_interrupt(numbered(current_));
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
  if (DeviceGroup* const late = device_.load(std::memory_order_seq_cst)) late->release();
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
    fail(std::make_exception_ptr(PeerError(*by, retold(*by, transport_->failure(*by)))));
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

void Communicator::settle() {
  DeviceGroup* const device = device_.load(std::memory_order_acquire);
  if (device == nullptr || forked_ || left_) return;
  const Deadline called(kSettle);  // peers may call what we have called a little later
  Deadline look(kSlice);
  while (device->pending() && !failed_ && (device->expected() || !called.passed())) {
    std::this_thread::sleep_for(kStreamNap);
    if (!look.passed()) continue;
    look = Deadline(kSlice);
    watch();
    if (options_.interrupt) check_interrupt("destroy");
  }
}

void Communicator::shutdown(Clock::duration grace) {
  if (forked_ || left_.exchange(true, std::memory_order_seq_cst)) return;
  const Deadline deadline(grace);
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
