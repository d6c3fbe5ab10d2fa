// One channel's view of the session with a peer's process. Any thread may call any function.
#pragma once

#include <optional>
#include <string>

#include "base/deadline.h"
#include "net/frame.h"

namespace ringcomm {

class Receiver;

class Wire {
 public:
  virtual ~Wire() = default;
  // Has frames of this channel go to `receiver` until close(); before and after, they are dropped.
  // close() copies what the peer does not have yet: the channel's memory is free afterwards.
  virtual void open(uint64_t channel, Receiver* receiver) = 0;
  virtual void close(uint64_t channel) = 0;
  // Post and reclaim as Session does.
  virtual void post(const Frame& frame, Payload payload) = 0;
  virtual void reclaim_lent(uint64_t channel) = 0;
  // Starts sending the posted frames.
  virtual void flush() = 0;
  // Tells whether anything has been said or heard.
  virtual bool reached() = 0;
  // Tells whether both have agreed to have no connection, until one of them has something to say.
  virtual bool parked() { return false; }
  // Counts the frames that the peer has not acknowledged. Asks the peer for an acknowledgement.
  virtual uint64_t undelivered() = 0;
  virtual uint64_t resent() const { return 0; }  // frames, so far
  virtual uint64_t broken() const { return 0; }  // connections that were needed, so far
  // Connects the peer, or finds that it is dead: somebody waits for it.
  virtual void need() = 0;
  // Has NetworkOptions::alarmed() called soon, by the network thread: a receiver has heard what
  // concerns other ranks. Only while a frame is delivered.
  virtual void alarm() {}
  // Tells whether the peer's process has ended, or was not heard of for too long.
  virtual bool lost() = 0;
  virtual std::string condition() = 0;  // for people: "alive", or why it is lost
};

}  // namespace ringcomm
