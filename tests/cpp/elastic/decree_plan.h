// The events of a simulated world: who runs where, which links are cut, who dies, stops, leaves and
// joins, and when. Tests write them by hand; decree_schedules.h makes them from a seed.
#pragma once

#include <algorithm>
#include <vector>

#include "cpp/harness.h"
#include "elastic/decree.h"

namespace ringcomm::testing {

using Tick = int;
inline constexpr auto kTick = std::chrono::milliseconds(20);
inline constexpr Tick kSilence = 60;       // a member that is silent for so long is suspected
inline constexpr int kMostProcesses = 12;  // eight members, and those that join later
inline constexpr int kMostHosts = kMostProcesses + 1;  // the store may have one of its own

// The rules of the production code, and those on which it relies.
struct Rules {
  DecreeRules decree;
  bool freeze = true;      // a member that meets takes no further part in a vote
  bool vote = true;        // a member tells of a vote that it has begun
  bool refusal = true;     // a host that refuses proves no death
  bool last_words = true;  // the slip of a dead neighbour is read before its death counts
  bool reread = true;      // a member that comes to an epoch looks at all slips once more
  bool confirm = true;     // a guest becomes a member when it has the state
  bool give_up = true;     // a member that does not come is given up, though it lives
  bool drop = true;        // members leave whose unit has lost one
};

// While it lasts, nothing passes from the hosts `from` to the hosts `to` (sets of bits). With
// `refuses`, the senders are told so at once, as by a firewall, though the others live. It may
// refuse some connections and let others pass.
struct Cut {
  Tick begin, end;
  uint32_t from, to;
  bool refuses = false, passes = false;
};
inline constexpr uint32_t kEverywhere = ~uint32_t{0};
inline uint32_t bit(int at) { return uint32_t{1} << at; }

struct Fault {
  enum class Kind : uint8_t {
    kKill,     // a process, after `length` more of its acts
    kPower,    // a host
    kStop,     // a process does nothing for `length`
    kBusy,     // a member does not come to a meeting for `length`
    kHang,     // a member does nothing any more, and lives
    kLeave,    // a member asks to go, with the end of a step
    kQuit,     // a member goes at once
    kJoin,     // a process asks to join
    kSuspect,  // a member gives up another of its host, and is wrong
    kStore,    // the store ends
  };
  Tick tick;
  Kind kind;
  int who = 0;
  int length = 0;
};

// A process dies when it comes to this point, after so many more acts. Only `to` hear of them, and
// perhaps late.
struct Trap {
  enum class Point : uint8_t { kPromises, kProposes, kAccepts, kDecides };
  int who;
  Point point;
  int acts = 0;
  uint32_t to = kEverywhere;
  bool late = false;
  uint32_t epoch = 0;  // in this one or later
};

struct Plan {
  int size = 2;
  int unit = 1;            // so many ranks hold a copy of the model together, one after another
  std::vector<int> hosts;  // of each process
  int store_host = 0;
  bool has_store = true;
  bool applies_first = false;  // a member applies the step of a decision, then tells others
  Tick latency = 4;            // the longest
  int loss = 10;               // percent of the slips, until all is calm
  int echo = 12;               // percent of them come once more
  struct {
    Tick least, most;
  } late{1, 40};  // and then so late
  std::vector<Cut> cuts;
  std::vector<Fault> faults;  // by tick
  std::vector<Trap> traps;
  Tick calm = 0;  // nothing happens after it

  // Members on hosts of their own, and so is the store.
  static Plan apart(int size) {
    Plan plan;
    plan.size = size;
    for (int i = 0; i < size; ++i) plan.hosts.push_back(i);
    plan.store_host = size;
    return plan;
  }

  void cut(Tick begin, Tick end, uint32_t from, uint32_t to, bool both = true) {
    cuts.push_back({begin, end, from, to});
    if (both) cuts.push_back({begin, end, to, from});
    calm = std::max(calm, end);
  }
  // Nothing passes in either direction. Those that are refused know it at once; the others see
  // silence.
  void refuse(Tick begin, Tick end, uint32_t from, uint32_t to, bool both = true) {
    cuts.push_back({begin, end, from, to, true});
    cuts.push_back({begin, end, to, from, both});
    calm = std::max(calm, end);
  }
  void refuse_some(Tick begin, Tick end, uint32_t from, uint32_t to) {
    cuts.push_back({begin, end, from, to, true, true});
    calm = std::max(calm, end);
  }
  void add(const Fault& fault) {
    const auto later = [&](const Fault& other) { return other.tick > fault.tick; };
    faults.insert(std::ranges::find_if(faults, later), fault);
    calm = std::max(calm, fault.tick + fault.length);
  }
  void kill(int who, Tick tick, int acts = 0) { add({tick, Fault::Kind::kKill, who, acts}); }
  void trap(int who, Trap::Point point, int acts = 0) { traps.push_back({who, point, acts}); }
};

}  // namespace ringcomm::testing
