// send and recv: messages with tags, from a given peer or from any, over a byte stream to each
// peer.
//
// Small messages are sent at once (eager) and kept by the receiver until somebody wants them. Large
// ones are announced, and travel in pieces once the receiver has a place for them, so an unwanted
// message blocks no other. Messages of one (sender, tag) arrive in the order they were sent.
//
// A message of which nothing has moved can be withdrawn. An announcement that is out already is
// revoked. The matched receive waits for another message; a request for a revoked one is ignored.
//
// A put goes into a window: memory that the receiver has opened for all peers, so nobody has to ask
// for it. A signal is a message without bytes whose tag is the window's. It comes after all puts
// that its sender has posted before.
#pragma once

#include <deque>
#include <list>
#include <map>
#include <memory>
#include <unordered_map>

#include "group/request.h"
#include "message/paces.h"
#include "plan/spans.h"
#include "report/operation.h"
#include "report/recorder.h"

namespace ringcomm {

// One send or receive: fill it in, post it, wait for it.
struct Message final : Request, MessageKind {
  using Request::Request;
  Message* as_message() override { return this; }
  static constexpr Rank kAnySource = -1;

  Span data;                     // its bytes count, not MessageKind::count
  std::optional<uint64_t> into;  // a put: where in the peer's window, in bytes
  Rank source = kAnySource;      // receive: who sent it, once done
  uint64_t ticket = 0;           // the flight recorder's

  // Returns the DType and the layout: both sides must have the same.
  uint32_t type() const { return static_cast<uint32_t>(dtype) | layout << 8; }
  Descriptor descriptor() const;
  std::string describe() const { return to_text(descriptor()); }
  // Says how a program makes it end.
  const char* advice() const;
};

using MessagePtr = std::shared_ptr<Message>;

// Every function may be called from any thread.
class Mailbox {
 public:
  Mailbox(Transport& transport, Recorder& recorder);

  void post(const MessagePtr& message);
  // Moves messages as far as it can, and completes those that are whole. Returns true when anything
  // moved.
  bool progress();
  // Tells whether progress() would move anything. It only loads.
  bool ready();
  bool pending() const { return pending_.load(std::memory_order_seq_cst) > 0; }
  std::vector<MessagePtr> unfinished() {
    const Lock lock(mutex_);
    return {active_.begin(), active_.end()};
  }
  // Tells whether there is room for more of that peer's messages.
  bool reads_from(Rank rank) {
    const Lock lock(mutex_);
    return !is_used(rank) || has_room(peer(rank));
  }
  // Opens this rank's part of a window. Every rank opens its windows in the same order, and so
  // gets the same tag.
  uint32_t open_window(Span memory);
  // `deregistered`: by all ranks, so that no put comes any more.
  void close_window(uint32_t tag, bool deregistered);
  bool has_windows() const { return open_.load(std::memory_order_relaxed) > 0; }
  // Returns how many bytes a peer has put into it.
  uint64_t put_by(Rank peer, uint32_t tag);
  void fail_all(const std::exception_ptr& error);
  // Ends the message with that error, and harms nothing else. Returns false if a part of it has
  // moved; then it goes on. A message that is done stays so.
  bool withdraw(const Message& message, const std::exception_ptr& error);
  // Returns the first error a message completed with: the group has failed with it.
  std::exception_ptr error();

 private:
  enum class Kind : uint32_t { kEager = 1, kAnnounce, kClear, kPiece, kRevoke, kPut };
  static constexpr uint64_t kMostKept = 64 << 20;  // unwanted bytes of one peer; then it must wait
  struct MessageHeader {                           // on the wire, followed by `body` bytes
    Kind kind;
    uint32_t tag;
    uint32_t type;
    uint32_t body;
    uint64_t id;     // announced messages: the sender's number of it; puts: where in the window
    uint64_t bytes;  // of the whole message
  };
  struct Outgoing {
    MessageHeader frame{};
    const std::byte* body = nullptr;
    MessagePtr completes;  // when its last byte is written
    MessagePtr continues;  // then the next piece of it follows
    size_t written = 0;
    Paces::Sending pace{};  // of an announced message
  };
  struct Incoming {  // an announced message that comes in pieces
    MessagePtr message;
    uint64_t got = 0;
    Paces::Receiving pace{};
  };
  struct Window {
    Span memory;
    std::vector<uint64_t> got;  // bytes, by peer
  };
  struct Arrived {  // a message that nobody wanted yet
    MessageHeader frame;
    std::vector<std::byte> body;  // eager only
  };
  struct Peer {
    std::deque<Outgoing> out;
    std::unordered_map<uint64_t, MessagePtr> announced;  // mine, by id, until they are asked for
    std::unordered_map<uint64_t, Incoming> incoming;     // theirs
    std::list<Arrived> unexpected;
    uint64_t kept = 0;  // bytes in unexpected
    uint64_t next_id = 0;
    MessageHeader frame{};  // being read
    size_t header_read = 0, body_read = 0;
    std::byte* target = nullptr;
    std::vector<std::byte> buffer;
    MessagePtr receiving;
    Incoming* piece_of = nullptr;  // the frame is a piece of this
    bool broken = false;           // sent nonsense: never read again
  };

