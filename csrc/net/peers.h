// The peers of a process: made when one of both has something to say, parked when there are many,
// and forgotten when nobody needs them. Included by the network's own files only.
#pragma once

#include "net/peer.h"

namespace ringcomm {

class Network::Peers {
 public:
  explicit Peers(Network& network) : network_(network) {}

  // Finds or makes the peer, and locks it.
  Held meet(const Contact& contact);
  // Tells how a process is reached that has a group with this one; nothing for any other.
  std::optional<Contact> contact_of(const ProcessId& id);

  // Returns those that have connections, or want them.
  std::vector<std::shared_ptr<Peer>> awake();
  void wake(const std::shared_ptr<Peer>& peer);
  // Lets a peer be that has nothing to do, and forgets it where nobody needs it. Under its lock.
  void let_sleep(Peer& peer);
  // Asks peers to park: those beyond the first `most` connections, and those of no group.
  void park(Clock::time_point now, size_t most);
  Counts counts();  // without the sockets

  // Looks for a channel's directory, and asks that. See Network and Directory.
  Receiver* receiver(uint64_t channel, Peer& peer);
  void enter(uint64_t channel, Directory& directory);
  void leave(uint64_t channel);

 private:
  struct Rest {  // a peer that nobody needs now: another session would number its frames anew
    Contact contact;
    SessionNumbers numbers;
  };
  std::shared_ptr<Peer> make(const Contact& contact);

  Network& network_;
  std::mutex directories_mutex_;                // held while one of them is asked
  std::map<uint64_t, Directory*> directories_;  // by channel
  std::mutex mutex_;                            // guards what follows, for moments
  std::map<ProcessId, std::shared_ptr<Peer>> peers_;
  std::map<ProcessId, Rest> resting_;
  std::vector<std::shared_ptr<Peer>> awake_;
};

}  // namespace ringcomm
