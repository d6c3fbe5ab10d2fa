#include "comm/mailbox.h"

#include <algorithm>
#include <cstring>

namespace ringcomm {
namespace {

constexpr uint64_t kEagerBytes = 8 << 10;   // messages up to this travel at once
constexpr uint32_t kPieceBytes = 64 << 10;  // of an announced message, so that others get between
constexpr uint64_t kQuantum = 1 << 20;      // of one peer at a time: others wait
constexpr uint64_t kMostKept = 64 << 20;    // unwanted bytes kept of one peer; then it must wait

}  // namespace

Descriptor Message::descriptor() const {
  return make_descriptor({sending, dtype, data.bytes / size_of(dtype), peer, tag});
}

Mailbox::Mailbox(Transport& transport, Recorder& recorder)
    : transport_(transport), recorder_(recorder), peers_(static_cast<size_t>(transport.size())) {}

void Mailbox::post(const MessagePtr& message) {
  message->ticket = recorder_.begin(message->descriptor());
  move([&](Completed& completed) {
    active_.push_back(message);
    pending_.fetch_add(1, std::memory_order_seq_cst);
    if (message->sending) {
      post_send(message);
      write_to(message->peer, completed);
    } else {
      post_receive(message, completed);
    }
    return true;
  });
}

void Mailbox::post_send(const MessagePtr& message) {
  Peer& to = peer(message->peer);
  const uint64_t bytes = message->data.bytes;
  Outgoing out{{Kind::kEager, message->tag, static_cast<uint32_t>(message->dtype),
                static_cast<uint32_t>(bytes), to.next_id++, bytes},
               message->data.data,
               message,
               {}};
  if (bytes > kEagerBytes) {
    out.frame.kind = Kind::kAnnounce;
    out.frame.body = 0;
    out.completes = nullptr;
    to.announced[out.frame.id] = message;
  }
  to.out.push_back(std::move(out));
}

void Mailbox::post_receive(const MessagePtr& message, Completed& completed) {
  for (Rank rank = 0; rank < transport_.size(); ++rank) {
    if (message->peer != Message::kAnySource && message->peer != rank) continue;
    auto& list = peer(rank).unexpected;
    const auto found = std::find_if(list.begin(), list.end(), [&](const Arrived& arrived) {
      return arrived.frame.tag == message->tag;
    });
    if (found == list.end()) continue;
    Arrived arrived = std::move(*found);
    list.erase(found);
    peer(rank).kept -= arrived.body.size();
    take(message, rank, arrived, completed);
    return;
  }
  wanted_.push_back(message);
}

// Gives a message that arrived earlier to the receive that wants it.
void Mailbox::take(const MessagePtr& message, Rank rank, Arrived& arrived, Completed& completed) {
  if (auto error = mismatch(*message, rank, arrived.frame)) {
    completed.emplace_back(message, error);
    return;
  }
  message->source = rank;
  if (arrived.frame.kind == Kind::kAnnounce) {
    clear_to_send(rank, arrived.frame, message);
    write_to(rank, completed);
    return;
  }
  std::memcpy(message->data.data, arrived.body.data(), arrived.body.size());
  completed.emplace_back(message, nullptr);
}

std::exception_ptr Mailbox::mismatch(const Message& message, Rank rank, const Frame& frame) const {
  if (frame.bytes == message.data.bytes && frame.dtype == static_cast<uint32_t>(message.dtype)) {
    return nullptr;
  }
  const bool known = frame.dtype < static_cast<uint32_t>(kDTypes);
  const DType dtype = known ? static_cast<DType>(frame.dtype) : DType::kUint8;
  return std::make_exception_ptr(
      MismatchError(str(message.describe(), ": rank ", rank, " sent ", to_string(dtype), "[",
                        frame.bytes / size_of(dtype),
                        "] with this tag: give recv a tensor of the same dtype and "
                        "number of elements as send's")));
}

void Mailbox::clear_to_send(Rank rank, const Frame& announce, const MessagePtr& message) {
  peer(rank).incoming[announce.id] = {message, 0};
  Outgoing out;
  out.frame = {Kind::kClear, announce.tag, announce.dtype, 0, announce.id, 0};
  peer(rank).out.push_back(std::move(out));
}

void Mailbox::next_piece(Rank rank, const MessagePtr& message, uint64_t id, uint64_t offset) {
  const uint64_t left = message->data.bytes - offset;
  const auto body = static_cast<uint32_t>(std::min<uint64_t>(left, kPieceBytes));
  Outgoing out;
  out.frame = {Kind::kPiece, message->tag, 0, body, id, offset};
  out.body = message->data.data + offset;
  (body == left ? out.completes : out.continues) = message;
  peer(rank).out.push_back(std::move(out));
}

bool Mailbox::write_to(Rank rank, Completed& completed) {
  Peer& to = peer(rank);
  bool moved = false;
  uint64_t quantum = kQuantum;
  while (!to.out.empty() && quantum > 0) {
    Outgoing& out = to.out.front();
    const size_t total = sizeof(Frame) + out.frame.body;
    while (out.written < total) {
      const bool head = out.written < sizeof(Frame);
      const auto* from = head ? reinterpret_cast<const std::byte*>(&out.frame) + out.written
                              : out.body + (out.written - sizeof(Frame));
      const size_t bytes = (head ? sizeof(Frame) : total) - out.written;
      const size_t written = transport_.stream_write(rank, from, bytes);
      if (written == 0) return moved;
      out.written += written;
      moved = true;
    }
    const Outgoing sent = std::move(out);
    to.out.pop_front();
    quantum -= std::min(quantum, total);
    if (sent.completes) completed.emplace_back(sent.completes, nullptr);
    if (sent.continues) {
      next_piece(rank, sent.continues, sent.frame.id, sent.frame.bytes + sent.frame.body);
    }
  }
  return moved;
}

bool Mailbox::read_from(Rank rank, Completed& completed) {
  Peer& from = peer(rank);
  bool moved = false;
  uint64_t quantum = kQuantum;
  while (!from.broken && from.kept < kMostKept && quantum > 0) {
    if (from.header_read < sizeof(Frame)) {
      auto* at = reinterpret_cast<std::byte*>(&from.frame) + from.header_read;
      const size_t got = transport_.stream_read(rank, at, sizeof(Frame) - from.header_read);
      if (got == 0) return moved;
      moved = true;
      from.header_read += got;
      if (from.header_read < sizeof(Frame)) continue;
      open_frame(rank);
    }
    while (from.body_read < from.frame.body) {
      const size_t left = from.frame.body - from.body_read;
      const size_t got = transport_.stream_read(rank, from.target + from.body_read, left);
      if (got == 0) return moved;
      moved = true;
      from.body_read += got;
    }
    close_frame(rank, completed);
    quantum -= std::min(quantum, sizeof(Frame) + from.body_read);
    from.header_read = from.body_read = 0;
  }
  return moved;
}

// The header is whole: decide where the body goes. Everything in it is the peer's word: checked.
void Mailbox::open_frame(Rank rank) {
  Peer& from = peer(rank);
  const Frame& frame = from.frame;
  from.receiving = nullptr;
  if (frame.kind == Kind::kPiece) {
    const auto found = from.incoming.find(frame.id);
    if (found != from.incoming.end() && frame.bytes == found->second.second &&
        frame.body <= found->second.first->data.bytes - found->second.second) {
      from.target = found->second.first->data.data + found->second.second;
      return;
    }
  } else if (frame.kind == Kind::kEager && frame.body == frame.bytes && frame.body <= kEagerBytes) {
    from.receiving = match(rank, frame);
    if (from.receiving && !mismatch(*from.receiving, rank, frame)) {
      from.target = from.receiving->data.data;
    } else {
      from.buffer.resize(frame.body);
      from.target = from.buffer.data();
    }
    return;
  } else if (frame.body == 0 && (frame.kind == Kind::kAnnounce || frame.kind == Kind::kClear)) {
    return;
  }
  from.broken = true;
  throw PeerError(rank, str("rank ", rank, " sent a message that makes no sense (kind ",
                            static_cast<uint32_t>(frame.kind), ", ", frame.body, " bytes)"));
}

void Mailbox::close_frame(Rank rank, Completed& completed) {
  Peer& from = peer(rank);
  const Frame frame = from.frame;
  switch (frame.kind) {
    case Kind::kEager:
      if (from.receiving) {
        from.receiving->source = rank;
        completed.emplace_back(from.receiving, mismatch(*from.receiving, rank, frame));
        return;
      }
      [[fallthrough]];
    case Kind::kAnnounce: {
      Arrived arrived{frame, {}};
      if (frame.kind == Kind::kEager) arrived.body = std::exchange(from.buffer, {});
      if (const MessagePtr message = match(rank, frame)) {  // wanted since its header came
        take(message, rank, arrived, completed);
        return;
      }
      from.kept += arrived.body.size();
      from.unexpected.push_back(std::move(arrived));
      return;
    }
    case Kind::kClear:
      if (const auto asked = from.announced.extract(frame.id)) {  // once: then it may be gone
        next_piece(rank, asked.mapped(), frame.id, 0);
        write_to(rank, completed);
      }
      return;
    case Kind::kPiece: {
      auto& [message, got] = from.incoming[frame.id];
      got += frame.body;
      if (got < message->data.bytes) return;
      completed.emplace_back(message, nullptr);
      from.incoming.erase(frame.id);
      return;
    }
  }
}

// The oldest receive that wants this message, taken off the list.
MessagePtr Mailbox::match(Rank rank, const Frame& frame) {
  const auto found = std::find_if(wanted_.begin(), wanted_.end(), [&](const MessagePtr& message) {
    return message->tag == frame.tag &&
           (message->peer == Message::kAnySource || message->peer == rank);
  });
  if (found == wanted_.end()) return nullptr;
  MessagePtr message = *found;
  wanted_.erase(found);
  return message;
}

bool Mailbox::progress() {
  return move([&](Completed& completed) {
    bool moved = false;
    for (Rank rank = 0; rank < transport_.size(); ++rank) {
      moved |= read_from(rank, completed);
      moved |= write_to(rank, completed);
    }
    return moved;
  });
}

// Under the lock, completed messages stop being active together with the move of their last byte,
// also when a peer's nonsense ended the move early.
template <typename Move>
bool Mailbox::move(Move&& move) {
  Completed completed;
  bool moved = false;
  std::exception_ptr broken;
  {
    const std::lock_guard lock(mutex_);
    try {
      moved = move(completed);
    } catch (const std::exception&) {
      broken = std::current_exception();
    }
    retire(completed);
  }
  const bool called = call_back();
  if (broken) std::rethrow_exception(broken);
  return moved || called;
}

// Runs callbacks, without the lock and one by one: while one of them blocks, maybe for another
// message that is complete already, other threads run the rest.
bool Mailbox::call_back() {
  bool called = false;
  while (true) {
    std::pair<MessagePtr, std::exception_ptr> next;
    {
      const std::lock_guard lock(mutex_);
      if (finished_.empty()) break;
      next = std::move(finished_.front());
      finished_.pop_front();
      pending_.fetch_sub(1, std::memory_order_seq_cst);
    }
    recorder_.end(next.first->ticket, next.second == nullptr);
    next.first->complete(next.second);
    called = true;
  }
  if (called) transport_.doorbell().notify();
  return called;
}

bool Mailbox::ready() {
  const std::lock_guard lock(mutex_);
  if (!finished_.empty()) return true;
  for (Rank rank = 0; rank < transport_.size(); ++rank) {
    if (!peer(rank).broken && peer(rank).kept < kMostKept && transport_.stream_available(rank) > 0)
      return true;
    if (!peer(rank).out.empty() && transport_.stream_space(rank) > 0) return true;
  }
  return false;
}

std::vector<MessagePtr> Mailbox::unfinished() {
  const std::lock_guard lock(mutex_);
  return {active_.begin(), active_.end()};
}

void Mailbox::fail_all(const std::exception_ptr& error) {
  move([&](Completed& completed) {
    for (const MessagePtr& message : active_) completed.emplace_back(message, error);
    wanted_.clear();
    for (Peer& other : peers_) {
      other = Peer{};
      other.broken = true;
    }
    return true;
  });
}

std::exception_ptr Mailbox::error() {
  if (!failed_.load(std::memory_order_acquire)) return nullptr;
  const std::lock_guard lock(mutex_);
  return error_;
}

// Takes completed messages off the list; forgets those that somebody failed meanwhile.
void Mailbox::retire(Completed& completed) {
  for (auto& [message, error] : completed) {
    const auto found = std::find(active_.begin(), active_.end(), message);
    if (found == active_.end()) continue;
    active_.erase(found);
    if (error && !error_) error_ = error;
    if (error) failed_.store(true, std::memory_order_release);
    finished_.emplace_back(std::move(message), std::move(error));
  }
}

}  // namespace ringcomm
