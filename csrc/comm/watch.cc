// The slow path of a Communicator: looks at the peers and at the deadlines.
#include "comm/communicator.h"

namespace ringcomm {
namespace {

constexpr double kLate = 10;  // seconds after which people are told who is waited for

}  // namespace

// Throws when the operation in progress cannot end well.
void Communicator::look_around(const Deadline* deadline) {
  if (deadline != nullptr) transport_->need(executor_.peer());
  inquiry_.check_peers(current_);
  if (const std::string why = failure(); !why.empty()) {
    throw PeerError(rank(), str(numbered(current_), ": ", why));
  }
  if (deadline == nullptr) return;
  if (deadline->passed()) {
    inquiry_.throw_late(current_, to_seconds(deadline->elapsed()), executor_.peer());
  }
  if (deadline->elapsed_seconds() < kLate || warned_ == sequence_) return;
  warned_ = sequence_;  // once an operation
  logger_.warning(numbered(current_), ": has waited for ", kLate, " s for ",
                  inquiry_.missing(current_, executor_.peer()), ")");
}

// ---- for whoever waited in vain: the queue's front, and send/recv

void Communicator::watch() {
  if (forked_) return;
  watch_device();
  if (failed_ && queued_.load() == 0 && !mailbox_.pending()) return;
  watch_messages();
  Driver driver(wheel_);
  if (queued_.load(std::memory_order_seq_cst) == 0 || !driver.take() || !task_) return;
  std::exception_ptr error;
  try {
    if (executor_.ready()) return;
    look_around(&task_->deadline);
    return;
  } catch (const std::exception&) {
    error = fail(std::current_exception());
  }
  end(false);
  const TaskPtr task = std::exchange(task_, nullptr);
  if (task->on_end) std::exchange(task->on_end, nullptr)();
  driver.let_go();
  complete(task, error);
}

void Communicator::check_waiting(const std::string& during) {
  if (const std::string why = failure(); !why.empty()) {
    throw PeerError(rank(), str(during, ": ", why));
  }
  if (options_.interrupt) check_interrupt(during);
}

// The caller's thread gives up, and with it this rank: the others must not wait for it.
void Communicator::check_interrupt(const std::string& during) {
  in_handler_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  try {
    options_.interrupt();
  } catch (const std::exception& error) {
    in_handler_.store({}, std::memory_order_relaxed);
    fail(std::make_exception_ptr(interrupted(error, during)));
    throw;
  }
  in_handler_.store({}, std::memory_order_relaxed);
}

// The same of a wait: what it was for ends with it. Handlers may use the group, nobody drives now.
void Communicator::check_interrupt(Request& request) {
  try {
    options_.interrupt();
  } catch (const std::exception& error) {
    if (Message* const message = request.as_message()) {
      give_up(*message, std::make_exception_ptr(interrupted(error, message->describe())));
      throw;
    }
    const auto& task = static_cast<const Task&>(request);
    if (!task.blocking) throw;  // somebody may wait for it again
    give_up(error, to_text(task.asked));
    while (!request.done.load(std::memory_order_seq_cst)) {
      Driver driver(wheel_);
      if (!driver.take() || !advance_queue(driver)) std::this_thread::yield();
    }
    throw;
  }
}

void Communicator::give_up(const std::exception& by, const std::string& during) {
  fail(std::make_exception_ptr(interrupted(by, during)));
  fail_messages();
}

// Ends a message for which nobody waits any more. The group goes on if nothing of it has moved.
void Communicator::give_up(Message& message, const std::exception_ptr& error) {
  if (!mailbox_.withdraw(message, error)) {
    fail(error);
    fail_messages();
  }
}

PeerError Communicator::interrupted(const std::exception& by, const std::string& during) const {
  const std::string what = by.what();
  return PeerError(rank(), str(during, ": interrupted in rank ", rank(), " by ",
                               what.substr(0, what.find_first_of(":\n"))));
}

// A handler of signals that uses the group whose operation it interrupts would wait for itself.
void Communicator::check_no_handler() {
  if (in_handler_.load(std::memory_order_relaxed) != std::this_thread::get_id()) return;
  throw UsageError(str("a signal handler uses group '", name(), "' in the middle of its ",
                       numbered(current_), ": let it set a flag, and call once that has returned"));
}

void Communicator::watch_device() {
  DeviceGroup* const device = device_.load(std::memory_order_acquire);
  if (device == nullptr) return;
  try {
    device->look();
  } catch (const PeerError&) {
    if (!needs_only_time()) fail(std::current_exception());  // else when that has ended
  } catch (const std::exception&) {
    fail(std::current_exception());
  }
}

// Is the host in an operation that all have called, and that nobody owes anything who has gone?
bool Communicator::needs_only_time() const {
  const PeerState ours = transport_->state(rank(), Board::kHost);
  if (failed_ || ours.finished == ours.called) return false;
  for (Rank peer = 0; peer < size(); ++peer) {
    const bool lost = peer != rank() && transport_->connection_lost(peer);
    const PeerState theirs = transport_->state(peer, Board::kHost);
    const bool gone = lost || theirs.left || theirs.failed;
    if (theirs.called < ours.called || (gone && theirs.finished < ours.called)) return false;
  }
  return true;
}

void Communicator::watch_messages() {
  if (!mailbox_.pending()) return;
  try {
    // Looked at before the messages: what is unfinished then gets nothing more from who has gone.
    const std::vector<bool> gone = gone_peers();
    for (const MessagePtr& message : mailbox_.unfinished()) {
      if (!message->done) check_source(*message, gone);
    }
  } catch (const std::exception&) {
    fail(std::current_exception());
  }
  fail_messages();
}

std::exception_ptr Communicator::late_error(const Message& message, Clock::duration waited) const {
  return std::make_exception_ptr(TimeoutError(
      str(message.describe(), ": Timed out after ", to_seconds(waited), " s waiting for ",
          message.sending ? "the receiver" : "the sender",
          message.peer < 0
              ? std::string()
              : str(" (rank ", message.peer, ", ", inquiry_.where_is(message.peer, 0), ")"),
          ": every send needs a recv with the same tag, and the other way round")));
}

// A peer that is gone, or has failed, sends nothing more. What it has sent still counts, also to a
// collective that it has finished and this rank has not: that one ends well, and then the message
// fails.
std::vector<bool> Communicator::gone_peers() const {
  std::vector<bool> gone(static_cast<size_t>(size()));
  for (Rank peer = 0; peer < size(); ++peer) {
    const PeerState theirs = transport_->state(peer, Board::kHost);
    const bool left = theirs.left || theirs.failed || transport_->connection_lost(peer);
    if (peer == rank() || !left || transport_->stream_available(peer) > 0) continue;
    const PeerState ours = transport_->state(rank(), Board::kHost);
    const bool idle = queued_.load() == 0 && ours.finished == ours.called;
    gone[static_cast<size_t>(peer)] =
        idle || transport_->state(peer, Board::kHost).finished <= ours.finished;
  }
  return gone;
}

void Communicator::check_source(const Message& message, const std::vector<bool>& gone) {
  const auto throw_failed = [&](Rank peer) {
    throw PeerError(peer, str(message.describe(), ": ", inquiry_.told_by(peer)));
  };
  if (message.peer != Message::kAnySource) {
    transport_->need(message.peer);
    if (!gone[static_cast<size_t>(message.peer)]) return;
    const PeerState state = transport_->state(message.peer, Board::kHost);
    if (state.failed) throw_failed(message.peer);
    if (!state.left)
      throw PeerError(message.peer, message.describe() + inquiry_.loss_of(message.peer, 0));
    throw PeerError(
        message.peer,
        str(message.describe(), ": rank ", message.peer,
            " has left the group (it destroyed it, or its program ended) after #", state.finished,
            ": every send needs a recv with the same tag, and the other way round"));
  }
  for (Rank peer = 0; peer < size(); ++peer) {  // it may have been the one that was to send
    const bool failed = transport_->state(peer, Board::kHost).failed;
    if (failed && gone[static_cast<size_t>(peer)]) throw_failed(peer);
  }
  for (Rank peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    transport_->need(peer);
    if (!gone[static_cast<size_t>(peer)]) return;
  }
  throw PeerError(rank(), str(message.describe(), ": every other rank has gone"));
}

}  // namespace ringcomm
