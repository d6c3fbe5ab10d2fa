// For plan_proofs.cc: plans are short, whatever the shards, and stay in the cache; and each datum
// that makes them short matters.
#pragma once

#include <chrono>
#include <cstdio>
#include <functional>

#include "plan/cache.h"
#include "plan_cases.h"

namespace ringcomm::cases {

constexpr uint64_t kMiB = 1 << 20;

// Shards of 4 MiB each, or of 4 to 8 MiB; splits of 4 MiB, or up to 1 MiB.
inline Shape large(const Planner& planner, int size, bool even, std::mt19937_64& random,
                   int distance = 0) {
  Shape shape;
  shape.collective = planner.collective;
  shape.size = size;
  shape.element = 4;
  shape.bytes = 64 * kMiB;
  const bool mapped = planner.algorithm == Algorithm::kDirect;
  shape.local = mapped ? 1 : local_of(size);
  shape.geometry = mapped ? Geometry::for_ranks(size) : Geometry::across_hosts(size, distance);
  const auto more = [&](uint64_t most) { return even ? 0 : random() % (most / 4) * 4; };
  for (int r = 0; r < size; ++r) {
    if (planner.sharded()) shape.shards.push_back(4 * kMiB + more(4 * kMiB));
    if (planner.collective != Collective::kAllToAll) continue;
    shape.send.push_back(even ? 4 * kMiB : more(kMiB));
    shape.recv.push_back(r == 0 ? shape.send[0] : even ? 4 * kMiB : more(kMiB));
  }
  return shape;
}

// Prints the size of plans, and how long it takes to make them: the quickest of three.
inline void sizes_of_plans(Group& group) {
  std::mt19937_64 random(3);
  for (const Planner& planner : all_planners()) {
    for (const int size : {64, 128, 200}) {
      for (const bool even : {true, false}) {
        const bool varies = planner.sharded() || planner.collective == Collective::kAllToAll;
        if (!even && !varies) continue;
        const Shape shape = large(planner, size, even, random);
        double seconds = 1;
        Plan plan{};
        for (int i = 0; i < 3; ++i) {
          const auto begin = std::chrono::steady_clock::now();
          plan = make_plan(shape, 0, planner.algorithm);  // the root
          const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
          seconds = std::min(seconds, taken.count());
        }
        const std::string what = str(planner.name(), !varies ? "" : even ? ", even" : ", uneven");
        std::printf("   %-32s %3d ranks %5zu steps %6.1f KiB %7.0f us\n", what.c_str(), size,
                    plan.steps.size(), static_cast<double>(plan.memory_bytes()) / 1024,
                    seconds * 1e6);
        const uint64_t limit = planner.algorithm == Algorithm::kRing && !rooted(planner.collective)
                                   ? 24 << 10
                                   : static_cast<uint64_t>(size) * 1536;
        group.expect(plan.memory_bytes() <= limit,
                     str(what, " for ", size, " ranks takes ", plan.memory_bytes(), " bytes"));
      }
    }
  }
}

// Between hosts that are far from one another: many slots, many steps.
inline void sizes_of_far_plans(Group& group) {
  std::mt19937_64 random(3);
  for (const Planner& planner : all_planners()) {
    if (planner.algorithm == Algorithm::kDirect) continue;
    for (const int size : {2, 8, 32, 200}) {
      const Shape shape = large(planner, size, true, random, 2);
      const auto begin = std::chrono::steady_clock::now();
      const Plan plan = make_plan(shape, 0, planner.algorithm);
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
      std::printf("   %-32s %3d ranks %5zu steps %6.1f KiB %7.0f us\n", planner.name().c_str(),
                  size, plan.steps.size(), static_cast<double>(plan.memory_bytes()) / 1024,
                  taken.count() * 1e6);
      group.expect(plan.memory_bytes() <= 1 << 20,
                   str(planner.name(), " for ", size, " ranks takes ", plan.memory_bytes()));
    }
  }
}

// Inboxes between hosts that are far from one another have many slots.
inline void many_slots(Group& group) {
  for (const Planner& planner : all_planners()) {
    for (const int size : {2, 3, 4, 6}) {
      for (const uint64_t slots : {32u, 64u}) {
        const uint64_t n = static_cast<uint64_t>(size), much = 5 * slots * n + 1;
        for (const uint64_t elements : {uint64_t{5}, 2 * slots + 1, planner.sharded() ? 0 : much}) {
          if (elements == 0 || !group.takes(planner.name(), slots > 32 ? 8 : 4)) continue;
          Case c{planner, size, elements, size - 1};
          c.slots = slots;
          const Program once = program(c);
          group.prove({once, once}, describe(c));
        }
      }
    }
  }
}

// Sharded training repeats these: parameters gathered, gradients scattered, layer after layer.
inline void pairs_in_the_cache(Group& group) {
  std::mt19937_64 random(4);
  for (const Algorithm algorithm : {Algorithm::kDirect, Algorithm::kRing, Algorithm::kBruck}) {
    for (const int size : {128, 200, 4096}) {
      if (size > 200 && algorithm == Algorithm::kDirect) continue;
      for (const bool even : {true, false}) {
        PlanCache plans(size / 2);
        std::vector<Shape> shapes;
        for (int layer = 0; layer < 2; ++layer) {
          shapes.push_back(large({Collective::kAllGather, algorithm}, size, even, random));
          shapes.push_back(large({Collective::kReduceScatter, algorithm}, size, even, random));
          for (Shape* shape : {&shapes.end()[-1], &shapes.end()[-2]}) {
            for (uint64_t& shard : shape->shards) shard += static_cast<uint64_t>(layer) * kMiB;
          }
        }
        std::vector<std::shared_ptr<const Plan>> made;
        for (const Shape& shape : shapes) made.push_back(plans.get(shape, algorithm));
        for (size_t i = 0; i < shapes.size(); ++i) {
          group.expect(plans.get(shapes[i], algorithm) == made[i],
                       str(to_string(shapes[i].collective), " ", to_string(algorithm), " for ",
                           size, " ranks is planned anew"));
        }
      }
    }
  }
  // Two that take turns stay, however large they are.
  PlanCache none(0, 1);
  const Planner gather{Collective::kAllGather, Algorithm::kRing};
  const Planner scatter{Collective::kReduceScatter, Algorithm::kRing};
  const Shape first = shape_of({gather, 4, 9}), second = shape_of({scatter, 4, 9});
  const auto made = none.get(first, gather.algorithm), other = none.get(second, scatter.algorithm);
  for (int i = 0; i < 3; ++i) {
    group.expect(none.get(first, gather.algorithm) == made, "the one before is planned anew");
    group.expect(none.get(second, scatter.algorithm) == other, "the last one is planned anew");
  }
  none.get(shape_of({gather, 4, 8}), gather.algorithm);
  group.expect(none.plans() == 2, "no more than two above the bound");
}

// One number in the tables of a plan, wrong by one.
using Damage = std::function<void(Plan&)>;

inline std::vector<std::pair<std::string, Damage>> damages_of(const Plan& plan) {
  std::vector<std::pair<std::string, Damage>> all;
  for (size_t i = 0; i < plan.motions.size(); ++i) {
    const auto add = [&](const char* what, auto number) {
      all.emplace_back(str("motion ", i + 1, what),
                       [=](Plan& wrong) { ++(wrong.motions[i].*number); });
    };
    add(" goes too far", &Motion::bytes);
    if (plan.motions[i].slots == 0) continue;
    add(" begins too late", &Motion::first);
    add(" turns too far each pass", &Motion::pass);
    add(" turns too far each round", &Motion::round);
  }
  for (size_t i = 0; i < plan.extents.size(); ++i) {
    const auto add = [&](const char* what, auto change) {
      all.emplace_back(str("extent ", i + 1, what), [=](Plan& wrong) { change(wrong.extents[i]); });
    };
    add(" is elsewhere", [](Extent& extent) { ++extent.offset; });
    if (plan.extents[i].bytes > 0) add(" is too short", [](Extent& extent) { --extent.bytes; });
  }
  for (size_t i = 0; i < plan.blocks.size(); ++i) {
    if (plan.blocks[i].rounds == 1) continue;
    all.emplace_back(str("a round of block ", i), [=](Plan& wrong) { --wrong.blocks[i].rounds; });
  }
  for (size_t i = 0; i < plan.loops.size(); ++i) {
    if (plan.loops[i].passes == 1) continue;
    all.emplace_back(str("a pass of loop ", i), [=](Plan& wrong) { --wrong.loops[i].passes; });
  }
  return all;
}

// Do both come to the same when they are run?
inline bool same_steps(const Plan& a, const Plan& b) {
  PlanCursor left(a), right(b);
  const auto skip_empty = [](PlanCursor& step) {
    const auto moves = [&] { return step->verb == Verb::kCopy || step->verb == Verb::kReduce; };
    while (step && moves() && step.bytes() == 0) step.next();
  };
  while (true) {
    skip_empty(left);
    skip_empty(right);
    if (!left || !right) return !left && !right;
    if (&*left - a.steps.data() != &*right - b.steps.data()) return false;
    if (left.bytes() != right.bytes()) return false;
    for (uint32_t i = 0; i < left->dst_count + uint32_t{left->src_count}; ++i) {
      const uint32_t at = left->first_ref + i;
      if (left.offset(a.refs[at]) != right.offset(b.refs[at])) return false;
    }
    left.next();
    right.next();
  }
}

inline void damaged_tables(Group& group) {
  std::mt19937_64 random(5);
  for (const Planner& planner : all_planners()) {
    uint64_t caught = 0;
    for (int i = 0; i < (group.long_mode() ? 60 : 6); ++i) {
      Case c{planner, 3 + i % 3, 40};
      c.slots = uint64_t{2} << i % 3;
      const Program good = i % 2 == 0 ? uneven(c, 30 * c.slots, random) : program(c);
      const size_t rank = random() % good.plans.size();
      for (const auto& [what, damage] : damages_of(good.plans[rank])) {
        Program wrong = good;
        damage(wrong.plans[rank]);
        if (same_steps(good.plans[rank], wrong.plans[rank])) continue;
        group.expect(!verify({wrong}, {.interleavings = 1}).empty(),
                     str(describe(c), ", rank ", rank, ", is not rejected: ", what));
        ++caught;
      }
    }
    std::printf("   %-28s caught %4lu\n", planner.name().c_str(), caught);
  }
}

// Many passes, in which shards end one after another.
inline void long_uneven_shards(Group& group) {
  std::mt19937_64 random(6);
  for (const Planner& planner : all_planners()) {
    if (!planner.sharded() && planner.collective != Collective::kAllToAll) continue;
    for (int size = 2; size <= 6; ++size) {
      for (int i = 0; i < (group.long_mode() ? 60 : 3); ++i) {
        Case c{planner, size, 0, size / 2};
        c.slots = uint64_t{2} << i % 3;
        c.in_place = planner.has_in_place() && i % 2 == 1;
        const Program once = uneven(c, 100 * c.slots, random);
        group.prove({once, uneven(c, 9, random), once}, describe(c));
      }
    }
  }
}

}  // namespace ringcomm::cases
