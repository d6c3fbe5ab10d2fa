#include "message/message_engine.h"

namespace ringcomm {

// A message that goes wrong fails the group: its peer waits for the rest of it.
bool MessageEngine::move(auto&& move) {
  bool moved = false;
  try {
    moved = move();
  } catch (const std::exception&) {
    state_.fail(std::current_exception());
  }
  if (const auto error = mailbox_.error()) state_.fail(error);
  state_.end_failed();
  return moved;
}

void MessageEngine::post(const MessagePtr& message) {
  state_.check_usable();
  RINGCOMM_CHECK(message->peer < state_.size() && message->peer != state_.rank() &&
                     (message->peer >= 0 || !message->sending),
                 message->describe(), ": rank ", state_.rank(), " of ", state_.size(),
                 " has no such peer");
  state_.log_first_operation([&] { return message->describe() + ", a byte stream"; });
  post_late(message);
  if (!message->done) state_.kick();
}

void MessageEngine::post_late(const MessagePtr& message) {
  if (state_.failed()) {
    message->end(state_.error());
    return message->call_back();
  }
  move([&] {
    mailbox_.post(message);
    return true;
  });
}

bool MessageEngine::progress(Driver& driver) {
  if (!(pending() || watched()) || !(state_.failed() || mailbox_.ready())) return false;
  driver.let_go();  // callbacks must find the group free
  return move([&] { return mailbox_.progress(); });
}

void MessageEngine::close_window(uint32_t tag, bool deregistered) {
  move([&] {
    mailbox_.close_window(tag, deregistered);
    return true;
  });
}

// ---- the slow path

void MessageEngine::give_up(const Message& message, const std::exception_ptr& error) {
  if (mailbox_.withdraw(message, error)) return;
  state_.fail(error);
  state_.end_failed();
}

void MessageEngine::time_out(const Message& message, const Deadline& limit) {
  std::string whom = message.sending ? "the receiver" : "the sender";
  if (message.peer >= 0) {
    whom += str(" (rank ", message.peer, ", ", state_.diagnosis().where_is(message.peer, 0), ")");
  }
  whom += str(": ", message.advice());
  give_up(message, std::make_exception_ptr(timed_out(message.describe(), limit, whom)));
}

void MessageEngine::check() {
  if (!pending()) return;
  try {
    state_.transport().check_memory();
    // Before the messages: a peer that has gone by now sends nothing more to an unfinished one.
    const std::vector<bool> gone = gone_peers();
    for (const MessagePtr& message : mailbox_.unfinished()) {
      if (!message->done) check_source(*message, gone);
    }
  } catch (const std::exception&) {
    state_.fail(std::current_exception());
  }
  state_.end_failed();
}

// A peer that is gone, or has failed, sends nothing more. Bytes that it has sent still count, also
// for a collective that it has finished and this rank has not: that one ends well, and then the
// message fails.
std::vector<bool> MessageEngine::gone_peers() {
  Transport& transport = state_.transport();
  std::vector<bool> gone(static_cast<size_t>(state_.size()));
  for (Rank peer = 0; peer < state_.size(); ++peer) {
    const PeerState theirs = transport.state(peer, Board::kHost);
    const bool failed = theirs.failed && !theirs.hearsay;
    const bool left = theirs.left || failed || transport.connection_lost(peer);
    const bool more = transport.stream_available(peer) > 0 && mailbox_.reads_from(peer);
    if (peer == state_.rank() || !left || more) continue;
    const PeerState ours = transport.state(state_.rank(), Board::kHost);
    const bool idle = !collectives_.pending() && ours.finished == ours.called;
    gone[static_cast<size_t>(peer)] =
        idle || transport.state(peer, Board::kHost).finished <= ours.finished;
  }
  return gone;
}

void MessageEngine::check_source(const Message& message, const std::vector<bool>& gone) {
  Transport& transport = state_.transport();
  const auto throw_failed = [&](Rank peer) {
    throw PeerError(peer, str(message.describe(), ": ", state_.diagnosis().told_by(peer)));
  };
  if (message.peer != Message::kAnySource) {
    transport.need(message.peer);
    if (!gone[static_cast<size_t>(message.peer)]) return;
    const PeerState state = transport.state(message.peer, Board::kHost);
    if (state.failed) throw_failed(message.peer);
    state_.diagnosis().throw_gone(message.peer, message.describe(), 0, message.advice());
  }
  for (Rank peer = 0; peer < state_.size(); ++peer) {  // it may have been the one that was to send
    const bool failed = transport.state(peer, Board::kHost).failed;
    if (failed && gone[static_cast<size_t>(peer)]) throw_failed(peer);
  }
  for (Rank peer = 0; peer < state_.size(); ++peer) {
    if (peer == state_.rank()) continue;
    transport.need(peer);
    if (!gone[static_cast<size_t>(peer)]) return;
  }
  throw PeerError(state_.rank(), str(message.describe(), ": every other rank has gone"));
}

}  // namespace ringcomm
