// The identity of this host and of this process. Ranks compare it to learn whether they share a
// host.
#pragma once

#include <sys/types.h>

#include "base/cores.h"
#include "net/address.h"
#include "transport/segment.h"

namespace ringcomm {

// The one rule for who shares a host, for the core and for Python: an equal boot id, network
// namespace (abstract sockets live in it) and user; never an environment variable. Ranks that do
// not prove to share a host do not.
struct HostIdentity {
  static constexpr const char* kUnknown = "unknown";  // equals nothing

  std::string host;     // its name, for people
  std::string boot_id;  // of the running kernel
  std::string network;  // inode of the network namespace
  uid_t user = 0;

  bool same_host(const HostIdentity& other) const;
  // Tells whether loopback may lead from one to the other.
  bool may_share_network(const HostIdentity& other) const;
};
// Returns this process's identity. Throws SystemError when nothing can be read.
HostIdentity host_identity();

// A rank's entry in the store. That two share a host is confirmed by mapping the peer's memory.
struct Card : HostIdentity {
  std::string build;      // hash of the engine's source: other builds may plan otherwise
  std::string algorithm;  // that this rank asks for; empty: rank 0 decides
  std::string socket;     // abstract name, random; of the process
  int64_t pid = 0;
  bool tcp = false;    // RINGCOMM_TRANSPORT=tcp there: as if on a host of its own
  Nonce nonce{};       // of this meeting
  int64_t before = 0;  // cards that were in the store when this rank came

  bool shares_host(const Card& other) const { return same_host(other) && !tcp && !other.tcp; }
  std::string to_text() const;
  static Card from_text(const std::string& text, Rank owner);  // throws PeerError
};

// Where the ranks of a group are.
struct Whereabouts {
  std::vector<int> host_of;        // by rank: equal numbers share memory
  std::vector<std::string> names;  // of the hosts
  std::vector<int64_t> pids;       // by rank; empty: not known
  std::vector<Cores> cores;        // of this host's ranks, in their order

  // Counts the hosts. They are numbered from 0, in the order of their first rank.
  int hosts() const;
  int ranks_beside(Rank rank) const;  // on its host, itself included
  int most_ranks() const;             // of the largest host
  std::string text(Rank rank) const;  // "pid 4711 on node3", or "" where that is not known
};

Card make_card();  // throws SystemError
// Throws where ranks would run different plans: of different builds PeerError, of different
// requests UsageError. All ranks see the same cards: so all throw, or none.
void require_agreement(const std::vector<Card>& cards);
// Returns why two ranks do not share memory, where that is a surprise; else "".
std::string why_apart(const std::vector<Card>& cards, Rank first, Rank second);
// Throws UsageError when `theirs`, of a rank on another host, has only addresses that this host has
// as well, such as loopback and docker0's: this rank would look for that one at home.
void refuse_own(const std::vector<Address>& theirs, const std::vector<Address>& own, Rank peer);
// Tells whether that process of this host is stopped, by SIGSTOP or a debugger.
bool is_stopped(pid_t process);

}  // namespace ringcomm
