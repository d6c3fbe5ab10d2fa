// The peers of a process: made when one of both has something to say, parked when there are many,
// and forgotten when nobody needs them.
#include "net/peer.h"

namespace ringcomm {

void Network::start() {
  if (!thread_.joinable()) thread_ = std::thread(&Network::run, this);
}

Wire& Network::reach(const Contact& contact) {
  check_tls(contact);
  const Held held = meet(contact);
  held.peer->keep();
  return *held.peer;
}

Wire& Network::reach(const Contact& contact, uint64_t channel) {
  check_tls(contact);
  const Held held = meet(contact);
  held.peer->receiver_of(channel);
  return *held.peer;
}

void Network::check_tls(const Contact& contact) const {
  RINGCOMM_CHECK(contact.tls == contact_.tls, "TLS is ", contact_.tls, " here and ",
                 contact.tls.substr(0, 20), " at ", contact.addresses[0].to_text(),
                 ": set RINGCOMM_TLS and its files alike on every rank");
}

void Network::enter(uint64_t channel, Directory& directory) {
  {
    const std::lock_guard lock(mutex_);
    start();
  }
  const std::lock_guard lock(directories_mutex_);
  directories_[channel] = &directory;
}

void Network::leave(uint64_t channel) {
  const std::lock_guard lock(directories_mutex_);
  directories_.erase(channel);
}

Network::Counts Network::counts() {
  const std::lock_guard lock(mutex_);
  return {peers_.size(), awake_.size(), resting_.size(), links_.size()};
}

// In the moment before its lock is had, a peer may be forgotten.
Network::Held Network::meet(const Contact& contact) {
  while (true) {
    const auto [peer, made] = find_or_make(contact);
    Held held{peer, Lock(peer->mutex)};
    if (peer->forgotten) continue;
    if (made) peer->wake();
    return held;
  }
}

std::pair<std::shared_ptr<Network::Peer>, bool> Network::find_or_make(const Contact& contact) {
  const std::lock_guard lock(mutex_);
  start();
  auto& peer = peers_[contact.id];
  if (peer) return {peer, false};
  const auto text = [](const auto& words) {
    return std::string(reinterpret_cast<const char*>(words.data()), sizeof words);
  };
  const bool first = contact_.id < contact.id;
  const Contact& low = first ? contact_ : contact;
  const Contact& high = first ? contact : contact_;
  const Key job = hmac({}, {"job", options_.secret});
  const Key pair = hmac(job, {"pair", text(low.id), text(low.key), text(high.id), text(high.key)});
  const auto rest = resting_.extract(contact.id);
  peer =
      std::make_shared<Peer>(*this, contact, pair, rest ? rest.mapped().numbers : SessionNumbers());
  return {peer, true};
}

// Null: it is of no group here.
std::optional<Contact> Network::contact_of(const ProcessId& id) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = peers_.find(id); found != peers_.end()) return found->second->contact;
    if (const auto found = resting_.find(id); found != resting_.end()) return found->second.contact;
  }
  const std::lock_guard lock(directories_mutex_);
  for (const auto& [channel, directory] : directories_) {
    if (const auto contact = directory->contact_of(id)) return contact;
  }
  return std::nullopt;
}

// ---- beyond what is needed

// Asks those whose connections should go. Most agree, and are parked when the answer comes.
void Network::park(Clock::time_point now) {
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
    if (stay > most_connections_ || done) peer->ask_to_park(now);
  }
}

// Under the peer's lock. It has nothing to do, and where nobody needs it, it is forgotten. The peer
// may remember this process, and go on from where it was.
void Network::let_sleep(Peer& peer) {
  const std::lock_guard lock(mutex_);
  std::erase_if(awake_, [&](const auto& each) { return each.get() == &peer; });
  const auto numbers = peer.session.numbers();
  if (peer.is_held() || !peer.session.at_rest()) return;
  if (numbers != SessionNumbers()) resting_[peer.contact.id] = {peer.contact, numbers};
  peer.forgotten = true;
  peers_.erase(peer.contact.id);
}

}  // namespace ringcomm
