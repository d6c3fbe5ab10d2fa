#include "comm/group_state.h"

#include "comm/runtime.h"

namespace ringcomm {
GroupState::GroupState(const CommunicatorOptions& options, std::shared_ptr<Transport> transport,
                       const Reach& reach, int neighbours)
    : options_(options),
      reach_(reach),
      neighbours_(neighbours),
      logger_(Runtime::get().config().log,
              str("rank ", options.rank, " of group '", options.name, "'")),
      transport_(std::move(transport)),
      recorder_(recorded(false), Runtime::get().began()),
      diagnosis_(*transport_, recorder_, Board::kHost),
      timeout_ms_(options.timeout.count()) {}

Recorded GroupState::recorded(bool device) const {
  return {.job = Runtime::get().config().run,
          .group = name(),
          .rank = rank(),
          .size = size(),
          .global_ranks = options_.global_ranks,
          .device = device,
          .registered = options_.algorithm.registered(),
          .group_id = transport_->group_id(),
          .ring = Runtime::get().config().ring};
}

// A rank with a core of its own may spin: waking a sleeper costs more than most waits. Ranks that
// share cores give theirs away at once.
Patience GroupState::patience() const {
  const Runtime& runtime = Runtime::get();
  const bool own_core = neighbours_ <= runtime.cpus();
  SpinPolicy policy{std::chrono::microseconds(own_core ? 300 : 0), own_core ? 4 : 100,
                    own_core ? 256 : 16};
  if (!reach_.mapped) {
    // A network's latency is worth some spinning, its transfers are not; a poll is a system call.
    policy.spin = std::min<std::chrono::nanoseconds>(policy.spin, std::chrono::microseconds(50));
    policy.free_polls = 4;
    if (neighbours_ == 1) policy.yields = 0;
    policy.adapts = true;
  }
  if (config().spin_us) policy.spin = std::chrono::microseconds(*config().spin_us);
  return Patience(policy);
}

std::optional<Algorithm> GroupState::requested_algorithm(const Shape& shape) const {
  const auto asked = options_.algorithm.find(shape);
  if (asked == Algorithm::kDirect && !reach_.mapped) return std::nullopt;
  const bool levels = reach_.local > 1 || reach_.site > 1;
  if (asked == Algorithm::kHierarchical && !levels) return std::nullopt;
  return asked;
}

// ---- the lifecycle

void GroupState::refuse() const {
  check_no_handler();
  const std::string group = str("group '", name());
  if (forked()) {
    throw PeerError(rank(),
                    group +
                        "' belongs to the process that forked this one: make a group of its "
                        "own in the child");
  }
  if (const std::string why = failure(); !why.empty()) {
    throw PeerError(rank(), group + options_.unusable + why);
  }
  if (left()) throw PeerError(rank(), group + "' was destroyed: make a new one");
}

std::exception_ptr GroupState::fail(const std::exception_ptr& error) {
  const std::string why = message_of(error);
  {
    const Lock lock(mutex_);
    if (error_ || forked()) return error;
    error_ = lasting(error, rank());
    failure_ = why;
  }
  each_engine([](Engine& engine) { engine.note_progress(); });
  marks_.fetch_or(kFailed);  // partner: failed()
  recorder_.close(why);
  Runtime::get().tell_failure();
  transport_->fail(why);  // rings this process's bell too
  each_engine([&](Engine& engine) { engine.fail(error); });
  return error;
}

std::exception_ptr GroupState::fail(const std::string& why) {
  return fail(std::make_exception_ptr(PeerError(rank(), why)));
}

void GroupState::give_up(const std::exception& by, const std::string& during) {
  fail(interrupted(during, rank(), by));
  end_failed();
}

void GroupState::fork() {
  marks_.fetch_or(kForked);
  transport_->forget();
}

std::string GroupState::failure() const {
  const Lock lock(mutex_);
  return failure_;
}

std::exception_ptr GroupState::error() const {
  const Lock lock(mutex_);
  return error_;
}

std::exception_ptr GroupState::why_failed() {
  const auto by = transport_->first_failed();
  if (!failed() && by) fail(std::make_exception_ptr(PeerError(*by, diagnosis_.told_by(*by))));
  return error();
}

void GroupState::check_failure(const std::string& during) const {
  const std::string why = failure();
  if (!why.empty()) throw PeerError(rank(), str(during, ": ", why));
}

// The caller's thread gives up, and with it this rank: the others must not wait for it.
void GroupState::check_interrupt(const std::string& during) {
  try {
    in_handler_.store(std::this_thread::get_id(), std::memory_order_relaxed);
    const Finally over{[&] { in_handler_.store({}, std::memory_order_relaxed); }};
    call_interrupt();
  } catch (const std::exception& error) {
    fail(interrupted(during, rank(), error));
    throw;
  }
}

// A handler of signals that uses the group whose operation it interrupts would wait for itself.
void GroupState::check_no_handler() const {
  if (in_handler_.load(std::memory_order_relaxed) != std::this_thread::get_id()) return;
  const uint64_t called = transport_->state(rank(), Board::kHost).called;
  const auto operation = transport_->descriptor(rank(), Board::kHost, called);
  throw UsageError(str("a signal handler uses group '", name(), "' in the middle of its ",
                       numbered(operation.value_or(Descriptor())),
                       ": let it set a flag, and call once that has returned"));
}

// ---- the engines

void GroupState::add(Engine& engine) {
  for (std::atomic<Engine*>& place : engines_) {
    Engine* nobody = nullptr;
    if (place.compare_exchange_strong(nobody, &engine, std::memory_order_seq_cst)) return;
  }
}

void GroupState::check() {
  if (forked()) return;
  each_engine([](Engine& engine) { engine.check(); });
}

void GroupState::end_failed() {
  if (!failed()) return;
  each_engine([](Engine& engine) { engine.end_failed(); });
}

}  // namespace ringcomm
