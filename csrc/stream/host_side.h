// The host's engines of a group, for operations on a device that go through memory of the host.
#pragma once

#include "comm/host_engine.h"
#include "comm/mailbox.h"

namespace ringcomm {

class HostSide {
 public:
  virtual ~HostSide() = default;

  // Returns how many collectives were asked for so far, on host and device.
  virtual uint64_t sequence() const = 0;
  // Queues a collective. It begins, and so does each further piece, once `gate` has counted it.
  virtual TaskPtr submit(Operation operation, decltype(Request::on_done) on_done,
                         Continuation continuation, const std::atomic<uint32_t>* gate) = 0;
  virtual void post(const MessagePtr& message) = 0;
  // Posts a message that was asked for before the group may have failed or left.
  virtual void post_late(const MessagePtr& message) = 0;
  // Waits until it is done. Throws no error of the request.
  virtual void await(Request& request) = 0;
  // Waits, with the checks of a wait, for streams that make it `over`. Throws the error that ends
  // `during`.
  virtual void wait_for_streams(const std::string& during, const std::function<bool()>& over) = 0;
};

}  // namespace ringcomm
