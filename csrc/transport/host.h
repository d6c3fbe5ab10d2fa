// Who this process is: what ranks compare to learn whether they share a host.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "net/address.h"
#include "transport/segment.h"

namespace ringcomm {

// A rank's entry in the store. "Same host" is an equal boot id and network namespace (abstract
// sockets live in it), confirmed by mapping the peer's memory; never an environment variable.
struct Card {
  std::string host;     // for people
  std::string boot_id;  // of the running kernel
  std::string network;  // inode of the network namespace
  std::string socket;   // abstract name, random
  int64_t pid = 0;
  bool tcp = false;  // RINGCOMM_TRANSPORT=tcp there: as if on a host of its own
  Nonce nonce;

  bool shares_host(const Card& other) const {
    return boot_id == other.boot_id && network == other.network;
  }
  std::string to_text() const;
  static Card from_text(const std::string& text, Rank owner);  // throws PeerError
};

Card make_card();
// Loopback is every host's own: whoever is told it elsewhere would look for this rank at home.
// Throws UsageError when `told`, an address of this rank, is one and a rank is on another host.
void refuse_loopback(const Address& told, Rank self, const std::vector<Card>& cards);
// The same for addresses that every host has for itself, as docker0's, where `theirs` has no other.
void refuse_own(const std::vector<Address>& theirs, const std::vector<Address>& own, Rank peer);
// Is the process at the other end of a Unix socket stopped, by SIGSTOP or a debugger?
bool peer_is_stopped(const Fd& socket);

}  // namespace ringcomm