  void post_send(const MessagePtr& message) RINGCOMM_REQUIRES(mutex_);
  void post_put(const MessagePtr& message) RINGCOMM_REQUIRES(mutex_);
  void post_receive(const MessagePtr& message) RINGCOMM_REQUIRES(mutex_);
  bool write_to(Rank rank) RINGCOMM_REQUIRES(mutex_);
  bool read_from(Rank rank) RINGCOMM_REQUIRES(mutex_);
  void open_frame(Rank rank) RINGCOMM_REQUIRES(mutex_);
  void open_put(Rank rank) RINGCOMM_REQUIRES(mutex_);
  void close_frame(Rank rank) RINGCOMM_REQUIRES(mutex_);
  void take(const MessagePtr& message, Rank rank, Arrived& arrived) RINGCOMM_REQUIRES(mutex_);
  void clear_to_send(Rank rank, const MessageHeader& announce, const MessagePtr& message)
      RINGCOMM_REQUIRES(mutex_);
  void next_piece(Rank rank, const MessagePtr& message, const Paces::Sending& pace,
                  MessageHeader last) RINGCOMM_REQUIRES(mutex_);
  size_t read_body(Rank rank) RINGCOMM_REQUIRES(mutex_);
  void revoked(Rank rank, uint64_t id) RINGCOMM_REQUIRES(mutex_);
  bool take_back(const Message& message) RINGCOMM_REQUIRES(mutex_);
  bool take_back_send(const Message& message) RINGCOMM_REQUIRES(mutex_);
  MessagePtr match(Rank rank, const MessageHeader& frame) RINGCOMM_REQUIRES(mutex_);
  static PeerError no_window(Rank rank, const MessageHeader& frame, uint64_t room);
  std::exception_ptr mismatch(const Message& message, Rank rank, const MessageHeader& frame) const;
  void complete(const MessagePtr& message, const std::exception_ptr& error)
      RINGCOMM_REQUIRES(mutex_);
  bool move(auto&& move);
  bool call_back();
  static bool has_room(const Peer& from) { return !from.broken && from.kept < kMostKept; }
  Peer& peer(Rank rank) RINGCOMM_REQUIRES(mutex_) {
    auto& peer = peers_[static_cast<size_t>(rank)];
    if (!peer) peer = std::make_unique<Peer>();
    return *peer;
  }
  // Tells whether a message has gone to that rank, or come. Most ranks of a large group never
  // exchange any.
  bool is_used(Rank rank) RINGCOMM_REQUIRES(mutex_) {
    return peers_[static_cast<size_t>(rank)] || (!closed_ && transport_.stream_available(rank) > 0);
  }

  Transport& transport_;
  Recorder& recorder_;
  Mutex mutex_;
  std::vector<std::unique_ptr<Peer>> peers_ RINGCOMM_GUARDED_BY(mutex_);  // when they are used
  bool closed_ RINGCOMM_GUARDED_BY(mutex_) = false;  // nobody else is read from any more
  // Receives without a message, in the order of their tickets.
  std::list<MessagePtr> wanted_ RINGCOMM_GUARDED_BY(mutex_);
  std::list<MessagePtr> active_ RINGCOMM_GUARDED_BY(mutex_);  // every message not done
  // Done, but for the callback.
  std::deque<std::pair<MessagePtr, std::exception_ptr>> finished_ RINGCOMM_GUARDED_BY(mutex_);
  std::map<uint32_t, Window> windows_ RINGCOMM_GUARDED_BY(mutex_);  // by tag
  uint32_t next_window_ RINGCOMM_GUARDED_BY(mutex_) = 0;
  Paces paces_ RINGCOMM_GUARDED_BY(mutex_);
  std::exception_ptr error_ RINGCOMM_GUARDED_BY(mutex_);
  // Windows into which puts may come. Partner: the kick() after open_window().
  std::atomic<size_t> open_{0};
  std::atomic<bool> failed_{false};  // error_ is set
  std::atomic<int> pending_{0};      // active or finished, or a revocation that is not out
};

}  // namespace ringcomm
