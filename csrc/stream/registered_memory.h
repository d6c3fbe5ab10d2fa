// Memory that a program registers: all ranks map it at once, so that no operation copies it first.
// The ranks meet as at a capture. Then it stays mapped as a graph's memory does, until the program
// says otherwise. Work under way ends first, for up to two seconds.
#pragma once

#include <set>

#include "stream/announcements.h"
#include "stream/rendezvous.h"

namespace ringcomm {

// One thread at a time may call it, on the group's device.
class RegisteredMemory {
 public:
  using Named = std::map<std::string, std::vector<Span>>;

  RegisteredMemory(Verdicts& verdicts, Announcements& announcements, DeviceRendezvous& rendezvous,
                   cuda::Peers& peers, const Logger& logger)
      : verdicts_(verdicts),
        announcements_(announcements),
        rendezvous_(rendezvous),
        peers_(peers),
        logger_(logger) {}

  // Work as DeviceEngine's register_memory() and deregister_memory(), once the group has met.
  void add(const std::string& asked, const Named& memory, const Deadline& deadline);
  bool remove(const std::string& name);

 private:
  void log_registration(const std::string& asked,
                        const std::vector<cuda::Registered>& results) const;

  Verdicts& verdicts_;
  Announcements& announcements_;
  DeviceRendezvous& rendezvous_;
  cuda::Peers& peers_;
  const Logger& logger_;
  std::set<std::string> names_;
};

}  // namespace ringcomm
