// How the ranks of a group find and map one another: cards through the store, then a Unix socket
// between every two ranks, over which they pass the descriptors of their shared memory.
//
// Ranks on other hosts are reached over the process's network instead (net/network.h), which they
// meet through the store as well.
//
// Everything ends by the deadline, in an error that names the ranks concerned. A rank killed at any
// point leaves nothing behind: memfds and abstract sockets go with the process.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "net/network.h"
#include "transport/store.h"
#include "transport/transport.h"

namespace ringcomm {

// A process's doorbell, shared by all its groups.
class DoorbellMemory {
 public:
  DoorbellMemory();
  Doorbell bell() const;
  const Fd& fd() const { return fd_; }

 private:
  Fd fd_, event_;
  Mapping mapping_;
};

struct RendezvousOptions {
  Rank rank = 0;
  int size = 1;
  std::string scope;            // run and restart: keeps the keys of an earlier life apart
  SegmentLayout layout;         // of a group on one host
  SegmentLayout layout_across;  // of one on several
  InboxLayout first_inbox;      // of rank 0 in layout_across; the others follow
  bool tcp = false;             // ranks of one host are as if on others
  std::string word;             // rank 0's, one line: all get it with the cards
  std::function<Network&(const std::string& store_host)> network;
  std::function<void()> interrupt = [] {};  // called every half second: may throw to give up
};

// A group's memory, mapped. Movable; unmaps at the end.
struct Neighbourhood {
  std::vector<Mapping> mappings;  // segments, then doorbells
  std::vector<ShmPeer> peers;     // peers[rank] is this rank
  std::vector<int> host_of;       // ranks with equal numbers share memory
  std::string word;               // rank 0's
};

// Collective: every rank of the group calls it. Throws TimeoutError, PeerError, SystemError.
Neighbourhood meet(Store& store, const RendezvousOptions& options, const DoorbellMemory& doorbell,
                   const Deadline& deadline);

}  // namespace ringcomm
