// Finds out why nothing moves: looks at the peers, and makes the sentences that a user reads.
// Operations on the host have one diagnosis, those on a device another, in the same words.
#pragma once

#include <exception>
#include <functional>
#include <utility>

#include "base/log.h"
#include "report/operation.h"
#include "report/recorder.h"
#include "transport/host.h"
#include "transport/transport.h"

namespace ringcomm {

class Diagnosis {
 public:
  // Tells how far a peer is, as that operation sees it. Without a view, the peer's header tells it.
  using View = std::function<PeerState(Rank peer, uint64_t sequence)>;

  Diagnosis(Transport& transport, const Recorder& recorder, const Whereabouts& where, Board board,
            View view = nullptr)
      : transport_(transport),
        recorder_(recorder),
        where_(where),
        board_(board),
        view_(std::move(view)) {}

  // Throws MismatchError or PeerError when `operation` cannot end well: a peer called another one
  // under its number, has gone without finishing it, or has failed.
  void check_peers(const Descriptor& operation) const;
  [[noreturn]] void throw_mismatch(const Descriptor& operation, Rank peer) const;
  // Does the same for the partner of a message or a meeting; `text` names the message.
  void check_partner(Rank peer, const std::string& text) const;
  // Throws only if that very peer has gone without a word of failure.
  void check_gone(Rank peer, const std::string& text) const;
  // Throws PeerError: the peer has left, or its connection is lost.
  [[noreturn]] void throw_gone(Rank peer, const std::string& text, uint64_t sequence = 0,
                               const std::string& advice = {}) const;
  // Finds a peer that failed before it finished this operation. It prefers the group's first failed
  // rank. An operation does not need a peer that had finished it.
  std::optional<Rank> failed_before(uint64_t sequence) const;
  // Throws TimeoutError. `awaited`: the rank to name if every peer has called the operation.
  [[noreturn]] void throw_late(const Descriptor& operation, const Deadline& deadline,
                               Rank awaited) const;
  // Returns "rank 3 failed: ...", for a peer that has failed.
  std::string told_by(Rank peer) const;
  // Returns who keeps the operation up: `awaited`, from which this rank has to hear next, or the
  // rank for which that one waits in turn.
  Blame blame(const Descriptor& operation, Rank awaited) const;
  // Returns the ranks that have not called it, among those that have spoken, and the one to blame.
  std::vector<Rank> absent(const Descriptor& operation, size_t most = SIZE_MAX) const;
  // Returns "rank 3 (alive, last finished #411 all_reduce float32[3] SUM, has not called #412; pid
  // 4711 on node1", without the last bracket. If all have called it, that is the rank that is
  // awaited.
  std::string missing(const Descriptor& operation, Rank awaited) const;
  // Warns that an operation takes long, and says how to see the Python line that the rank is at:
  // ranks write their records then (ringcomm/_flight/recorder.py). `records`: the folder that the
  // user chose for flight records, "off" for none.
  void warn(const Logger& logger, const Descriptor& operation, double seconds, Rank awaited,
            const std::string& records) const;
  // Returns "alive, last finished #411 all_reduce float32[3] SUM, has not called #412".
  std::string where_is(Rank peer, uint64_t sequence) const;

 private:
  PeerState state(Rank peer, uint64_t sequence = 0) const {
    return view_ ? view_(peer, sequence) : transport_.state(peer, board_);
  }
  std::string progress_of(Rank peer, uint64_t sequence) const;
  // Returns ": Connection closed by rank 3: its process died (last finished ...); look at ...".
  std::string loss_of(Rank peer, uint64_t sequence) const;

  Transport& transport_;
  const Recorder& recorder_;
  const Whereabouts& where_;
  const Board board_;
  const View view_;
};

// Tells whether the host is in an operation that all ranks have called, and that each rank which is
// gone has finished.
bool needs_only_time(Transport& transport);
// Returns "all_reduce #412: Timed out after 30 s waiting for rank 3 (alive)"; the deadline has
// passed.
TimeoutError timed_out(const std::string& text, const Deadline& deadline, const std::string& whom);
// Returns "all_reduce #412: interrupted in rank 3 by KeyboardInterrupt".
std::string interrupted(const std::string& during, Rank rank, const std::exception& by);
std::string message_of(const std::exception_ptr& error);
// Returns the error in a form that may be kept. An interrupt's own exception may hold Python
// objects.
std::exception_ptr lasting(const std::exception_ptr& error, Rank rank);
// Tells whether the error is about a peer that is gone or has failed. That peer may have finished
// the operations under way here.
bool is_of_peer(const std::exception_ptr& error, Rank self);
// Returns "all_reduce #412 float32[500000] SUM".
std::string numbered(const Descriptor& operation);

}  // namespace ringcomm
