#include "stream/announcements.h"

namespace ringcomm {

Descriptor Announcements::announce(const Operation& operation, Algorithm algorithm, bool by_host) {
  Descriptor descriptor = make_descriptor(operation, ++sequence_);
  set_plan(descriptor, algorithm, 0);
  if (by_host) ++by_host_;
  Transport& transport = group_.state.transport();
  Stamps stamps;
  make_stamps(operation, descriptor, stamps);
  // It covers what the lower rank of a pair sends to the higher one, and gets from it.
  const auto stamp = [&](Rank peer) {
    const uint64_t sent = stamps.outgoing(peer, kData), received = stamps.incoming(peer, kData);
    return transport.rank() < peer ? sent * 31 + received : received * 31 + sent;
  };
  for (Rank peer = 0; peer < transport.size(); ++peer) {
    group_.own.stamp(descriptor.sequence, peer).store(stamp(peer), std::memory_order_relaxed);
  }
  transport.announce(Board::kDevice, descriptor);
  try {
    group_.diagnosis.check_peers(descriptor);
  } catch (const PeerError&) {
    verdicts_.await_owed(numbered(descriptor));
    throw;
  }
  for (Rank peer = 0; peer < transport.size(); ++peer) {
    if (peer == transport.rank() ||
        !transport.descriptor(peer, Board::kDevice, descriptor.sequence)) {
      continue;
    }
    const cuda::Area theirs = group_.area(peer);
    const auto& said = theirs.stamp(descriptor.sequence, transport.rank());
    if (said.load(std::memory_order_relaxed) != stamp(peer)) {
      group_.diagnosis.throw_mismatch(descriptor, peer);
    }
  }
  return descriptor;
}

// The k-th message to a peer and its k-th from here are one: they must have one size, one type and
// one tag. As with boards, of the two sides at least one sees what the other has written.
void Announcements::announce(Pending& message) {
  const bool sending = message.sending();
  message.number = ++(sending ? sent_ : received_)[static_cast<size_t>(message.peer)];
  group_.own.message(message.peer, sending, message.number)
      .store(message.number << 48 | message_terms(message.operation), std::memory_order_seq_cst);
  group_.compare(message);
}

}  // namespace ringcomm
