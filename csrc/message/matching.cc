// Mailbox: matches messages with receives.

#include "message/mailbox.h"

namespace ringcomm {

void Mailbox::post_receive(const MessagePtr& message) {
  for (Rank rank = 0; rank < transport_.size(); ++rank) {
    if (message->peer != Message::kAnySource && message->peer != rank) continue;
    if (!is_used(rank)) continue;
    auto& list = peer(rank).unexpected;
    const auto place = std::ranges::find(list, message->tag,
                                         [](const Arrived& arrived) { return arrived.frame.tag; });
    if (place == list.end()) continue;
    Arrived arrived = std::move(*place);
    list.erase(place);
    peer(rank).kept -= arrived.body.size();
    take(message, rank, arrived);
    return;
  }
  const auto later = [&](const MessagePtr& other) { return other->ticket > message->ticket; };
  const auto last = std::find_if_not(wanted_.rbegin(), wanted_.rend(), later);
  wanted_.insert(last.base(), message);
}

// Gives a message that arrived earlier to the receive that wants it.
void Mailbox::take(const MessagePtr& message, Rank rank, Arrived& arrived) {
  if (auto error = mismatch(*message, rank, arrived.frame)) {
    complete(message, error);
    return;
  }
  message->source = rank;
  if (arrived.frame.kind == Kind::kAnnounce) {
    clear_to_send(rank, arrived.frame, message);
    write_to(rank);
    return;
  }
  std::memcpy(message->data.data, arrived.body.data(), arrived.body.size());
  complete(message, nullptr);
}

std::exception_ptr Mailbox::mismatch(const Message& message, Rank rank,
                                     const MessageHeader& frame) const {
  if (frame.bytes == message.data.bytes && frame.type == message.type()) return nullptr;
  const uint32_t theirs = frame.type & 0xff;
  const DType dtype = theirs < uint32_t{kDTypes} ? static_cast<DType>(theirs) : DType::kUint8;
  return std::make_exception_ptr(
      MismatchError(str(message.describe(), ": rank ", rank, " sent ", to_string(dtype), "[",
                        frame.bytes / size_of(dtype),
                        "] with this tag: give recv a tensor of the same dtype and "
                        "number of elements as send's")));
}

// The sender has taken an announcement back. The receiver that it was given to waits on, in its
// old place.
void Mailbox::revoked(Rank rank, uint64_t id) {
  Peer& from = peer(rank);
  std::erase_if(from.unexpected, [&](const Arrived& arrived) {
    return arrived.frame.kind == Kind::kAnnounce && arrived.frame.id == id;
  });
  const auto place = from.incoming.find(id);
  if (place == from.incoming.end() || place->second.got > 0) return;
  const MessagePtr message = place->second.message;
  from.incoming.erase(place);
  if (std::find(active_.begin(), active_.end(), message) == active_.end()) return;
  message->source = Message::kAnySource;
  post_receive(message);
}

// The oldest receive that wants this message, taken off the list.
MessagePtr Mailbox::match(Rank rank, const MessageHeader& frame) {
  const auto place = std::find_if(wanted_.begin(), wanted_.end(), [&](const MessagePtr& message) {
    return message->tag == frame.tag &&
           (message->peer == Message::kAnySource || message->peer == rank);
  });
  if (place == wanted_.end()) return nullptr;
  MessagePtr message = *place;
  wanted_.erase(place);
  return message;
}

// A receive that has not been given a message.
bool Mailbox::take_back(const Message& message) {
  return std::erase_if(wanted_, [&](const MessagePtr& other) { return &*other == &message; }) > 0;
}

}  // namespace ringcomm
