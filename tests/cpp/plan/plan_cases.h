// For plan_proofs.cc: a group of proofs, and operations on tiny geometries.
#pragma once

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "plan/cursor.h"
#include "plan/select.h"
#include "verify/plan_text.h"
#include "verify/verify.h"

namespace ringcomm::cases {

class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Counts runs; a violation ends the test. The short form takes a sample, another with each seed.
class Group {
 public:
  Group(bool long_mode, uint64_t seed) : long_mode_(long_mode), random_(seed) {}

  // Whether to look at the next case of this kind: one of each `period`, drawn at random.
  bool takes(const std::string& kind, uint64_t period) {
    Sample& sample = samples_[kind];
    if (sample.seen++ % period == 0) sample.chosen = random_() % period;
    const bool taken = long_mode_ || (sample.seen - 1) % period == sample.chosen;
    sample.taken += taken;
    return taken;
  }
  // Every kind has its share, by every seed.
  void expect_all_kinds() const {
    for (const auto& [kind, sample] : samples_) {
      if (sample.taken == 0) throw Failure("no case was taken of " + kind);
    }
  }

  bool long_mode() const { return long_mode_; }
  uint64_t runs() const { return runs_; }
  // Which slots to try the i-th case of a kind with: always two, and now and then more.
  std::vector<uint64_t> slots(uint64_t i) const {
    if (long_mode_) return {2, 4, 8};
    if (i % 3 != 0) return {2};
    return {2, i % 2 == 0 ? 4u : 8u};
  }

  void prove(const std::vector<Program>& sequence, const std::string& what) {
    ++runs_;
    const std::string violation = verify(sequence, {.interleavings = long_mode_ ? 4 : 2});
    if (!violation.empty()) throw Failure(what + ": " + violation);
  }
  void reject(const std::vector<Program>& sequence, const std::string& what, const std::string& why,
              bool all_meet = true) {
    ++runs_;
    const std::string violation = verify(sequence, {.all_meet = all_meet});
    if (violation.find(why) == std::string::npos) {
      throw Failure(what + ": not rejected for \"" + why + "\" but \"" + violation + "\"");
    }
  }
  void expect(bool holds, const std::string& what) {
    ++runs_;
    if (!holds) throw Failure(what);
  }

 private:
  struct Sample {
    uint64_t seen = 0, taken = 0, chosen = 0;
  };

  const bool long_mode_;
  std::mt19937_64 random_;
  std::map<std::string, Sample> samples_;
  uint64_t runs_ = 0;
};

struct Planner {
  Collective collective;
  Algorithm algorithm;

