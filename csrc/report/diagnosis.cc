#include "report/diagnosis.h"

namespace ringcomm {

namespace {

// Names the rank that failed first, not the one that tells of it: "rank 3 failed: ..." is passed on
// as it is.
std::string retold(Rank by, const std::string& text) {
  constexpr std::string_view rank = ": rank ", failed = " failed: ";
  const std::string whole = ": " + text;
  const size_t at = whole.find(rank);
  if (at != std::string::npos) {
    const size_t end = whole.find_first_not_of("0123456789", at + rank.size());
    if (end != std::string::npos && whole.compare(end, failed.size(), failed) == 0) {
      return whole.substr(at + 2);
    }
  }
  return str("rank ", by, failed, text);
}

}  // namespace

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return known.what();
  } catch (...) {
    return "unknown error";
  }
}

std::exception_ptr lasting(const std::exception_ptr& error, Rank rank) {
  try {
    std::rethrow_exception(error);
  } catch (const std::runtime_error&) {
    return error;
  } catch (...) {
    return std::make_exception_ptr(PeerError(rank, message_of(error)));
  }
}

std::string interrupted(const std::string& during, Rank rank, const std::exception& by) {
  const std::string what = by.what();
  return str(during, ": interrupted in rank ", rank, " by ",
             what.substr(0, what.find_first_of(":\n")));
}

bool needs_only_time(Transport& transport) {
  const PeerState ours = transport.state(transport.rank(), Board::kHost);
  if (ours.finished == ours.called) return false;
  for (Rank peer = 0; peer < transport.size(); ++peer) {
    const bool lost = peer != transport.rank() && transport.connection_lost(peer);
    const PeerState theirs = transport.state(peer, Board::kHost);
    const bool gone = lost || theirs.left || theirs.failed;
    if (theirs.called < ours.called || (gone && theirs.finished < ours.called)) return false;
  }
  return true;
}

TimeoutError timed_out(const std::string& text, const Deadline& deadline, const std::string& whom) {
  const double seconds = to_seconds(deadline.elapsed());
  return TimeoutError(str(text, ": Timed out after ", seconds, " s waiting for ", whom));
}

bool is_of_peer(const std::exception_ptr& error, Rank self) {
  try {
    std::rethrow_exception(error);
  } catch (const PeerError& peer) {
    return peer.rank() != self;
  } catch (...) {
    return false;
  }
}

std::string numbered(const Descriptor& operation) {
  std::string text = to_text(operation);
  const size_t word = std::min(text.find(' '), text.size());
  return text.insert(word, str(" #", operation.sequence));
}

// "last finished #411 all_reduce float32[3] SUM, has not called #412"
std::string Diagnosis::progress_of(Rank peer, uint64_t sequence) const {
  const PeerState state = this->state(peer, sequence);
  std::string text = state.finished > 0 ? "last finished " + recorder_.name_of(state.finished)
                                        : "finished nothing yet";
  if (state.called < sequence) return text + str(", has not called #", sequence);
  if (state.finished < sequence) return text + str(", is in #", sequence);
  return text;
}

std::string Diagnosis::where_is(Rank peer, uint64_t sequence) const {
  return str(state(peer).left ? "has left the group" : transport_.condition(peer), ", ",
             progress_of(peer, sequence));
}

std::string Diagnosis::loss_of(Rank peer, uint64_t sequence) const {
  const std::string why = transport_.loss(peer);
  // If a peer is out of reach, the transport's text has advice already.
  const bool died = why.starts_with("its process died");
  const bool ours = why.starts_with("this process ");  // then the peer has done nothing
  return str(ours ? ": No connection to rank " : ": Connection closed by rank ", peer, ": ", why,
             " (", progress_of(peer, sequence),
             died ? "); look at that rank's own output, then restart" : ")");
}

void Diagnosis::check_peers(const Descriptor& operation) const {
  for (Rank peer = 0; peer < transport_.size(); ++peer) {
    if (peer == transport_.rank()) continue;
    const auto theirs = transport_.descriptor(peer, board_, operation.sequence);
    if (theirs && *theirs != operation) throw_mismatch(operation, peer);
    // This comes before a look at its state: a rank finishes, then goes.
    const bool lost = transport_.connection_lost(peer);
    const PeerState state = this->state(peer, operation.sequence);
    const bool gone = (lost || state.left) && !state.failed;
    if (!gone || state.finished >= operation.sequence) continue;
    throw_gone(peer, numbered(operation), operation.sequence,
               "every rank must call the same collectives");
  }
  if (const auto by = failed_before(operation.sequence)) {
    throw PeerError(*by, str(numbered(operation), ": ", told_by(*by)));
  }
}

std::string Diagnosis::told_by(Rank peer) const { return retold(peer, transport_.failure(peer)); }

std::optional<Rank> Diagnosis::failed_before(uint64_t sequence) const {
  const auto first = transport_.first_failed();
  if (!first) return std::nullopt;
  const auto owes = [&](Rank peer) {
    const PeerState state = this->state(peer, sequence);
    return peer != transport_.rank() && state.failed && state.finished < sequence;
  };
  if (owes(*first)) return first;
  for (Rank peer = 0; peer < transport_.size(); ++peer) {
    if (owes(peer)) return peer;
  }
  return std::nullopt;
}

void Diagnosis::check_gone(Rank peer, const std::string& text) const {
  const bool lost = transport_.connection_lost(peer);
  if (peer != transport_.rank() && (lost || state(peer).left)) throw_gone(peer, text);
}

