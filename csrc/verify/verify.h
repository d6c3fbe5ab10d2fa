// Proves plans without hardware: executes all ranks' plans of a sequence of operations
// symbolically, under vector clocks, and returns the first violation as a sentence, or "".
//
// Checked: every element of every output holds each contribution exactly once, in rank order for
// direct plans, with exactly one final reduction, added up alike by all ranks of an all_reduce;
// inputs stay as they were; no operand leaves its memory or cuts an element; each byte of shared
// memory has one writer; nothing is read before it was written in the same operation; reads and
// writes are ordered by signals, where the source of a remote copy counts as read until the
// receiver's matching wait; the same for the stamps that signals leave; no deadlock; no signal left
// over; when an operation ends anywhere, all have begun it. Matching of signals is static (the k-th
// wait meets the k-th signal), so the order of events does not depend on the interleaving: one
// clean run proves that there is no race.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "plan/plan.h"
#include "plan/shape.h"

namespace ringcomm {

// One operation of a group: each rank's shape, and the plan that it runs.
struct Program {
  std::vector<Shape> shapes;
  std::vector<Plan> plans;
  bool in_place = false;  // input and output share memory as torch's in-place forms do
};

// Makes a program of make_plan's plans. `shape` is rank 0's; all_to_all needs one shape a rank.
Program program_of(const Shape& shape, Algorithm algorithm, bool in_place);
Program program_of(std::vector<Shape> shapes, Algorithm algorithm, bool in_place);

// For mutation tests: the index-th signal of this pair and lane and the wait that it meets are
// left out of the operations whose bit is set.
struct Dropped {
  Rank from;
  Rank to;
  Lane lane;
  uint64_t index;
  uint64_t operations;
};

struct VerifyOptions {
  int interleavings = 2;  // the first takes turns, the others are random
  bool all_meet = true;   // an operation that ends anywhere has begun everywhere
  std::optional<Dropped> dropped = std::nullopt;
};

std::string verify(const std::vector<Program>& sequence, const VerifyOptions& options = {});

// A step of a rank's plan, in one pass and round.
struct Event {
  Rank rank;
  size_t operation;
  uint32_t step;  // of the plan
  uint64_t pass;
  uint32_t round;
  uint32_t met = UINT32_MAX;  // a wait: the event that is its signal
};

// A violation, and the run that shows it. `event` is the number of the event that meets it, and
// `other` of one that it is about; UINT32_MAX: none.
struct Finding {
  std::string text;  // "": none
  std::vector<Event> events;
  uint32_t event = UINT32_MAX, other = UINT32_MAX;
  bool stuck = false;
  std::vector<Event> places;  // where ranks are that have not finished: a deadlock
};

// Runs several interleavings, and returns what the shortest run finds: its events are those that
// come before the violation in every run.
Finding find(const std::vector<Program>& sequence);

}  // namespace ringcomm
