// The peers of a process: made when one of both has something to say, parked when there are many,
// and forgotten when nobody needs them.
#include "net/peer.h"

namespace ringcomm {

void Network::start() {
  if (!thread_.joinable()) thread_ = std::thread(&Network::run, this);
}

Wire& Network::reach(const Contact& contact) {
  check_tls(contact);
  const std::lock_guard lock(mutex_);
  Peer& peer = meet(contact);
  peer.keep();
  return peer;
}

Wire& Network::reach(const Contact& contact, uint64_t channel) {
  check_tls(contact);
  const std::lock_guard lock(mutex_);
  Peer& peer = meet(contact);
  peer.receiver_of(channel);
  return peer;
}

void Network::check_tls(const Contact& contact) const {
  RINGCOMM_CHECK(contact.tls == contact_.tls, "TLS is ", contact_.tls, " here and ",
                 contact.tls.substr(0, 20), " at ", contact.addresses[0].to_text(),
                 ": set RINGCOMM_TLS and its files alike on every rank");
}

void Network::enter(uint64_t channel, Directory& directory) {
  const std::lock_guard lock(mutex_);
  start();
  directories_[channel] = &directory;
}

void Network::leave(uint64_t channel) {
  const std::lock_guard lock(mutex_);
  directories_.erase(channel);
}

Network::Counts Network::counts() {
  const std::lock_guard lock(mutex_);
  return {peers_.size(), awake_.size(), resting_.size(), links_.size()};
}

Network::Peer& Network::meet(const Contact& contact) {
  start();
  auto& peer = peers_[contact.id];
  if (peer) return *peer;
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
      std::make_unique<Peer>(*this, contact, pair, rest ? rest.mapped().numbers : SessionNumbers());
  peer->wake();
  return *peer;
}

// Null: it is of no group here.
Network::Peer* Network::find(const ProcessId& id) {
  if (const auto found = peers_.find(id); found != peers_.end()) return found->second.get();
  for (const auto& [channel, directory] : directories_) {
    if (const auto contact = directory->contact_of(id)) return &meet(*contact);
  }
  if (const auto found = resting_.find(id); found != resting_.end()) {
    return &meet(Contact(found->second.contact));
  }
  return nullptr;
}

// ---- beyond what is needed

// Asks those whose connections should go. Most agree, and are parked when the answer comes.
void Network::park(Clock::time_point now) {
  std::vector<Peer*> idle;
  size_t stay = 0;
  for (Peer* peer : awake_) {
    if (peer->may_be_asked(now)) {
      idle.push_back(peer);
    } else if (!peer->was_asked(now)) {
      stay += static_cast<size_t>(peer->sockets);
    }
  }
  std::ranges::sort(idle, std::greater(), &Peer::used_at);
  for (Peer* peer : idle) {
    stay += static_cast<size_t>(peer->sockets);
    if (stay > options_.most_connections || peer->is_done(now)) peer->ask_to_park(now);
  }
}

// Nobody needs it. The peer may remember this process, and go on from where it was.
void Network::forget(Peer& peer) {
  const auto numbers = peer.session.numbers();
  if (peer.is_held() || !peer.session.at_rest()) return;
  if (numbers != SessionNumbers()) resting_[peer.contact.id] = {peer.contact, numbers};
  peers_.erase(peer.contact.id);
}

}  // namespace ringcomm
