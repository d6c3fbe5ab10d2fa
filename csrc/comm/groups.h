// The groups of this process, and what they have in common: the network, the costs between hosts,
// and the end of the program.
#pragma once

#include "group/process.h"
#include "net/network.h"
#include "plan/topology.h"

namespace ringcomm {

class Communicator;

class Groups;
extern template class PerProcess<Groups>;  // libringcomm.so has the only one

class Groups {
 public:
  // Makes the process first, because where it forks, a part that was made earlier is locked later.
  static Groups& get() {
    Process::get();
    return PerProcess<Groups>::get();
  }
  Groups();

  // Lists a group, so that a forked child can let go of it, and the program's end close it.
  void attach(Communicator* group);
  void detach(Communicator* group);
  // Returns the group of the whole job: the first that is not made of some ranks of another.
  std::shared_ptr<Communicator> world();
  void offer_world(const std::shared_ptr<Communicator>& group);

  // Makes the network when the first group needs it: threads and sockets that one host has no use
  // for.
  Network& network(const std::string& store_host);
  // Returns the costs that a group's rank 0 tells the others, as plan/topology.h has them: it reads
  // the file that RINGCOMM_COSTS names, for every group anew. If that fails, the text is "!" and
  // the error. Other processes keep the text: they may be rank 0 of the next group.
  std::string costs_text();
  // Returns the topology in rank 0's text. Throws UsageError if the text is an error.
  Topology adopt(const std::string& costs_text);

  // Returns the flight recorders of all groups, as files have them.
  std::vector<std::string> flight_rings();
  // Asks all peers of groups that have not failed to write their flight records.
  void ask_for_records();
  // Lets groups hear that they have failed at a peer, also where nobody calls anything. Returns how
  // often peers have asked for flight records.
  uint64_t hear_peers();
  // Ends the program's groups. Pending work has `grace` in all to end, and the peers get a goodbye.
  // If the program ends because of an error, the peers learn that error. Returns as Workers::end().
  static std::vector<int> close_all(Clock::duration grace, const std::string& error);

  void before_fork() RINGCOMM_UNCHECKED_LOCKS;
  void after_fork() RINGCOMM_UNCHECKED_LOCKS;
  void forked() RINGCOMM_UNCHECKED_LOCKS;

 private:
  std::vector<std::shared_ptr<Communicator>> alive();
  void pass_on();
  static void at_exit();

  Mutex mutex_;
  std::vector<Communicator*> groups_ RINGCOMM_GUARDED_BY(mutex_);
  std::weak_ptr<Communicator> world_ RINGCOMM_GUARDED_BY(mutex_);
  std::unique_ptr<Network> network_ RINGCOMM_GUARDED_BY(mutex_);
  Arena* arena_ RINGCOMM_GUARDED_BY(mutex_) = nullptr;  // the process's, from the first group on
  std::string costs_text_ RINGCOMM_GUARDED_BY(mutex_);
};

}  // namespace ringcomm
