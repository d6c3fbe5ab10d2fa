// The rendezvous: the ranks of a group find and map one another. They put cards into the store, and
// rank 0 tells each which ranks share its host. Then each passes the descriptor of its shared
// memory to every other rank of its host, over the socket that joins their processes
// (transport/neighbours.h).
//
// Ranks on other hosts are reached over the process's network instead (net/network.h), when a plan
// first talks to them. The first rank of each host reads how, and hands that to the host's others.
//
// Everything ends by the deadline, in an error that names the ranks concerned. A rank killed at any
// point leaves nothing behind in this host: memfds and abstract sockets go with the process.
#pragma once

#include <functional>

#include "base/deadline.h"
#include "net/network.h"
#include "transport/neighbours.h"
#include "transport/store.h"
#include "transport/transport.h"

namespace ringcomm {

struct RendezvousOptions {
  Rank rank = 0;
  int size = 1;
  std::string name;          // of the group
  std::vector<int> members;  // their ranks in the whole job; empty: the same
  uint64_t world = 0;        // the channel of the job's group that they are part of; 0: of none
  SegmentLayout layout;      // of a group on one host
  struct Across {
    SegmentLayout host;  // of a rank's segment on its host
    SegmentLayout pair;  // of each way between two ranks on two hosts
  };
  // Gives the layouts of a group on several hosts, with so many ranks on this one, and on the
  // largest.
  std::function<Across(int here, int most, int distance)> across;
  Cores cores;             // of this rank
  bool tcp = false;        // ranks of one host are as if on others
  std::string host;        // this host's name; "": its hostname
  std::string costs_text;  // of rank 0, one line: all get it with the cards
  // Returns the algorithm that this rank asks for: one word, or none. If it throws, the others hear
  // of it.
  std::function<std::string()> algorithm = [] { return std::string(); };
  std::function<Network&(const std::string& store_host)> network;
  // Tells how far the host with these addresses is, as in Geometry::across_hosts.
  std::function<int(const std::vector<std::string>& addresses)> distance = [](auto&) { return 0; };
  std::function<void()> interrupt = [] {};  // called often: may throw to give up
  bool lingers = true;  // at the end, for a moment, so that all hear what rank 0 says last
  std::function<void(const std::string& text)> warn = [](const std::string&) {};
};

// A group's memory, mapped. Movable; unmaps at the end, and the peers see that this rank has left.
struct MappedGroup : Whereabouts {
  MappedGroup() = default;
  MappedGroup(MappedGroup&&) = default;  // never assigned: peers go before their memory
  ~MappedGroup();

  std::vector<Mapping> mappings;              // segments, this rank's first
  std::vector<ShmPeer> peers;                 // the ranks of this host
  std::unique_ptr<RemoteRanks> remote_ranks;  // null: there are none
  int distance = 0;                           // between hosts, as Geometry::across_hosts has it
  std::string costs_text;                     // of rank 0
  std::string algorithm;                      // that rank 0 asks for; empty: none
};

// Makes the group. Every rank of it calls this. Throws TimeoutError, PeerError, SystemError.
MappedGroup meet(Store& store, const RendezvousOptions& options, Neighbours& neighbours,
                 const Deadline& deadline);

}  // namespace ringcomm
