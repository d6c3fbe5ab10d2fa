#include "net/peers.h"

namespace ringcomm {

// In the moment before its lock is had, a peer may be forgotten.
Network::Held Network::Peers::meet(const Contact& contact) {
  network_.start();
  while (true) {
    Lock lock(mutex_);
    std::shared_ptr<Peer>& known = peers_[contact.id];
    const bool made = !known;
    if (made) known = make(contact);
    const auto peer = known;
    lock.unlock();
    Held held{peer, Lock(peer->mutex)};
    if (peer->is_forgotten()) continue;
    if (made) peer->wake();
    return held;
  }
}

std::shared_ptr<Network::Peer> Network::Peers::make(const Contact& contact) {
  const auto text = [](const auto& words) {
    return std::string(reinterpret_cast<const char*>(words.data()), sizeof words);
  };
  const Contact& own = network_.contact_;
  const bool first = own.id < contact.id;
  const Contact &low = first ? own : contact, &high = first ? contact : own;
  const Key job = hmac({}, {"job", network_.options_.secret});
  const Key pair = hmac(job, {"pair", text(low.id), text(low.key), text(high.id), text(high.key)});
  const auto rest = resting_.extract(contact.id);
  const SessionNumbers numbers = rest ? rest.mapped().numbers : SessionNumbers();
  return std::make_shared<Peer>(network_, contact, pair, numbers);
}

std::optional<Contact> Network::Peers::contact_of(const ProcessId& id) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto peer = peers_.find(id); peer != peers_.end()) return peer->second->contact;
    if (const auto rest = resting_.find(id); rest != resting_.end()) return rest->second.contact;
  }
  const std::lock_guard lock(directories_mutex_);
  for (const auto& [channel, directory] : directories_) {
    if (const auto contact = directory->contact_of(id)) return contact;
  }
  return std::nullopt;
}

Receiver* Network::Peers::receiver(uint64_t channel, Peer& peer) {
  const std::lock_guard lock(directories_mutex_);
  const auto group = directories_.find(channel);
  return group == directories_.end() ? nullptr : group->second->receiver(peer.contact.id, peer);
}

void Network::Peers::enter(uint64_t channel, Directory& directory) {
  const std::lock_guard lock(directories_mutex_);
  directories_[channel] = &directory;
}

void Network::Peers::leave(uint64_t channel) {
  const std::lock_guard lock(directories_mutex_);
  directories_.erase(channel);
}

Network::Counts Network::Peers::counts() {
  const std::lock_guard lock(mutex_);
  return {.peers = peers_.size(), .awake = awake_.size(), .resting = resting_.size()};
}

std::vector<std::shared_ptr<Network::Peer>> Network::Peers::awake() {
  const std::lock_guard lock(mutex_);
  return awake_;
}

void Network::Peers::wake(const std::shared_ptr<Peer>& peer) {
  const std::lock_guard lock(mutex_);
  awake_.push_back(peer);
}

// Most agree, and are parked when the answer comes.
void Network::Peers::park(Clock::time_point now, size_t most) {
  struct Idle {
    std::shared_ptr<Peer> peer;
    Clock::time_point used_at;
    size_t sockets;
    bool done;
  };
  std::vector<Idle> idle;
  size_t stay = 0;
  for (const auto& peer : awake()) {
    const Lock lock(peer->mutex);
    if (peer->may_be_asked(now)) {
      idle.push_back({peer, peer->used_at(), peer->sockets.size(), peer->is_done(now)});
    } else if (!peer->was_asked(now)) {
      stay += peer->sockets.size();
    }
  }
  std::ranges::sort(idle, std::greater(), &Idle::used_at);
  for (const auto& [peer, used_at, sockets, done] : idle) {
    stay += sockets;
    const Lock lock(peer->mutex);
    if (stay > most || done) peer->ask_to_park(now);
  }
}

// A peer that is forgotten may remember this process, and go on from where it was.
void Network::Peers::let_sleep(Peer& peer) {
  const std::lock_guard lock(mutex_);
  std::erase_if(awake_, [&](const auto& other) { return other.get() == &peer; });
  peer.sleep();
  if (peer.is_held() || !peer.session.at_rest()) return;
  const auto numbers = peer.session.numbers();
  if (numbers != SessionNumbers()) resting_[peer.contact.id] = {peer.contact, numbers};
  peer.forget();
  peers_.erase(peer.contact.id);
}

}  // namespace ringcomm
