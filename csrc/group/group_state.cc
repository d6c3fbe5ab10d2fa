#include "group/group_state.h"

#include "group/process.h"

namespace ringcomm {

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
    throw PeerError(rank(), group + options().unusable + why);
  }
  if (left()) throw PeerError(rank(), group + "' was destroyed: make a new one");
}

std::exception_ptr GroupState::fail(const std::exception_ptr& error) {
  const std::string why = message_of(error);
  {
    const Lock lock(mutex_);
    if (error_ || forked()) return error;
    error_ = lasting(error, rank());
    // Before any thread of this rank can see the error, and tell the program.
    transport().mark_failed(why);
  }
  engines_.for_each([](Engine& engine) { engine.note_progress(); });
  marks_.fetch_or(kFailed);  // partner: failed()
  recorder().close(why);
  Process::get().tell_failure();
  transport().tell_failure();  // rings this process's bell too
  engines_.for_each([&](Engine& engine) { engine.fail(error); });
  return error;
}

std::exception_ptr GroupState::fail(const std::string& why) {
  return fail(std::make_exception_ptr(PeerError(rank(), why)));
}

void GroupState::fork() {
  marks_.fetch_or(kForked);
  transport().forget();
}

std::string GroupState::failure() const {
  const std::exception_ptr error = this->error();
  return error ? message_of(error) : "";
}

std::exception_ptr GroupState::error() const {
  const Lock lock(mutex_);
  return error_;
}

std::exception_ptr GroupState::why_failed() {
  const auto by = transport().first_failed();
  if (!failed() && by) fail(std::make_exception_ptr(PeerError(*by, diagnosis().told_by(*by))));
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
  const uint64_t called = transport().state(rank(), Board::kHost).called;
  const auto operation = transport().descriptor(rank(), Board::kHost, called);
  throw UsageError(str("a signal handler uses group '", name(), "' in the middle of its ",
                       numbered(operation.value_or(Descriptor())),
                       ": let it set a flag, and call once that has returned"));
}

void GroupState::check() {
  if (forked()) return;
  engines_.for_each([](Engine& engine) { engine.check(); });
}

void GroupState::end_failed() {
  if (!failed()) return;
  engines_.for_each([](Engine& engine) { engine.end_failed(); });
}

}  // namespace ringcomm
