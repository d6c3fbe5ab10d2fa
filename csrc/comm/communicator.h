// A group of ranks: runs collectives in the order of the calls, and messages beside them. Every
// operation ends by its deadline; a failed one carries a message that says why.
//
// The work is done by engines (group/engine.h), over which a group loops. Once an operation has
// failed the group stays failed: peers may be anywhere in their programs. Any thread may call any
// function.
#pragma once

#include "comm/group_device.h"
#include "comm/groups.h"
#include "progress/workers.h"
#include "transport/rendezvous.h"

namespace ringcomm {

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  // Makes the group with its other ranks, which this one meets through `store` within the timeout.
  static std::shared_ptr<Communicator> create(Store& store, const CommunicatorOptions& options);
  // Makes a group over a transport that exists already (tests).
  Communicator(std::shared_ptr<Transport> transport, const Geometry& geometry,
               const CommunicatorOptions& options,
               std::shared_ptr<MappedGroup> memory = std::make_shared<MappedGroup>());
  ~Communicator();

  int size() const { return state_.size(); }
  Rank rank() const { return state_.rank(); }
  const Geometry& geometry() const { return geometry_; }
  GroupState& state() { return state_; }  // its timeout, failures, and transport
  const GroupState& state() const { return state_; }
  HostEngine& host() { return host_; }  // queues collectives
  MessageEngine& messages() { return messages_; }
  Progress& progress() { return progress_; }  // the threads that move the group on
  GroupDevice& device() { return device_; }

  // Runs a collective and returns when it is done: on this thread when the group is idle. Throws
  // UsageError (nothing happened), MismatchError, PeerError, TimeoutError (the group has failed).
  void run(const Operation& operation);
  // Waits as Progress::wait() does.
  bool wait(Request& request, Clock::duration at_most = Clock::duration::max()) {
    return progress_.wait(request, at_most);
  }
  // Returns how many collectives were asked for so far: the same on every rank of a correct
  // program.
  uint64_t sequence() const;
  // Returns flight records as files have them: of the host's operations, and of a device's.
  std::vector<std::string> flight_rings() const;

  // Fails everything pending here and tells the peers. Returns at once.
  void abort(const std::string& reason);
  // Gives pending operations `grace` to end, fails the rest, and says goodbye. A second call does
  // nothing. `drains`: waits until remote ranks have all bytes, which is needed before the process
  // ends.
  void shutdown(Clock::duration grace = std::chrono::seconds(1), bool drains = true);

  // Waits until remote ranks have the bytes that are on their way, as long as they take some. Call
  // it where the program ends without a goodbye.
  void drain();
  // Lets go of the parent's group in a forked child: its peers must not notice.
  void forked();

 private:
  const Geometry geometry_;
  const std::shared_ptr<MappedGroup> memory_;
  GroupState state_;
  HostEngine host_;
  MessageEngine messages_;
  Progress progress_;
  GroupDevice device_;
};

}  // namespace ringcomm
