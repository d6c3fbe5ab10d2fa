// Ranks that meet through a store, as processes or as good as.
#pragma once

#include <memory>
#include <string>

#include "cpp/harness.h"
#include "transport/rendezvous.h"
#include "transport/transport.h"

namespace ringcomm::testing {

inline const SegmentLayout kLayout{0, 64 << 10, 0, 4 << 10};

// The part of a process that all its groups share.
struct Process {
  Neighbours neighbours;
};

// One rank's end: meets the others through the store and keeps the memory mapped.
struct Group {
  MappedGroup memory;
  std::unique_ptr<Transport> transport;

  Group(Process& process, Store& store, const RendezvousOptions& options,
        std::chrono::milliseconds timeout)
      : memory(meet(store, laid_out(options), process.neighbours, Deadline(timeout))),
        transport(std::make_unique<Transport>(options.rank, std::move(memory.peers))) {}

 private:
  static RendezvousOptions laid_out(RendezvousOptions options) {
    options.layout = kLayout;
    options.layout.writers = options.size;
    return options;
  }
};

inline RendezvousOptions options_of(Rank rank, int size, const std::string& name = "test") {
  RendezvousOptions options;
  options.rank = rank;
  options.size = size;
  options.name = name;
  return options;
}

// In a process, or as good as: of its own.
struct End : Process, Group {
  End(Store& store, Rank rank, int size,
      std::chrono::milliseconds timeout = std::chrono::seconds(20))
      : Process(), Group(*this, store, options_of(rank, size), timeout) {}
};

inline void await(Transport& transport, const std::function<bool()>& ready) {
  const Deadline deadline(std::chrono::seconds(20));
  while (!ready()) {
    transport.doorbell().sleep(kAllNews, ready, std::chrono::milliseconds(50));
    require(!deadline.passed(), "waited 20 s");
  }
}

inline void await_signal(Transport& transport, Rank from, int lane, int half, uint64_t count) {
  await(transport, [&] { return transport.arrived(from, lane, half) >= count; });
}

}  // namespace ringcomm::testing
