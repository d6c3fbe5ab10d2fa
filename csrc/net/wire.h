// What one channel sees of the session with a peer's process. Any thread may call any function.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "net/frame.h"

namespace ringcomm {

class Wire {
 public:
  virtual ~Wire() = default;
  // As Session's.
  virtual void post(const Frame& frame, const std::byte* payload, std::byte* keep) = 0;
  virtual void post(const Frame& frame, std::vector<std::byte> payload) = 0;
  virtual void settle(uint64_t channel) = 0;
  // What was posted starts on its way now.
  virtual void flush() = 0;
  // The peer's process has ended, or nothing was heard of it for too long.
  virtual bool lost() = 0;
  virtual std::string condition() = 0;  // for people: "alive", "not heard of for 12 s"
};

}  // namespace ringcomm
