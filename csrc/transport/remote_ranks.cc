#include "transport/remote_ranks.h"

namespace ringcomm {

Contacts::Contacts(Mapping text, uint64_t bytes, int ranks) : text_(std::move(text)) {
  const std::string_view all(reinterpret_cast<const char*>(text_.data()), bytes);
  size_t at = 0;
  for (Rank rank = 0; rank < ranks; ++rank) {
    begins_.push_back(static_cast<uint32_t>(at));
    at = std::min(all.find('\n', at), all.size() - 1) + 1;
  }
  begins_.push_back(static_cast<uint32_t>(at));
  for (Rank rank = 0; rank < ranks; ++rank) ids_.push_back(of(rank).id);
}

Contact Contacts::of(Rank rank) const {
  const size_t begin = begins_[static_cast<size_t>(rank)];
  const size_t end = begins_[static_cast<size_t>(rank) + 1];
  const auto* const text = reinterpret_cast<const char*>(text_.data());
  return Contact::from_text(std::string(text + begin, text + std::max(end, begin + 1) - 1));
}

Rank Contacts::rank_of(const ProcessId& id) const {
  const auto place = std::ranges::find(ids_, id);
  return place == ids_.end() ? -1 : static_cast<Rank>(place - ids_.begin());
}

RemoteRanks::~RemoteRanks() {
  if (network_ != nullptr) network_->leave(channel_);
}

void RemoteRanks::open(Network& network, uint64_t channel, Contacts contacts,
                       const RemotePeer::Ends& ends) {
  network_ = &network;
  channel_ = channel;
  contacts_ = std::move(contacts);
  ends_ = ends;
  ends_.opened = true;
  ends_.remote_ranks = this;
  network.enter(channel, *this);
}

void RemoteRanks::add(std::unique_ptr<RemotePeer> peer) {
  const std::lock_guard lock(mutex_);
  auto& slot = peers_[static_cast<size_t>(peer->rank())];
  slot.store(peer.get(), std::memory_order_release);  // partner: find()
  made_.push_back(std::move(peer));
}

RemotePeer& RemoteRanks::get(Rank rank) {
  if (RemotePeer* const peer = find(rank)) return *peer;
  network_->reach(contacts_.of(rank), channel_);
  return *find(rank);
}

void RemoteRanks::forget() {
  network_ = nullptr;
  for_each([](RemotePeer& peer) { peer.forget(); });
}

bool RemoteRanks::keep_failure_of(Rank rank, const RankState& state) {
  const std::lock_guard lock(mutex_);
  if (told_rank_.load(std::memory_order_relaxed) >= 0) return false;
  told_ = state;
  told_rank_.store(rank, std::memory_order_release);  // partner: told_of()
  return true;
}

std::optional<Contact> RemoteRanks::contact_of(const ProcessId& id) {
  const Rank rank = contacts_.rank_of(id);
  return rank < 0 ? std::nullopt : std::optional(contacts_.of(rank));
}

Receiver* RemoteRanks::receiver(const ProcessId& id, Wire& wire) {
  RemotePeer::Ends ends = ends_;
  ends.peer = contacts_.rank_of(id);
  if (ends.peer < 0) return nullptr;
  if (RemotePeer* const peer = find(ends.peer)) return peer;
  add(std::make_unique<RemotePeer>(wire, channel_, ends));
  return find(ends.peer);
}

}  // namespace ringcomm
