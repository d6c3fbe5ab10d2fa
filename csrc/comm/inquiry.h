// Why does nothing move? Looks at the peers, and makes the sentences a user reads. One for the
// operations on memory of the host, one for those on devices: the words are the same.
#pragma once

#include <string>

#include "comm/operation.h"
#include "comm/recorder.h"
#include "transport/transport.h"

namespace ringcomm {

class Inquiry {
 public:
  Inquiry(Transport& transport, const Recorder& recorder, Board board)
      : transport_(transport), recorder_(recorder), board_(board) {}

  // Throws MismatchError or PeerError when `operation` cannot end well: a peer called another one
  // under its number, has gone without finishing it, or has failed.
  void check_peers(const Descriptor& operation) const;
  [[noreturn]] void throw_mismatch(const Descriptor& operation, Rank peer) const;
  // The same of one that a message, or a meeting, is with; `text` says which.
  void check_partner(Rank peer, const std::string& text) const;
  // TimeoutError. `awaited`: whom it waits for where every peer has called it.
  [[noreturn]] void throw_late(const Descriptor& operation, double seconds, Rank awaited) const;
  // "rank 3 (alive, last finished #411 all_reduce float32[3] SUM, has not called #412"
  std::string missing(const Descriptor& operation, Rank awaited) const;
  // "alive, last finished #411 all_reduce float32[3] SUM, has not called #412"
  std::string where_is(Rank peer, uint64_t sequence) const;
  // ": Connection closed by rank 3: its process died (last finished ...); look at ..."
  std::string loss_of(Rank peer, uint64_t sequence) const;

 private:
  PeerState state(Rank peer) const { return transport_.state(peer, board_); }
  void check_peer(const Descriptor& operation, Rank peer) const;
  void check_failed(const std::string& text) const;
  std::string progress_of(Rank peer, uint64_t sequence) const;

  Transport& transport_;
  const Recorder& recorder_;
  const Board board_;
};

// "all_reduce #412 float32[500000] SUM"
std::string numbered(const Descriptor& operation);
// Who failed first matters, not on whose word: "rank 3 failed: ..." is passed on as it is.
std::string retold(Rank by, const std::string& text);

}  // namespace ringcomm