  std::string name() const {
    return std::string(to_string(collective)) + " " + to_string(algorithm);
  }
  bool rooted() const {
    return collective == Collective::kBroadcast || collective == Collective::kReduce ||
           collective == Collective::kScatter || collective == Collective::kGather;
  }
  bool sharded() const {
    return collective == Collective::kReduceScatter || collective == Collective::kAllGather ||
           collective == Collective::kScatter || collective == Collective::kGather;
  }
  bool has_in_place() const {
    return collective != Collective::kAllToAll && collective != Collective::kBarrier;
  }
};

inline std::vector<Planner> all_planners() {
  std::vector<Planner> planners;
  for (int c = 0; c < kCollectives; ++c) {
    for (const Algorithm algorithm : algorithms_of(static_cast<Collective>(c))) {
      planners.push_back({static_cast<Collective>(c), algorithm});
    }
  }
  return planners;
}

// Those that have a plan for tensors which all ranks can read.
inline std::vector<Planner> readable_planners() {
  std::vector<Planner> planners = all_planners();
  std::erase_if(planners, [](const Planner& planner) {
    return planner.algorithm != Algorithm::kDirect || planner.collective == Collective::kAllToAll;
  });
  return planners;
}

// Every limit a few elements long: lines of 3, one-shots up to 6, segments of 8 (or one for each
// rank), inbox slots of 2.
inline Geometry tiny(int size, uint64_t element = 1, uint64_t slots = 2) {
  const uint64_t n = static_cast<uint64_t>(size);
  Geometry geometry;
  geometry.size = size;
  geometry.segment_bytes = std::max<uint64_t>(8, (n + 1) / 2 * 2) * element;
  geometry.slots = slots;
  geometry.inbox_bytes = 2 * slots * element;
  geometry.line_bytes = 3 * element;
  geometry.one_shot_bytes = 6 * element * (n - 1);
  return geometry;
}

// Elements around every limit of tiny().
inline std::vector<uint64_t> sizes(int size) {
  const uint64_t n = static_cast<uint64_t>(size), segment = tiny(size).segment_bytes;
  std::vector<uint64_t> all = {0,
                               1,
                               2,
                               3,
                               4,
                               6,
                               7,
                               n,
                               2 * n + 1,
                               segment,
                               segment + 1,
                               2 * segment,
                               3 * segment + 1,
                               4 * segment,
                               4 * segment + 1,
                               6 * segment + 3,
                               9 * segment + 1};
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return all;
}

// A host has two ranks where that divides, else three, else one.
inline int local_of(int size) { return size % 2 == 0 ? 2 : size % 3 == 0 ? 3 : 1; }

struct Case {
  Planner planner;
  int size;
  uint64_t elements;  // of the message, or of each shard
  Rank root = 0;
  bool in_place = false;
  uint64_t element = 1;
  int local = 0;  // 0: local_of(size)
  uint64_t slots = 2;
  int site = 1;
  uint64_t order = 0;  // a seed of some order; 0: that of the ranks
  bool rings = false;  // messages cost nothing, so parts are rings
  bool readable = false;
};

inline std::shared_ptr<const std::vector<Rank>> some_order(int size, uint64_t seed) {
  if (seed == 0) return nullptr;
  std::vector<Rank> order(static_cast<size_t>(size));
  std::iota(order.begin(), order.end(), 0);
  std::mt19937_64 random(seed);
  for (size_t i = order.size() - 1; i > 0; --i) std::swap(order[i], order[random() % (i + 1)]);
  return std::make_shared<const std::vector<Rank>>(order);
}

inline Shape shape_of(const Case& c) {
  Shape shape;
  shape.collective = c.planner.collective;
  shape.size = c.size;
  shape.root = c.planner.rooted() ? c.root : 0;
  shape.element = c.element;
  shape.geometry = tiny(c.size, c.element, c.slots);
  shape.local = c.local > 0 ? c.local : local_of(c.size);
  shape.site = c.site;
  shape.readable = c.readable;
  shape.order = some_order(c.size, c.order);
  if (c.rings) shape.costs.alpha = shape.near.alpha = 1e-12;
  const std::vector<uint64_t> shards(static_cast<size_t>(c.size), c.elements * c.element);
  if (c.planner.sharded())
    shape.shards = shards;
  else if (c.planner.collective == Collective::kAllToAll)
    shape.send = shape.recv = shards;
  else if (c.planner.collective != Collective::kBarrier)
    shape.bytes = c.elements * c.element;
  return shape;
}

inline Program program(const Case& c) {
  return program_of(shape_of(c), c.planner.algorithm, c.in_place);
}

// Shards or splits of up to `most` elements, a third of them empty.
inline Program uneven(const Case& c, uint64_t most, std::mt19937_64& random) {
  const auto length = [&] { return random() % 3 == 0 ? 0 : random() % (most + 1) * c.element; };
  std::vector<Shape> shapes(static_cast<size_t>(c.size), shape_of(c));
  if (c.planner.sharded()) {
    for (uint64_t& shard : shapes[0].shards) shard = length();
    for (Shape& shape : shapes) shape.shards = shapes[0].shards;
  }
  if (c.planner.collective == Collective::kAllToAll) {
    for (size_t a = 0; a < shapes.size(); ++a) {
      for (size_t b = 0; b < shapes.size(); ++b) shapes[a].send[b] = shapes[b].recv[a] = length();
    }
  }
  return program_of(std::move(shapes), c.planner.algorithm, c.in_place);
}

inline std::string describe(const Case& c) {
  return str(c.planner.name(), ", ", c.size, " ranks, ", c.elements, " elements of ", c.element,
             ", root ", c.root, ", ", c.slots, " slots, ", c.local, " a host, ", c.site,
             " a site, order ", c.order, c.in_place ? ", in place" : "");
}

// Between hosts, ranks only put: what they name of another host's is an inbox or a line to write
// to.
inline void expect_only_puts(Group& group, const Plan& plan, int local) {
  for (const Step& step : plan.steps) {
    for (uint32_t i = 0; i < step.dst_count + uint32_t{step.src_count}; ++i) {
      const Ref& ref = plan.refs[step.first_ref + i];
      const bool put = ref.space == Space::kInbox || ref.space == Space::kLine;
      group.expect(ref.rank / local == plan.rank / local || (put && i < step.dst_count),
                   "more than a put: " + to_text(plan, step));
    }
  }
}

// Every root and every in-place form of a case.
template <typename Do>
void each_form(Case c, bool all_roots, Do act) {
  const int roots = !c.planner.rooted() ? 1 : all_roots ? c.size : std::min(c.size, 2);
  for (int i = 0; i < roots; ++i) {
    c.root = all_roots ? i : i * (c.size - 1);
    for (const bool in_place : {false, true}) {
      if (in_place && !c.planner.has_in_place()) continue;
      c.in_place = in_place;
      act(c);
    }
  }
}

// Every signal of a program that a wait meets.
inline std::vector<Dropped> pairs_of(const Program& program, uint64_t operations) {
  std::vector<Dropped> pairs;
  const size_t size = program.plans.size();
  for (const Plan& plan : program.plans) {
    std::vector<uint64_t> sent(size * kLanes, 0);
    for (PlanCursor step(plan); step; step.next()) {
      if (step->verb != Verb::kSignal) continue;
      ++sent[static_cast<size_t>(step->peer) * kLanes + step->lane];
    }
    for (size_t lane = 0; lane < sent.size(); ++lane) {
      for (uint64_t k = 0; k < sent[lane]; ++k) {
        pairs.push_back({plan.rank, static_cast<Rank>(lane / kLanes),
                         static_cast<Lane>(lane % kLanes), k, operations});
      }
    }
  }
  return pairs;
}

}  // namespace ringcomm::cases
