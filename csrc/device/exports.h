// The leader's kernel reads and writes the caller's memory where it lies. A rank exports
// allocations as they turn up in operations; the leader maps them when it next enqueues something.
// Until then, and if memory cannot be exported, the rank copies through its window.
#pragma once

#include <array>
#include <deque>
#include <functional>
#include <vector>

#include "device/area.h"
#include "plan/spans.h"

namespace ringcomm::cuda {

// The allocations that one rank exports to the leader.
class Exports {
 public:
  // `socket` gives one to the leader, for descriptors; or null.
  Exports(Api& api, Area own, Area leader, Rank self, std::function<const Fd*()> socket)
      : api_(api), own_(own), leader_(leader), self_(self), socket_(std::move(socket)) {}

  // The address at which the leader sees `span` of the operation `sequence`; 0 where it does not,
  // or not yet.
  uint64_t at_leader(const Span& span, uint64_t sequence);

 private:
  struct Entry {
    Allocation range;
    uint64_t generation = 0;
    uint64_t used = 0;
  };

  int find(const Allocation& range) const;
  void publish(int index, const Span& span);
  void export_as_chunks(int index, const Span& span);

  Api& api_;
  Area own_, leader_;
  const Rank self_;
  const std::function<const Fd*()> socket_;
  std::array<Entry, kExports> entries_;
};

// The exports of one rank that the leader has mapped.
class Imports {
 public:
  Imports(Api& api, Area own, Area peer, Rank of, std::function<const Fd*()> socket)
      : api_(api), own_(own), peer_(peer), of_(of), socket_(std::move(socket)) {}

  // Opens what is new, and closes what was retired when the operations that use it are done.
  void look(uint64_t done);
  void close_all();

 private:
  struct Mapped {
    uint64_t generation = 0;
    std::byte* address = nullptr;
    bool chunks = false;
  };
  struct Retired {
    Mapped mapped;
    uint64_t last;  // the last operation that may use it
  };
  struct Sent {  // descriptors that came, of an entry in one of its generations
    uint64_t index, generation;
    std::vector<Fd> descriptors;
  };

  void renew(int index, uint64_t generation);
  std::byte* open(int index, uint64_t generation);
  std::vector<Fd> receive(int index, uint64_t generation);
  void close(const Mapped& mapped);

  Api& api_;
  Area own_, peer_;
  const Rank of_;
  const std::function<const Fd*()> socket_;
  uint32_t seen_ = 0;  // changes
  std::array<Mapped, kExports> mapped_;
  std::deque<Retired> retired_;
  std::vector<Sent> sent_;
};

}  // namespace ringcomm::cuda
