// The slow path of a Communicator: why does nothing move? Looks at the peers, at the deadlines, and
// makes the sentences a user reads.
#include <algorithm>

#include "comm/communicator.h"

namespace ringcomm {
namespace {

constexpr double kLate = 10;  // seconds after which people are told who is waited for

// Who failed first matters, not on whose word: "rank 3 failed: ..." is passed on as it is.
std::string retold(Rank by, const std::string& text) {
  constexpr std::string_view rank = ": rank ", failed = " failed: ";
  const size_t at = text.find(rank);
  if (at != std::string::npos) {
    const size_t end = text.find_first_not_of("0123456789", at + rank.size());
    if (end != std::string::npos && text.compare(end, failed.size(), failed) == 0) {
      return text.substr(at + 2);
    }
  }
  return str("rank ", by, failed, text);
}

}  // namespace

std::string Communicator::here() const {
  std::string text = to_text(current_);
  const size_t word = std::min(text.find(' '), text.size());
  return text.insert(word, str(" #", current_.sequence));
}

// "last finished #411 all_reduce float32[3] SUM, has not called #412"
std::string Communicator::progress_of(Rank peer, uint64_t sequence) {
  const PeerState state = transport_->state(peer);
  std::string text = state.finished > 0 ? "last finished " + recorder_.name_of(state.finished)
                                        : "finished nothing yet";
  if (state.called < sequence) return text + str(", has not called #", sequence);
  if (state.finished < sequence) return text + str(", is in #", sequence);
  return text;
}

std::string Communicator::where_is(Rank peer, uint64_t sequence) {
  const bool left = transport_->state(peer).left;
  return str(left ? "has left the group" : transport_->condition(peer), ", ",
             progress_of(peer, sequence));
}

std::string Communicator::loss_of(Rank peer, uint64_t sequence) {
  const std::string why = transport_->loss(peer);
  // Of a peer that is out of reach, the transport says what to look at.
  const bool died = why.starts_with("its process died");
  return str(": Connection closed by rank ", peer, ": ", why, " (", progress_of(peer, sequence),
             died ? "); look at that rank's own output, then restart" : ")");
}

// Throws when the operation in progress cannot end well.
void Communicator::look_around(const Deadline* deadline) {
  if (deadline != nullptr) transport_->need(executor_.peer());
  for (Rank peer = 0; peer < size(); ++peer) {
    if (peer != rank()) check_peer(peer);
  }
  if (const auto first = transport_->first_failed(); first && *first != rank()) {
    throw PeerError(*first, str(here(), ": ", retold(*first, transport_->failure(*first))));
  }
  if (const std::string why = failure(); !why.empty()) {
    throw PeerError(rank(), str(here(), ": ", why));
  }
  if (deadline == nullptr) return;
  if (deadline->passed()) throw_late(to_seconds(deadline->elapsed()));
  if (deadline->elapsed_seconds() < kLate || warned_ == sequence_) return;
  warned_ = sequence_;  // once an operation
  logger_.warning(here(), ": has waited for ", kLate, " s for ", missing(), ")");
}

void Communicator::check_peer(Rank peer) {
  const auto theirs = transport_->descriptor(peer, sequence_);
  if (theirs && *theirs != current_) throw_mismatch(peer);
  const bool lost =
      transport_->connection_lost(peer);  // before its state: a rank finishes, then goes
  const PeerState state = transport_->state(peer);
  if (!(lost || state.left) || state.failed || state.finished >= sequence_) return;
  if (state.left) {
    throw PeerError(peer, str(here(), ": rank ", peer,
                              " has left the group (it destroyed it, or "
                              "its program ended) after #",
                              state.finished, ": every rank must call the same collectives"));
  }
  throw PeerError(peer, here() + loss_of(peer, sequence_));
}

void Communicator::throw_mismatch(Rank peer) {
  const auto theirs = transport_->descriptor(peer, sequence_);
  if (theirs && *theirs == current_) {  // all_to_all: the descriptors agree, the splits do not
    throw MismatchError(str(here(), ": rank ", rank(), " and rank ", peer,
                            " disagree on how much they send each other: output_split_sizes[", peer,
                            "] of rank ", rank(), " must be input_split_sizes[", rank(),
                            "] of rank ", peer, ", and the other way round"));
  }
  const PeerState state = transport_->state(peer);
  std::string other = theirs ? to_text(*theirs) : str("another operation (#", state.called, ")");
  throw MismatchError(str("collective #", sequence_, " differs between ranks: rank ", rank(),
                          " called ", to_text(current_), ", rank ", peer, " called ", other,
                          sequence_ > 1 ? "; the last they agreed on was " : "",
                          sequence_ > 1 ? recorder_.name_of(sequence_ - 1) : "",
                          ": every rank must call the same collectives, with equal dtype, op, root "
                          "and number of elements, in the same order"));
}

// "rank 3 (alive, last finished #411 all_reduce float32[3] SUM, has not called #412"
std::string Communicator::missing() {
  std::vector<Rank> absent;
  for (Rank peer = 0; peer < size(); ++peer) {
    if (peer != rank() && transport_->state(peer).called < sequence_) absent.push_back(peer);
  }
  if (absent.empty()) absent.push_back(executor_.peer());
  return str(list_of(absent), " (", where_is(absent[0], sequence_));
}

void Communicator::throw_late(double seconds) {
  throw TimeoutError(str(here(), ": Timed out after ", seconds, " s waiting for ", missing(),
                         "): see what it does instead, or give the group a longer timeout"));
}

// ---- for whoever waited in vain: the queue's front, and send/recv

void Communicator::watch() {
  if (forked_ || (failed_ && queued_.load() == 0 && !mailbox_.pending())) return;
  watch_messages();
  Driver driver(drive_, std::try_to_lock);
  if (!driver || !task_) return;
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
  driver.unlock();
  complete(task, error);
}

// The caller's thread gives up, and with it this rank: the others must not wait for it.
void Communicator::check_interrupt() {
  in_handler_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  try {
    options_.interrupt();
  } catch (const std::exception& error) {
    in_handler_.store({}, std::memory_order_relaxed);
    fail(std::make_exception_ptr(interrupted(error, here())));
    throw;
  }
  in_handler_.store({}, std::memory_order_relaxed);
}

PeerError Communicator::interrupted(const std::exception& by, const std::string& during) const {
  const std::string what = by.what();
  return PeerError(rank(), str(during, ": interrupted in rank ", rank(), " by ",
                               what.substr(0, what.find_first_of(":\n"))));
}

// A handler of signals that uses the group whose operation it interrupts would wait for itself.
void Communicator::check_no_handler() {
  if (in_handler_.load(std::memory_order_relaxed) != std::this_thread::get_id()) return;
  throw UsageError(str("a signal handler uses group '", name(), "' in the middle of its ", here(),
                       ": let it set a flag, and call once that has returned"));
}

void Communicator::watch_messages() {
  if (!mailbox_.pending()) return;
  try {
    if (const auto first = transport_->first_failed(); first && *first != rank()) {
      throw PeerError(*first, "send/recv: " + retold(*first, transport_->failure(*first)));
    }
    for (const MessagePtr& message : mailbox_.unfinished()) {
      if (!message->done) check_source(*message);
    }
    for (const MessagePtr& message : mailbox_.overdue()) {
      const double seconds = to_seconds(message->deadline.elapsed());
      throw TimeoutError(str(
          message->describe(), ": Timed out after ", seconds, " s waiting for ",
          message->sending ? "the receiver" : "the sender",
          message->peer < 0 ? std::string()
                            : str(" (rank ", message->peer, ", ", where_is(message->peer, 0), ")"),
          ": every send needs a recv with the same tag, and the other way "
          "round"));
    }
  } catch (const std::exception&) {
    fail(std::current_exception());
  }
  fail_messages();
}

// A peer that is gone sends nothing more. What it has sent still counts, also to a collective that
// it has finished and this rank has not: that one ends well, and then the message fails.
void Communicator::check_source(const Message& message) {
  const auto gone = [&](Rank peer) {
    const bool left = transport_->connection_lost(peer) || transport_->state(peer).left;
    if (!left || transport_->stream_available(peer) > 0) return false;
    const PeerState ours = transport_->state(rank());
    const bool idle = queued_.load() == 0 && ours.finished == ours.called;
    return idle || transport_->state(peer).finished <= ours.finished;
  };
  if (message.peer != Message::kAnySource) {
    transport_->need(message.peer);
    if (!gone(message.peer) || !mailbox_.is_unfinished(message)) return;
    const PeerState state = transport_->state(message.peer);
    if (!state.left) throw PeerError(message.peer, message.describe() + loss_of(message.peer, 0));
    throw PeerError(
        message.peer,
        str(message.describe(), ": rank ", message.peer,
            " has left the group (it destroyed it, or its program ended) after #", state.finished,
            ": every send needs a recv with the same tag, and the other way round"));
  }
  for (Rank peer = 0; peer < size(); ++peer) {
    if (peer == rank()) continue;
    transport_->need(peer);
    if (!gone(peer)) return;
  }
  if (!mailbox_.is_unfinished(message)) return;
  throw PeerError(rank(), str(message.describe(), ": every other rank has gone"));
}

}  // namespace ringcomm
