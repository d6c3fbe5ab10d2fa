// Proves the planners with verify.h. Prints "ok NAME (N runs)" for each group; ends with 1 at
// the first violation. Arguments: --long for everything, --seed N for another sample of it, any
// other: only groups whose name contains it.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "plan/cache.h"
#include "plan_cases.h"
#include "plan_mutants.h"
#include "plan_orders.h"
#include "plan_sizes.h"
#include "plan_wide.h"

namespace ringcomm::cases {
namespace {

void three_times(Group& group) {
  uint64_t i = 0;
  for (const Planner& planner : all_planners()) {
    for (int size = 1; size <= 9; ++size) {
      for (const uint64_t elements : sizes(size)) {
        each_form({planner, size, elements}, true, [&](Case c) {
          for (const uint64_t slots : group.slots(size > 5 ? 1 : i++)) {
            if (!group.takes(planner.name(), 8)) continue;
            c.slots = slots;
            c.elements = elements * slots / 2;
            const Program once = program(c);
            group.prove({once, once, once}, describe(c));
          }
        });
      }
    }
  }
}

void many_ranks(Group& group) {
  for (const Planner& planner : all_planners()) {
    for (const int size : {16, 33}) {
      const uint64_t n = static_cast<uint64_t>(size);
      for (const uint64_t elements : {uint64_t{0}, uint64_t{5}, n, 3 * n + 1}) {
        if (planner.sharded() && elements > n) continue;
        if (!group.takes(planner.name(), 4)) continue;
        const Case c{planner, size, elements, size / 3};
        const Program once = program(c);
        group.prove({once, once, once}, describe(c));
      }
    }
  }
}

void elements(Group& group) {
  for (const Planner& planner : all_planners()) {
    for (const uint64_t element : {2u, 4u, 8u, 16u}) {
      for (const int size : {2, 3, 4, 7}) {
        for (const uint64_t count : sizes(size)) {
          if (!group.takes(planner.name(), 4)) continue;
          const Case c{planner, size, count, size - 1, false, element};
          group.prove({program(c), program(c)}, describe(c));
        }
      }
    }
  }
}

// The geometry that groups run with, in elements of 16 bytes.
void real_geometry(Group& group) {
  for (const Planner& planner : all_planners()) {
    for (const int size : {2, 3}) {
      for (const uint64_t bytes : {uint64_t{20'000}, uint64_t{300'000}, uint64_t{1'200'000}}) {
        if ((size == 2 || bytes == 300'000) && !group.long_mode()) continue;
        if (!group.takes(planner.name(), 2)) continue;
        Shape shape = shape_of({planner, size, bytes / 16, 1, false, 16});
        shape.geometry = Geometry::for_ranks(size);
        if (bytes == 20'000) shape.geometry.slots = 8;
        const Program once = program_of(shape, planner.algorithm, false);
        group.prove({once, once}, str(planner.name(), ", ", bytes, " bytes"));
      }
    }
  }
}

// Operations of a group may pass the windows in segments of different sizes (exec/tuner.h), where
// there is room for the largest.
void segments_that_change(Group& group) {
  for (const Planner& planner : all_planners()) {
    if (planner.algorithm != Algorithm::kDirect) continue;
    for (const Planner& other : all_planners()) {
      if (other.algorithm != Algorithm::kDirect) continue;
      for (const int size : {2, 3}) {
        const auto with = [&](const Planner& which, uint64_t count, uint64_t factor) {
          Shape shape = shape_of({which, size, count, 0, false});
          const uint64_t segment = shape.geometry.segment_bytes;
          shape.geometry.room_bytes = 4 * 4 * segment;
          shape.geometry.segment_bytes = factor * segment;
          return program_of(shape, which.algorithm, false);
        };
        const uint64_t segment = tiny(size).segment_bytes;
        for (const uint64_t count : {3 * segment + 1, 9 * segment}) {
          for (const auto& [a, b] : {std::pair{1, 4}, std::pair{4, 1}, std::pair{2, 1}}) {
            const auto first = static_cast<uint64_t>(a), second = static_cast<uint64_t>(b);
            const std::string text =
                str(planner.name(), " and ", other.name(), ", segments of ", a, " and ", b);
            group.prove({with(planner, count, first), with(other, segment + 1, second),
                         with(planner, count, second), with(other, count, first)},
                        text);
          }
        }
      }
    }
  }
}

void readable(Group& group) {
  std::mt19937_64 random(4);
  for (const Planner& planner : readable_planners()) {
    for (int size = 2; size <= 7; ++size) {
      const Program around =
          program({{Collective::kAllReduce, Algorithm::kDirect}, size, 5, 0, false});
      for (const uint64_t elements : sizes(size)) {
        for (const bool in_place : {false, true}) {
          if (!group.takes(planner.name(), 4)) continue;
          Case c{planner, size, elements, planner.rooted() ? size / 2 : 0, in_place};
          c.readable = true;
          const Program once =
              planner.sharded() && elements % 2 == 0 ? uneven(c, 20, random) : program(c);
          group.prove({once, once, once}, "readable " + describe(c));
          group.prove({around, once, around}, "readable " + describe(c));
        }
      }
    }
  }
}

// [a, b, a]: leftovers of one size must not meet the work of another.
void sequences_of_sizes(Group& group) {
  for (const Planner& planner : all_planners()) {
    for (int size = 2; size <= (group.long_mode() ? 8 : 5); ++size) {
      for (const uint64_t slots : group.slots(static_cast<uint64_t>(size) + 1)) {
        std::vector<Program> programs;
        for (const uint64_t count : sizes(size)) {
          programs.push_back(program({planner, size, count, 0, false, 1, 0, slots}));
        }
        for (const Program& a : programs) {
          for (const Program& b : programs) {
            if (group.takes(planner.name(), 8)) group.prove({a, b, a}, planner.name());
          }
        }
      }
    }
  }
}

void pairs_of_planners(Group& group) {
  uint64_t i = 0;
  for (const int size : {2, 3, 4, 5}) {
    for (const auto& [first, second] : {std::pair{3u, 3u}, {3u, 20u}, {35u, 5u}, {21u, 75u}}) {
      for (const Planner& a : all_planners()) {
        for (const uint64_t slots : group.slots(i++)) {
          const Program before = program({a, size, first, 0, false, 1, 0, slots});
          for (const Planner& b : all_planners()) {
            if (!group.takes(a.name(), 6)) continue;
            const Case c{b, size, second, size - 1, b.has_in_place(), 1, 0, slots};
            group.prove({before, program(c), before}, a.name() + " around " + b.name());
          }
        }
      }
    }
  }
}

void random_sequences(Group& group) {
  std::mt19937_64 random(1);
  const std::vector<Planner> planners = all_planners();
  for (int i = 0; i < (group.long_mode() ? 20000 : 1500); ++i) {
    const int size = 2 + static_cast<int>(random() % 5);
    const uint64_t slots = uint64_t{2} << random() % 3;
    std::vector<Program> sequence;
    std::string what;
    for (int k = 0; k < 6; ++k) {
      const Planner& planner = planners[random() % planners.size()];
      const Case c{planner,
                   size,
                   sizes(size)[random() % sizes(size).size()],
                   static_cast<Rank>(random() % static_cast<uint64_t>(size)),
                   planner.has_in_place() && random() % 2 == 0,
                   1,
                   0,
                   slots};
      sequence.push_back(random() % 3 == 0 ? uneven(c, 20, random) : program(c));
      what += describe(c) + "; ";
    }
    group.prove(sequence, what);
  }
}

void uneven_shards(Group& group) {
  std::mt19937_64 random(2);
  for (const Planner& planner : all_planners()) {
    if (!planner.sharded() && planner.collective != Collective::kAllToAll) continue;
    for (int size = 2; size <= 7; ++size) {
      for (int i = 0; i < (group.long_mode() ? 200 : 12); ++i) {
        each_form({planner, size, 0}, false, [&](Case c) {
          c.slots = group.slots(static_cast<uint64_t>(3 * i)).back();
          const uint64_t most = i % 3 == 0 ? 3 : i % 3 == 1 ? 17 : 60;
          const Program once = uneven(c, most, random);
          group.prove({once, uneven(c, most, random), once}, describe(c));
        });
      }
    }
  }
}

void hierarchies(Group& group) {
  struct Hosts {
    int hosts, local;
  };
  for (const Hosts at : {Hosts{2, 2}, {2, 3}, {3, 2}, {4, 1}, {1, 4}, {3, 3}, {1, 1}}) {
    const int size = at.hosts * at.local;
    const uint64_t n = static_cast<uint64_t>(size);
    for (const Planner& planner : all_planners()) {
      if (planner.algorithm != Algorithm::kHierarchical) continue;
      for (const uint64_t count : sizes(size)) {
        for (const uint64_t other : {uint64_t{2}, uint64_t{5}, count}) {
          for (const uint64_t slots : group.slots(count)) {
            const Rank root = planner.rooted() ? static_cast<Rank>(other % n) : 0;
            const Case a{planner, size, count, root, count % 2 == 0, 1, at.local, slots};
            const Case b{planner, size, other, size - 1, false, 1, at.local, slots};
            group.prove({program(a), program(b), program(a)}, describe(a));
            for (const Plan& plan : program(a).plans) expect_only_puts(group, plan, at.local);
            std::mt19937_64 random(count);
            group.prove({uneven(a, 30, random), program(b)}, describe(a));
          }
        }
      }
    }
  }
}

// Long messages are short plans.
void properties(Group& group) {
  for (const Planner& planner : all_planners()) {
    for (int size = 2; size <= 33; ++size) {
      for (const uint64_t bytes : {uint64_t{64}, uint64_t{1} << 20, uint64_t{1} << 30}) {
        Shape shape = shape_of({planner, size, bytes / 4, 0, false, 4});
        shape.geometry = Geometry::for_ranks(size);
        if (size % 3 == 0) shape.geometry.slots = 8;
        const Plan plan = make_plan(shape, size / 2, planner.algorithm);
        const bool loads = planner.algorithm == Algorithm::kDirect ||
                           planner.algorithm == Algorithm::kHierarchical;
        if (!loads) expect_only_puts(group, plan, 1);
        group.expect(plan.memory_bytes() < 48 * 1024,
                     str(planner.name(), " of ", bytes, " bytes for ", size, " ranks takes ",
                         plan.memory_bytes()));
      }
    }
  }
}

void cuts(Group& group) {
  for (const uint64_t element : {1u, 2u, 4u, 8u, 16u}) {
    Shape shape;
    shape.element = element;
    for (int parts = 1; parts <= 9; ++parts) {
      for (uint64_t total = 0; total < 2000; total += element) {
        const uint64_t n = static_cast<uint64_t>(parts);
        group.expect(shape.cut(total, 0, parts) == 0, "first cut");
        group.expect(shape.cut(total, parts, parts) == total, "last cut");
        for (int i = 0; i < parts; ++i) {
          const uint64_t low = shape.cut(total, i, parts), high = shape.cut(total, i + 1, parts);
          const bool lines = total >= 64 * n;
          const uint64_t unit = lines ? 64 : element;
          const uint64_t most = ((total + unit - 1) / unit + n - 1) / n * unit;
          group.expect(low <= high && high - low <= most && low % unit == 0,
                       str("cut ", i, " of ", parts, " of ", total));
          group.expect(total / element < n || low < high, "an empty part");
        }
      }
    }
  }
}

void selection(Group& group) {
  for (const Planner& planner : all_planners()) {
    for (const int size : {2, 4, 5, 12}) {
      for (const int local : {1, 2, 3, 4, 12}) {
        if (size % local != 0) continue;
        for (const uint64_t bytes : {8u, 112u, 113u, 1u << 14, 1u << 15, 1u << 17, 1u << 20}) {
          Shape shape = shape_of({planner, size, bytes, 0, false, 1, local});
          shape.geometry = Geometry::for_ranks(size);
          shape.geometry.slots = 8;
          const Algorithm chosen = select(shape, size == local);
          expect_only_puts(group, make_plan(shape, 1, chosen), local);
        }
      }
    }
    group.expect(algorithm_called(to_string(planner.algorithm)) == planner.algorithm,
                 "an algorithm by its name");
  }
  try {
    make_plan(shape_of({{Collective::kBarrier, Algorithm::kRing}, 2, 0}), 0, Algorithm::kRing);
    group.expect(false, "a ring barrier");
  } catch (const UsageError& error) {
    group.expect(std::strstr(error.what(), "dissemination") != nullptr, "the possible names");
  }
}

void cache(Group& group) {
  PlanCache plans(1, 20000);
  const Planner planner{Collective::kAllReduce, Algorithm::kDirect};
  for (uint64_t i = 0; i < 200; ++i) {
    const Shape shape = shape_of({planner, 4, i % 2 == 0 ? 5 : i});
    const auto plan = plans.get(shape, planner.algorithm);
    group.expect(*plan == make_plan(shape, 1, planner.algorithm), "a cached plan");
    group.expect(plans.get(shape, planner.algorithm) == plan, "a hit");
    group.expect(plans.bytes() <= 20000, "the bound");
  }
  group.expect(plans.plans() > 2, "it keeps plans");
}

struct Named {
  const char* name;
  void (*prove)(Group&);
};

constexpr Named kGroups[] = {
    {"cuts", cuts},
    {"selection", selection},
    {"cache", cache},
    {"properties", properties},
    {"sizes of plans", sizes_of_plans},
    {"sizes of far plans", sizes_of_far_plans},
    {"pairs in the cache", pairs_in_the_cache},
    {"damaged tables are rejected", damaged_tables},
    {"wrong plans are rejected", wrong_plans},
    {"every planner three times", three_times},
    {"many ranks", many_ranks},
    {"element sizes", elements},
    {"real geometry", real_geometry},
    {"many slots", many_slots},
    {"segments that change", segments_that_change},
    {"readable tensors", readable},
    {"readable mutations", readable_mutations},
    {"sequences of sizes", sequences_of_sizes},
    {"pairs of planners", pairs_of_planners},
    {"random sequences", random_sequences},
    {"uneven shards and splits", uneven_shards},
    {"long uneven shards", long_uneven_shards},
    {"hierarchies", hierarchies},
    {"orders", orders},
    {"sites", sites},
    {"mutations", mutations},
    {"wide groups", wide_groups},
    {"wide shards", wide_shards},
    {"wide and alike", wide_and_alike},
    {"wide mutations", wide_mutations},
    {"wide plans are short", wide_sizes},
};

int run(bool long_mode, uint64_t seed, const char* filter) {
  for (const Named& named : kGroups) {
    if (std::strstr(named.name, filter) == nullptr) continue;
    Group group(long_mode, seed);
    try {
      named.prove(group);
      group.expect_all_kinds();
    } catch (const std::exception& error) {
      std::printf("FAILED %s: %s\n", named.name, error.what());
      return 1;
    }
    std::printf("ok %s (%lu runs)\n", named.name, group.runs());
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace ringcomm::cases

int main(int count, char** arguments) {
  bool long_mode = false;
  uint64_t seed = 1;
  const char* filter = "";
  for (int i = 1; i < count; ++i) {
    if (std::strcmp(arguments[i], "--long") == 0)
      long_mode = true;
    else if (std::strcmp(arguments[i], "--seed") == 0 && i + 1 < count)
      seed = std::strtoull(arguments[++i], nullptr, 10);
    else
      filter = arguments[i];
  }
  return ringcomm::cases::run(long_mode, seed, filter);
}
