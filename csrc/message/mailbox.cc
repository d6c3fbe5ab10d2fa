#include "message/mailbox.h"

namespace ringcomm {

constexpr uint64_t kEagerBytes = 8 << 10;  // messages up to this travel at once
constexpr uint64_t kQuantum = 1 << 20;     // bytes of a peer's turn: others wait

Descriptor Message::descriptor() const {
  return make_descriptor(
      MessageKind{sending, dtype, data.bytes / size_of(dtype), peer, tag, line, layout});
}

const char* Message::advice() const {
  if (into) return "it takes puts in by itself: see whether that process is stopped";
  return tag < kWindowTags ? "every send needs a recv with the same tag, and the other way round"
                           : "every wait_signal needs a signal of the other rank's";
}

Mailbox::Mailbox(Transport& transport, Recorder& recorder)
    : transport_(transport), recorder_(recorder), peers_(static_cast<size_t>(transport.size())) {}

void Mailbox::post(const MessagePtr& message) {
  move([&] {
    mutex_.assert_held();
    message->ticket = recorder_.begin(message->descriptor(), message->line);
    active_.push_back(message);
    pending_.fetch_add(1, std::memory_order_seq_cst);
    if (message->sending) {
      post_send(message);
      write_to(message->peer);
    } else {
      post_receive(message);
    }
    return true;
  });
}

void Mailbox::post_send(const MessagePtr& message) {
  if (message->into) return post_put(message);
  Peer& to = peer(message->peer);
  const uint64_t bytes = message->data.bytes;
  Outgoing out{{Kind::kEager, message->tag, message->type(), static_cast<uint32_t>(bytes),
                to.next_id++, bytes},
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

// All of its frames are in the queue at once: no signal comes between them.
void Mailbox::post_put(const MessagePtr& message) {
  Peer& to = peer(message->peer);
  const Span& data = message->data;
  for (uint64_t at = 0; at < data.bytes; at += kQuantum) {
    const auto body = static_cast<uint32_t>(std::min(kQuantum, data.bytes - at));
    Outgoing& out = to.out.emplace_back();
    out.frame = {Kind::kPut, message->tag, message->type(), body, *message->into + at, data.bytes};
    out.body = data.data + at;
    if (at + body == data.bytes) out.completes = message;
  }
}

void Mailbox::clear_to_send(Rank rank, const MessageHeader& announce, const MessagePtr& message) {
  peer(rank).incoming[announce.id] = {message, 0, paces_.receive(message->data.bytes)};
  peer(rank).out.emplace_back().frame = {
      Kind::kClear, announce.tag, announce.type, 0, announce.id, 0};
}

// Adds the piece after `last`, or the first one after the message's announcement.
void Mailbox::next_piece(Rank rank, const MessagePtr& message, const Paces::Sending& pace,
                         MessageHeader last) {
  const uint64_t offset = last.kind == Kind::kPiece ? last.bytes + last.body : 0;
  const uint64_t left = message->data.bytes - offset;
  const auto body = static_cast<uint32_t>(std::min<uint64_t>(left, pace.piece_bytes));
  Outgoing& out = peer(rank).out.emplace_back();
  out.pace = pace;
  out.frame = {Kind::kPiece, message->tag, 0, body, last.id, offset};
  out.body = message->data.data + offset;
  (body == left ? out.completes : out.continues) = message;
}

bool Mailbox::write_to(Rank rank) {
  Peer& to = peer(rank);
  bool moved = false;
  uint64_t quantum = kQuantum;
  while (!to.out.empty() && quantum > 0) {
    Outgoing& out = to.out.front();
    const size_t total = sizeof(MessageHeader) + out.frame.body;
    while (out.written < total) {
      const bool head = out.written < sizeof(MessageHeader);
      const auto* from = head ? reinterpret_cast<const std::byte*>(&out.frame) + out.written
                              : out.body + (out.written - sizeof(MessageHeader));
      const size_t bytes = (head ? sizeof(MessageHeader) : total) - out.written;
      const size_t written = transport_.stream_write(rank, from, bytes);
      if (written == 0) return moved;
      out.written += written;
      moved = true;
    }
    const Outgoing sent = std::move(out);
    to.out.pop_front();
    quantum -= std::min(quantum, total);
    if (sent.frame.kind == Kind::kRevoke) pending_.fetch_sub(1, std::memory_order_seq_cst);
    if (sent.completes) {
      sent.pace.ended();
      complete(sent.completes, nullptr);
    }
    if (sent.continues) next_piece(rank, sent.continues, sent.pace, sent.frame);
  }
  return moved;
}

bool Mailbox::read_from(Rank rank) {
  Peer& from = peer(rank);
  bool moved = false;
  uint64_t quantum = kQuantum;
  while (has_room(from) && quantum > 0) {
    if (from.header_read < sizeof(MessageHeader)) {
      auto* at = reinterpret_cast<std::byte*>(&from.frame) + from.header_read;
      const size_t got = transport_.stream_read(rank, at, sizeof(MessageHeader) - from.header_read);
      if (got == 0) return moved;
      moved = true;
      from.header_read += got;
      if (from.header_read < sizeof(MessageHeader)) continue;
      open_frame(rank);
    }
    while (from.body_read < from.frame.body) {
      const size_t got = read_body(rank);
      if (got == 0) return moved;
      moved = true;
      from.body_read += got;
    }
    close_frame(rank);
    quantum -= std::min(quantum, sizeof(MessageHeader) + from.body_read);
    from.header_read = from.body_read = 0;
  }
  return moved;
}

size_t Mailbox::read_body(Rank rank) {
  Peer& from = peer(rank);
  std::byte* const target = from.target + from.body_read;
  const size_t left = from.frame.body - from.body_read;
  if (from.piece_of == nullptr) return transport_.stream_read(rank, target, left);
  Paces::Receiving& pace = from.piece_of->pace;
  return pace.read([&] { return transport_.stream_read(rank, target, left, pace.past_caches); });
}

// The header is whole: decide where the body goes. Everything in it is the peer's word: checked.
void Mailbox::open_frame(Rank rank) {
  Peer& from = peer(rank);
  const MessageHeader& frame = from.frame;
  from.receiving = nullptr;
  from.piece_of = nullptr;
  if (frame.kind == Kind::kPiece) {
    const auto place = from.incoming.find(frame.id);
    Incoming* const in = place == from.incoming.end() ? nullptr : &place->second;
    if (in != nullptr && frame.bytes == in->got &&
        frame.body <= in->message->data.bytes - in->got) {
      from.piece_of = in;
      from.target = in->message->data.data + in->got;
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
  } else if (frame.body == 0 && (frame.kind == Kind::kAnnounce || frame.kind == Kind::kClear ||
                                 frame.kind == Kind::kRevoke)) {
    return;
  } else if (frame.kind == Kind::kPut) {
    return open_put(rank);
  }
  from.broken = true;
  throw PeerError(rank, str("rank ", rank, " sent a message that makes no sense (kind ",
                            static_cast<uint32_t>(frame.kind), ", ", frame.body, " bytes)"));
}

void Mailbox::open_put(Rank rank) {
  Peer& from = peer(rank);
  const MessageHeader& frame = from.frame;
  const auto place = windows_.find(frame.tag);
  const uint64_t room = place == windows_.end() ? 0 : place->second.memory.bytes;
  if (frame.body > 0 && frame.body <= room && frame.id <= room - frame.body) {
    from.target = place->second.memory.data + frame.id;
    return;
  }
  from.broken = true;
  throw no_window(rank, frame, room);
}

PeerError Mailbox::no_window(Rank rank, const MessageHeader& frame, uint64_t room) {
  return PeerError(rank, str("rank ", rank, " put ", frame.body, " bytes at ", frame.id,
                             " of window ", frame.tag - kWindowTags, ", which has ", room,
                             " bytes here: keep a window until all ranks have deregistered it"));
}

void Mailbox::close_frame(Rank rank) {
  Peer& from = peer(rank);
  const MessageHeader frame = from.frame;
  switch (frame.kind) {
    case Kind::kEager:
      if (from.receiving) {
        from.receiving->source = rank;
        complete(from.receiving, mismatch(*from.receiving, rank, frame));
        return;
      }
      [[fallthrough]];
    case Kind::kAnnounce: {
      Arrived arrived{frame, {}};
      if (frame.kind == Kind::kEager) arrived.body = std::exchange(from.buffer, {});
      if (const MessagePtr message = match(rank, frame)) {  // wanted since its header came
        take(message, rank, arrived);
        return;
      }
      from.kept += arrived.body.size();
      from.unexpected.push_back(std::move(arrived));
      return;
    }
    case Kind::kClear:
      if (const auto asked = from.announced.extract(frame.id)) {  // once: then it may be gone
        const bool remote = transport_.is_remote(rank);
        const auto pace = remote ? Paces::Sending{} : paces_.send(asked.mapped()->data.bytes);
        next_piece(rank, asked.mapped(), pace, frame);
        write_to(rank);
      }
      return;
    case Kind::kPiece: {
      Incoming& in = from.incoming[frame.id];
      in.got += frame.body;
      if (in.got < in.message->data.bytes) return;
      in.pace.ended();
      complete(in.message, nullptr);
      from.piece_of = nullptr;
      from.incoming.erase(frame.id);
      return;
    }
    case Kind::kRevoke:
      return revoked(rank, frame.id);
    case Kind::kPut:
      windows_[frame.tag].got[static_cast<size_t>(rank)] += frame.body;
      return;
  }
}

uint32_t Mailbox::open_window(Span memory) {
  const Lock lock(mutex_);
  const uint32_t tag = kWindowTags + next_window_++;
  windows_[tag] = {memory, std::vector<uint64_t>(peers_.size())};
  open_.fetch_add(1);
  return tag;
}

// A put that is on its way into it has nowhere to go, so its sender is not read any more.
void Mailbox::close_window(uint32_t tag, bool deregistered) {
  const Lock lock(mutex_);
  for (Rank rank = 0; rank < std::ssize(peers_); ++rank) {
    const auto& from = peers_[static_cast<size_t>(rank)];
    const bool opened = from && from->header_read == sizeof(MessageHeader);
    if (!opened || from->frame.kind != Kind::kPut || from->frame.tag != tag) continue;
    from->broken = true;
    if (!error_) error_ = std::make_exception_ptr(no_window(rank, from->frame, 0));
    failed_.store(true, std::memory_order_release);
  }
  windows_.erase(tag);
  if (deregistered) open_.fetch_sub(1);
}

uint64_t Mailbox::put_by(Rank peer, uint32_t tag) {
  const Lock lock(mutex_);
  return windows_.at(tag).got[static_cast<size_t>(peer)];
}

bool Mailbox::progress() {
  return move([&] {
    mutex_.assert_held();
    bool moved = false;
    for (Rank rank = 0; rank < transport_.size(); ++rank) {
      if (!is_used(rank)) continue;
      moved |= read_from(rank);
      moved |= write_to(rank);
    }
    return moved;
  });
}

// Under the lock; then, without it, callbacks.
bool Mailbox::move(auto&& move) {
  bool moved = false;
  std::exception_ptr broken;
  {
    const Lock lock(mutex_);
    try {
      moved = move();
    } catch (const std::exception&) {
      broken = std::current_exception();
    }
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
      const Lock lock(mutex_);
      if (finished_.empty()) break;
      next = std::move(finished_.front());
      finished_.pop_front();
      pending_.fetch_sub(1, std::memory_order_seq_cst);
    }
    recorder_.end(next.first->ticket, next.second == nullptr);
    next.first->end(next.second);
    transport_.doorbell().notify(kMessageNews);  // before the user's code, which may take its time
    next.first->call_back();
    called = true;
  }
  return called;
}

bool Mailbox::ready() {
  const Lock lock(mutex_);
  if (!finished_.empty()) return true;
  for (Rank rank = 0; rank < transport_.size(); ++rank) {
    if (!is_used(rank)) continue;
    if (has_room(peer(rank)) && transport_.stream_available(rank) > 0) return true;
    if (!peer(rank).out.empty() && transport_.stream_space(rank) > 0) return true;
  }
  return false;
}

void Mailbox::fail_all(const std::exception_ptr& error) {
  try {
    progress();                      // what has come by now counts
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
    // Nonsense of a peer's: that one is not read again, and all that is left fails anyway.
  }
  move([&] {
    mutex_.assert_held();
    while (!active_.empty()) complete(MessagePtr(active_.front()), error);
    wanted_.clear();
    for (auto& other : peers_) {
      if (!other) continue;
      for (const Outgoing& out : other->out) {
        if (out.frame.kind == Kind::kRevoke) pending_.fetch_sub(1, std::memory_order_seq_cst);
      }
      *other = Peer{};
      other->broken = true;
    }
    closed_ = true;
    return true;
  });
}

bool Mailbox::withdraw(const Message& message, const std::exception_ptr& error) {
  bool gone = true;
  move([&] {
    mutex_.assert_held();
    const auto place = std::ranges::find_if(active_, [&](auto& it) { return &*it == &message; });
    if (place == active_.end()) return false;  // it is done
    gone = message.sending ? take_back_send(message) : take_back(message);
    if (!gone) return false;
    if (message.sending) write_to(message.peer);
    finished_.emplace_back(std::move(*place), error);  // not by complete(): the group does not fail
    active_.erase(place);
    return true;
  });
  return gone;
}

bool Mailbox::take_back_send(const Message& message) {
  Peer& to = peer(message.peer);
  const auto announced = std::find_if(to.announced.begin(), to.announced.end(),
                                      [&](auto& it) { return &*it.second == &message; });
  const bool eager = announced == to.announced.end();
  const uint64_t id = eager ? 0 : announced->first;
  const auto out = std::find_if(to.out.begin(), to.out.end(), [&](const Outgoing& it) {
    return eager ? it.completes.get() == &message && it.frame.kind == Kind::kEager
                 : it.frame.id == id && it.frame.kind == Kind::kAnnounce;
  });
  const bool unsaid = out != to.out.end() && out->written == 0;
  if (eager && !unsaid) return false;
  if (unsaid) to.out.erase(out);
  if (eager) return true;
  to.announced.erase(announced);
  if (unsaid) return true;
  to.out.emplace_back().frame = {Kind::kRevoke, message.tag, message.type(), 0, id, 0};
  pending_.fetch_add(1, std::memory_order_seq_cst);  // until it is out: see write_to()
  return true;
}

std::exception_ptr Mailbox::error() {
  if (!failed_.load(std::memory_order_acquire)) return nullptr;
  const Lock lock(mutex_);
  return error_;
}

// Nothing happens to one that somebody has failed meanwhile. Callbacks come later.
void Mailbox::complete(const MessagePtr& message, const std::exception_ptr& error) {
  const auto place = std::find(active_.begin(), active_.end(), message);
  if (place == active_.end()) return;
  active_.erase(place);
  if (error && !error_) error_ = error;
  if (error) failed_.store(true, std::memory_order_release);
  finished_.emplace_back(message, error);
}

}  // namespace ringcomm
