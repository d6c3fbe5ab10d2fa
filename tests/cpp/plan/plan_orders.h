// For plan_proofs.cc: plans whose ranks stand in any order, and whose hosts are at sites.
#pragma once

#include "plan_cases.h"

namespace ringcomm::cases {

// Any order of the ranks, for every planner and shards of any lengths.
inline void orders(Group& group) {
  std::mt19937_64 random(3);
  for (const Planner& planner : all_planners()) {
    for (int size = 2; size <= 9; ++size) {
      for (const uint64_t elements : sizes(size)) {
        each_form({planner, size, elements}, true, [&](Case c) {
          if (!group.takes(planner.name(), size > 5 ? 24 : 8)) return;
          c.order = 1 + random() % 1000;
          c.slots = group.slots(elements).back();
          const Case other{planner, size, 5, size - 1, false, 1, 0, c.slots, 1, c.order};
          group.prove({program(c), program(other), uneven(c, 20, random)}, describe(c));
        });
      }
    }
    for (const int size : {16, 33}) {
      if (!group.takes("many", 2)) continue;
      const Case c{planner, size, 5, size / 3, false, 1, 0, 2, 1, 7};
      group.prove({program(c), uneven(c, 9, random)}, describe(c));
    }
  }
}

// Ranks, hosts and sites: every planner that goes by them, in the order of the ranks and in others.
inline void sites(Group& group) {
  struct Sites {
    int sites, hosts, local;  // hosts a site, ranks a host
  };
  for (const Sites at : {Sites{2, 2, 1},
                         {2, 3, 1},
                         {3, 2, 1},
                         {4, 2, 1},
                         {2, 4, 1},
                         {2, 2, 2},
                         {2, 3, 2},
                         {3, 2, 3},
                         {5, 3, 1},
                         {2, 8, 1},
                         {2, 4, 4},
                         {3, 11, 1}}) {
    const int site = at.hosts * at.local, size = site * at.sites;
    const uint64_t n = static_cast<uint64_t>(size);
    for (const Planner& planner : all_planners()) {
      if (planner.algorithm != Algorithm::kHierarchical) continue;
      std::mt19937_64 random(n);
      for (const uint64_t count : sizes(size)) {
        if (size > 12 && planner.sharded() && count > n) continue;
        for (const uint64_t slots : group.slots(count)) {
          if (!group.takes(planner.name(), size > 12 ? 3 : 1)) continue;
          const Rank root = static_cast<Rank>(random() % n);
          const uint64_t order = random() % 3;
          Case a{planner, size, count, root, count % 2 == 0, 1, at.local, slots, site, order};
          a.rings = random() % 2 == 0;
          const Case b{planner, size, 2, size - 1, false, 1, at.local, slots, site, order};
          group.prove({program(a), program(b), program(a)}, describe(a));
          group.prove({uneven(a, 30, random), program(b)}, describe(a));
          if (order > 0) continue;
          for (const Plan& plan : program(a).plans) expect_only_puts(group, plan, at.local);
        }
      }
    }
  }
}

}  // namespace ringcomm::cases
