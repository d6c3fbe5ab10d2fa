// In a handshake two processes learn who the other one is, before a session begins. Each proves
// that it knows their key, over everything both have said (HMAC-SHA256, RFC 2104). Each also tells
// which frames have come, since this connection may replace another one.
//
//   initiator -> Hello       who, to whom, which flow, a nonce
//   acceptor  -> Challenge   a nonce, the connection's generation, proof; or that it is another
//   initiator -> Proof       its cursor, proof          (it has closed the old connection)
//   acceptor  -> Resume      its cursor, proof          (so has it)
//
// Like the session, it does no I/O. It does not encrypt. Without TLS it does not protect a
// connection from somebody who can change packets once the handshake is over (docs/security.md).
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "net/frame.h"

namespace ringcomm {

using ProcessId = std::array<uint64_t, 2>;
using Key = std::array<uint64_t, 4>;

// Flows of a pair whose processes say how many; of one that says 0 ("auto"), the most it may have.
inline constexpr int kAutoFlows = 8;
inline int most_flows(int flows) { return flows == 0 ? kAutoFlows : flows; }

Key random_key();
ProcessId random_id();
// Returns HMAC-SHA256 of the parts, each preceded by its length.
Key hmac(const Key& key, const std::vector<std::string>& parts);
// Returns the same for equal parts, and for no others.
uint64_t channel_of(const std::vector<std::string>& parts);
// The peer cannot prove who it is.
struct StrangerError : FlowError {
  StrangerError() : FlowError("it does not know the secret of this job: RINGCOMM_SECRET") {}
  using FlowError::FlowError;
};

// Another process listens at the peer's address: the peer has ended. No proof goes with that word,
// but a forger could refuse the connection as well.
struct GoneError : FlowError {
  GoneError() : FlowError("another process listens there now") {}
};

// The session's side of a handshake. Only a peer that holds the key gets as far as fence().
class Party {
 public:
  virtual ~Party() = default;
  virtual const Key& key() const = 0;
  virtual int flows() const = 0;  // 0: as many as help
  virtual uint64_t generation(int flow) const = 0;
  // Closes the flow's old connection, and returns the cursor of the frames that have come.
  virtual Cursor fence(int flow) = 0;
};

class Handshake {
 public:
  // Connects for a flow of `party`.
  Handshake(const ProcessId& self, const ProcessId& peer, int flow, Party& party);
  // Accepts: with() names the party once the Hello is there.
  explicit Handshake(const ProcessId& self) : self_(self) {}

  // Returns how many bytes are wanted next, at most kMostBytes.
  size_t wanted() const;
  static constexpr size_t kMostBytes = 256;
  // Takes the peer's next message, whole. Afterwards there may be bytes to send.
  // Throws FlowError: the connection is to be closed, once output() is sent, and nothing has
  // changed.
  void take(const std::byte* data);
  std::vector<std::byte> output() { return std::exchange(output_, {}); }

  // Names the process that wants to connect, when accepting and after the Hello. Answer with
  // with().
  const std::optional<ProcessId>& caller() const { return caller_; }
  void with(Party& party);

  // Adds to every proof a word that this connection alone has: see Tls::binding(). Before take().
  void bind(const std::string& connection) { binding_ = connection; }

  bool done() const { return theirs_.has_value(); }
  bool accepting() const { return !initiator_; }
  int flow() const { return flow_; }
  int flows() const { return flows_; }  // that the caller says
  uint64_t generation() const { return generation_; }
  const Cursor& theirs() const { return *theirs_; }

 private:
  struct Hello;
  struct Challenge;
  struct Proof;
  enum class State : uint8_t { kHello, kParty, kChallenge, kProof, kResume, kDone };
  Key proof(const char* label, const std::string& more) const;
  void check_proof(const char* label, const std::string& more, const Key& theirs) const;
  void send(const void* data, size_t bytes);
  void send_cursor(const char* label);
  void take_cursor(const char* label, const std::byte* data);

  ProcessId self_{};
  Party* party_ = nullptr;
  bool initiator_ = false;
  State state_ = State::kHello;
  int flow_ = 0, flows_ = 0;
  uint64_t generation_ = 0;
  std::string said_;  // Hello and Challenge, as they travelled: in every proof
  std::string binding_;
  std::optional<ProcessId> caller_;
  std::optional<Cursor> theirs_;
  std::vector<std::byte> output_;
};

}  // namespace ringcomm