void Diagnosis::throw_gone(Rank peer, const std::string& text, uint64_t sequence,
                           const std::string& advice) const {
  const PeerState state = this->state(peer);
  if (!state.left) throw PeerError(peer, text + loss_of(peer, sequence));
  throw PeerError(peer, str(text, ": rank ", peer,
                            " has left the group (it destroyed it, or its program ended) after #",
                            state.finished, advice.empty() ? "" : ": ", advice));
}

void Diagnosis::check_partner(Rank peer, const std::string& text) const {
  if (!transport_.state(peer, board_).failed) check_gone(peer, text);
  const auto first = transport_.first_failed();
  if (!first || *first == transport_.rank()) return;
  throw PeerError(*first, str(text, ": ", told_by(*first)));
}

void Diagnosis::throw_mismatch(const Descriptor& operation, Rank peer) const {
  const Rank rank = transport_.rank();
  const uint64_t sequence = operation.sequence;
  const auto theirs = transport_.descriptor(peer, board_, sequence);
  if (theirs && *theirs == operation) {  // all_to_all: the descriptors agree, the splits do not
    throw MismatchError(str(numbered(operation), ": rank ", rank, " and rank ", peer,
                            " disagree on how much they send each other: output_split_sizes[", peer,
                            "] of rank ", rank, " must be input_split_sizes[", rank, "] of rank ",
                            peer, ", and the other way round"));
  }
  if (theirs && same_call(*theirs, operation)) {
    const bool other_code = plan_text(operation) == plan_text(*theirs) && by_registered(operation);
    if (other_code) {
      throw MismatchError(str(numbered(operation), ": rank ", rank, " and rank ", peer,
                              " have registered other code as the algorithm '",
                              plan_text(operation), "': give every rank the same file"));
    }
    throw MismatchError(str(numbered(operation), ": rank ", rank, " runs it by ",
                            plan_text(operation), ", rank ", peer, " by ", plan_text(*theirs),
                            ", or with other segments or costs: give every rank the same "
                            "algorithm and the same version of ringcomm"));
  }
  const auto text = [&](const Descriptor& call) {
    const bool staged = purpose_of(call) == Purpose::kStaged;
    const bool alone = theirs && purpose_of(*theirs) != purpose_of(operation);
    return to_text(call) + (staged && alone ? " on a device" : "");
  };
  const std::string other =
      theirs ? text(*theirs) : str("another operation (#", state(peer).called, ")");
  throw MismatchError(str("collective #", sequence, " differs between ranks: rank ", rank,
                          " called ", text(operation), ", rank ", peer, " called ", other,
                          sequence > 1 ? "; the last they agreed on was " : "",
                          sequence > 1 ? recorder_.name_of(sequence - 1) : "",
                          ": every rank must call the same collectives, with equal dtype, op, root "
                          "and number of elements, in the same order"));
}

Blame Diagnosis::blame(const Descriptor& operation, Rank awaited) const {
  const PeerState state = this->state(awaited, operation.sequence);
  const Blame theirs = transport_.blame_of(awaited);
  const bool known = theirs.sequence == operation.sequence &&
                     theirs.rank < static_cast<uint64_t>(transport_.size());
  if (known && state.called >= operation.sequence) return theirs;
  return {operation.sequence, static_cast<uint64_t>(awaited), state.called, state.finished};
}

std::vector<Rank> Diagnosis::absent(const Descriptor& operation, size_t most) const {
  const Blame blame = transport_.blame_of(transport_.rank());
  const bool blames = blame.sequence == operation.sequence && blame.called < blame.sequence;
  std::vector<Rank> absent;
  for (Rank peer = 0; peer < transport_.size() && absent.size() < most; ++peer) {
    const uint64_t called = state(peer).called;
    const bool counts = transport_.has_spoken(peer) || (blames && Rank(blame.rank) == peer);
    if (counts && peer != transport_.rank() && called < operation.sequence) absent.push_back(peer);
  }
  return absent;
}

void Diagnosis::warn(const Logger& logger, const Descriptor& operation, double seconds,
                     Rank awaited, const std::string& records) const {
  const std::string read = records.empty() ? "` there" : " " + records + "`";
  logger.warning(
      numbered(operation), ": has waited ", seconds, " s for ", missing(operation, awaited),
      records == "off" ? ")" : str("); to see the line it is at, run `ringcomm trace", read));
}

std::string Diagnosis::missing(const Descriptor& operation, Rank awaited) const {
  std::vector<Rank> absent = this->absent(operation);
  if (absent.empty()) absent.push_back(awaited);
  const Rank peer = absent[0];
  const bool host = board_ == Board::kHost;
  const Board other = host ? Board::kDevice : Board::kHost;
  const uint64_t theirs = transport_.state(peer, other).called;
  const bool there = theirs > transport_.state(transport_.rank(), other).called;
  const std::string place = where_.text(peer);
  return str(list_of(absent), " (", where_is(peer, operation.sequence),
             there ? str(", and has called #", theirs, host ? " on its device" : " on its CPU",
                         ", which this rank has not")
                   : "",
             place.empty() ? "" : "; " + place);
}

void Diagnosis::throw_late(const Descriptor& operation, const Deadline& deadline,
                           Rank awaited) const {
  throw timed_out(numbered(operation), deadline,
                  missing(operation, awaited) +
                      "): see what it does instead, or give the group a longer timeout");
}

}  // namespace ringcomm
