#include "host/host_operation.h"

#include "group/process.h"
#include "plan/registry.h"

namespace ringcomm {
namespace {

constexpr double kLate = 10;  // seconds, then a warning names the ranks that are awaited

// Has the window room for the segments that the tuner may choose?
bool has_room(const Geometry& geometry, const Reach& reach) {
  static_assert(Tuner::kWords <= kChoices);
  return reach.mapped && geometry.room_bytes >= 4 * Tuner::kLargest;
}

}  // namespace

HostOperation::HostOperation(GroupState& state, const Geometry& geometry)
    : state_(state),
      geometry_(geometry),
      terms_(hash_of_terms(geometry, state.reach())),
      executor_(state.transport(),
                {&PerProcess<ThreadPool>::get(), state.threads_of(state.rank())}),
      tuner_(state.rank(),
             has_room(geometry, state.reach()) ? state.transport().choices(0) : nullptr,
             state.reach().mapped ? state.threads_of(0).all : 1),
      plans_(state.rank()),
      places_(state.transport()) {}

Shape HostOperation::shape_of(const Operation& operation) const {
  validate(operation, state_.size(), state_.rank());
  Shape shape = make_shape(operation, geometry_);
  static_cast<Levels&>(shape) = static_cast<const Levels&>(state_.reach());
  return shape;
}

Algorithm HostOperation::algorithm_of(const Shape& shape) const {
  const auto asked = state_.requested_algorithm(shape);
  // A registered one plans for all ranks, and so needs a call that looks the same to all.
  if (asked && (!is_registered(*asked) || same_on_all_ranks(shape))) return *asked;
  return select(shape, state_.reach().mapped);
}

void HostOperation::begin(const Operation& operation, std::optional<uint64_t> ticket) {
  Shape shape = shape_of(operation);
  const Algorithm algorithm = algorithm_of(shape);
  const bool asks = TensorPlaces::are_asked(operation, shape, algorithm, state_.reach().mapped);
  const Manner manner = asks ? Manner() : tuner_.next(shape, algorithm);
  auto plan = asks ? plans_.get(TensorPlaces::shape_of_telling(shape), Algorithm::kDirect)
                   : plans_.get(shape, algorithm);
  const bool continues = ticket_.has_value();
  Descriptor descriptor = make_descriptor(operation, continues ? sequence_ : sequence_ + 1);
  set_plan(descriptor, plan->algorithm, terms_ ^ shape.geometry.segment_bytes ^ plan->code);
  make_stamps(operation, descriptor, executor_.stamps());
  const Reduction reduction = make_reduction(operation, state_.size());
  asked_.reset();
  reads_ = false;
  if (asks) {
    places_.note(operation);
    executor_.input().assign({places_.mine()});
    executor_.output().assign({places_.all()});
    asked_ = {shape, algorithm, reduction, operation.input, operation.output};
  } else {
    executor_.input().assign(operation.input);
    executor_.output().assign(operation.output);
  }
  if (!continues) announce(operation, descriptor, ticket, shape, algorithm);
  executor_.start(std::move(plan), ++plans_begun_, reduction, manner);
}

// Ranks that find other places, or another segment, would find other stamps.
void HostOperation::start(const Asked& asked) {
  Shape shape = asked.shape;
  shape.readable = places_.find(shape, executor_.theirs());
  const Manner manner =
      shape.readable ? tuner_.of_readable(shape) : tuner_.next(shape, asked.algorithm);
  reads_ = shape.readable;
  if (reads_) readable_operations_.fetch_add(1, std::memory_order_relaxed);
  uint64_t& stamp = executor_.stamps().common;
  stamp = mix(stamp, shape.geometry.segment_bytes | (shape.readable ? 1 : 0));
  executor_.input().assign(asked.input);
  executor_.output().assign(asked.output);
  executor_.start(plans_.get(shape, asked.algorithm), ++plans_begun_, asked.reduction, manner);
}

// A rank that gives up tells so first, and then its program may write tensors that this rank still
// reads. All the signals of the plan may have come before.
void HostOperation::check_reads() {
  if (state_.transport().first_failed(/*have_read=*/true)) check(nullptr);
}

void HostOperation::announce(const Operation& operation, const Descriptor& descriptor,
                             std::optional<uint64_t> ticket, const Shape& shape,
                             Algorithm algorithm) {
  current_ = descriptor;
  ++sequence_;
  Descriptor recorded = current_;
  recorded.words[kBytesWord] =
      std::max({operation.whole_bytes, bytes_of(operation.input), bytes_of(operation.output)});
  ticket_ = state_.recorder().begin(recorded, operation.line, ticket);
  state_.log_first_operation([&] {
    return str(numbered(current_), ", ", to_string(algorithm), " (",
               state_.requested_algorithm(shape) ? "the algorithm that was asked for"
                                                 : selection_reason(shape, state_.reach().mapped),
               ")");
  });
  state_.transport().announce(Board::kHost, current_);
}

// The peer from which bytes are awaited may itself wait for one that has not called.
void HostOperation::begin_wait() {
  idle_since_ = Clock::now();
  const std::vector<Rank> absent = state_.diagnosis().absent(current_, 2);
  waits_for_ = absent.size() == 1 ? absent[0] : executor_.peer();
}

void HostOperation::end_wait() {
  const auto since = std::exchange(idle_since_, Clock::time_point());
  if (waits_for_ < 0 || !ticket_) return;
  state_.recorder().waited(*ticket_, waits_for_, Clock::now() - since);
}

bool HostOperation::advance() {
  if (idle_since_ != Clock::time_point() && executor_.ready()) end_wait();
  auto status = executor_.advance();
  if (status == HostExecutor::Status::kDone && asked_) {
    start(*std::exchange(asked_, std::nullopt));
    status = executor_.advance();
  }
  if (status == HostExecutor::Status::kDone && reads_) check_reads();
  if (status == HostExecutor::Status::kMismatch) {
    state_.diagnosis().throw_mismatch(current_, executor_.peer());
  }
  return status == HostExecutor::Status::kDone;
}

void HostOperation::end(bool good) {
  if (!ticket_) return;
  if (!good) state_.transport().reclaim_lent();
  const Traffic now = state_.transport().traffic();
  state_.recorder().end(
      *std::exchange(ticket_, std::nullopt), good,
      {now.sent - before_.sent, now.resent - before_.resent, now.broken - before_.broken});
  before_ = now;
  idle_since_ = {};
  if (good) state_.transport().finish(Board::kHost, sequence_);
}

void HostOperation::end_piece() {
  state_.transport().reclaim_lent();
  idle_since_ = {};
  if (executor_.timed()) tuner_.took(executor_.seconds());
}

void HostOperation::check(const Deadline* deadline) {
  if (deadline != nullptr) state_.transport().need(executor_.peer());
  state_.transport().check_memory();
  state_.diagnosis().check_peers(current_);
  if (executor_.peer() >= 0 && !executor_.ready()) {
    state_.transport().blame(state_.diagnosis().blame(current_, executor_.peer()));
  }
  state_.check_failure(text());
  if (deadline == nullptr) return;
  if (deadline->passed()) {
    state_.diagnosis().throw_late(current_, *deadline, executor_.peer());
  }
  if (deadline->elapsed_seconds() < kLate || warned_ == sequence_) return;
  warned_ = sequence_;  // once an operation
  state_.diagnosis().warn(state_.logger(), current_, kLate, executor_.peer(),
                          Process::get().config().trace);
}

}  // namespace ringcomm
