// A group of ranks: runs collectives in the order of the calls, and messages beside them. Every
// operation ends by its deadline; a failed one carries a message that says why.
//
// The work is done by engines (comm/engine.h), over which a group loops. Once an operation has
// failed the group stays failed: peers may be anywhere in their programs. Any thread may call any
// function.
#pragma once

#include "comm/group_state.h"
#include "comm/host_engine.h"
#include "comm/message_engine.h"
#include "comm/progress.h"
#include "comm/runtime.h"
#include "stream/device_engine.h"
#include "transport/rendezvous.h"

namespace ringcomm {

class Communicator : public std::enable_shared_from_this<Communicator>, private HostSide {
 public:
  // Collective over the group: meets the other ranks through `store` within the timeout.
  static std::shared_ptr<Communicator> create(Store& store, const CommunicatorOptions& options);
  // Makes a group over a transport that exists already (tests).
  Communicator(std::shared_ptr<Transport> transport, const Geometry& geometry,
               const CommunicatorOptions& options,
               std::shared_ptr<Neighbourhood> memory = std::make_shared<Neighbourhood>());
  ~Communicator() override;

  int size() const { return state_.size(); }
  Rank rank() const { return state_.rank(); }
  const Geometry& geometry() const { return geometry_; }
  // The timeout, failures, and the transport.
  GroupState& state() { return state_; }
  const GroupState& state() const { return state_; }
  // Messages that were posted.
  MessageEngine& messages() { return messages_; }
  // The threads that move the group on.
  Progress& progress() { return progress_; }

  // Runs a collective and returns when it is done: on this thread when the group is idle. Throws
  // UsageError (nothing happened), MismatchError, PeerError, TimeoutError (the group has failed).
  void run(const Operation& operation);
  // Queues it. Memory lives until the task is done; on_done is called on the thread that ends it.
  TaskPtr submit(Operation operation, decltype(Request::on_done) on_done = nullptr,
                 Continuation continuation = {},
                 const std::atomic<uint32_t>* gate = nullptr) override;
  // By which a collective would run on the host. Throws UsageError.
  Algorithm algorithm_of(const Operation& operation) const { return host_.algorithm_of(operation); }
  // Starts a send or receive, whose timeout is given.
  void post(const MessagePtr& message) override;
  // Waits until `request` is done or `at_most` has passed: true when done. Throws no error of the
  // request, only the exception of `interrupt`; then messages and blocking tasks are done, too.
  // Only this wait gives a message a deadline: `at_most`, or else the message's timeout. When it
  // has passed, the message ends with an error. If a part of it has moved, the group fails, too.
  bool wait(Request& request, Clock::duration at_most = Clock::duration::max()) {
    return progress_.wait(request, at_most);
  }
  // The same for an operation on a device. After a failure a completed operation may hold no valid
  // result.
  bool wait(const Completion& end, Clock::duration at_most = Clock::duration::max());
  // The engine for tensors of that device; made at first use.
  DeviceEngine& device(int index);
  DeviceEngine* device_in_use() const { return device_.load(std::memory_order_acquire); }
  // Collectives asked for so far; the same on every rank of a correct program.
  uint64_t sequence() const override;
  // What flight recorders show in files: of the host's operations, and of a device's.
  std::vector<std::string> flight_rings() const;

  // Has it pending work, or is a thread in a blocking collective? A worker drives pending work
  // only.
  bool busy();
  // Waits for device work that every rank has already called: it only needs time.
  void wait_for_device();
  // Fails everything pending here and tells the peers. Returns at once.
  void abort(const std::string& reason);
  // Gives pending operations `grace` to end, fails the rest, says goodbye. Idempotent. `drains`: it
  // waits until remote ranks have all bytes, as one must before the process ends.
  void shutdown(Clock::duration grace = std::chrono::seconds(1), bool drains = true);

  // The program ends without a goodbye: remote ranks get the bytes that are on their way.
  void drain();
  // For a forked child: the group is dead here, and the parent's peers must not notice.
  void forked();

 private:
  void post_late(const MessagePtr& message) override { messages_.post_late(message); }
  void await(Request& request) override { wait(request); }
  void wait_for_streams(const std::string& during, const std::function<bool()>& over) override {
    progress_.wait_for_streams(during, over);
  }

  const Geometry geometry_;
  const std::shared_ptr<Neighbourhood> memory_;
  GroupState state_;
  HostEngine host_;
  MessageEngine messages_;
  Progress progress_;
  Mutex device_mutex_;                          // held to make the next
  std::atomic<DeviceEngine*> device_{nullptr};  // lives as long as the group
};

}  // namespace ringcomm
