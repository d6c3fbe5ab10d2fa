// How the ranks of a group find and map one another: cards through the store, then a Unix socket
// between every two ranks, over which they pass the descriptors of their shared memory.
//
// Everything ends by the deadline, in an error that names the ranks concerned. A rank killed at any
// point leaves nothing behind: memfds and abstract sockets go with the process.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "transport/shm.h"
#include "transport/store.h"

namespace ringcomm {

// A process's doorbell, shared by all its groups.
class DoorbellMemory {
 public:
  DoorbellMemory();
  Doorbell bell() const;
  const Fd& fd() const { return fd_; }

 private:
  Fd fd_;
  Mapping mapping_;
};

struct RendezvousOptions {
  Rank rank = 0;
  int size = 1;
  std::string scope;  // run and restart: keeps the keys of an earlier life apart
  SegmentLayout layout;
  std::function<void()> interrupt = [] {};  // called every half second: may throw to give up
};

// A group's memory, mapped. Movable; unmaps at the end.
struct Neighbourhood {
  std::vector<Mapping> mappings;  // segments, then doorbells
  std::vector<ShmPeer> peers;     // peers[rank] is this rank
};

// Collective: every rank of the group calls it. Throws TimeoutError, PeerError, SystemError, or
// UsageError when ranks are not on one host.
Neighbourhood meet(Store& store, const RendezvousOptions& options, const DoorbellMemory& doorbell,
                   const Deadline& deadline);

}  // namespace ringcomm
