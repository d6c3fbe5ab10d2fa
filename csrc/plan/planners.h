// Every planner: (shape, rank) -> that rank's plan. Pure functions.
//
// A plan must be *closed*: any sequence of plans of one group, of any collectives and sizes, runs
// back to back on one set of windows. That needs two things, for every size, zero included:
// - within the plan, no race on shared memory;
// - all meet: where it ends on any rank, it has begun on every rank. Then a rank that begins
//   operation k + 2, which reuses the half of operation k, knows that all have ended k.
// No rank needs to know that others have *read* all, so there are no acknowledgements at the end.
// tests/cpp/plan/plan_proofs.cc proves both, and sequences besides, with verify.h; print_plans.cc
// there prints a plan in words.
//
// Planners take groups of two and more; make_plan (select.h) does the rest.
#pragma once

#include "plan/plan.h"
#include "plan/shape.h"

namespace ringcomm {

Plan direct_all_reduce(const Shape& shape, Rank rank);
Plan direct_reduce_scatter(const Shape& shape, Rank rank);
Plan direct_all_gather(const Shape& shape, Rank rank);
Plan direct_broadcast(const Shape& shape, Rank rank);
Plan direct_reduce(const Shape& shape, Rank rank);
// Serves all of kDirect's collectives where shapes are readable.
Plan readable_plan(const Shape& shape, Rank rank);

Plan doubling_all_reduce(const Shape& shape, Rank rank);

Plan ring_all_reduce(const Shape& shape, Rank rank);
Plan ring_reduce_scatter(const Shape& shape, Rank rank);
Plan ring_all_gather(const Shape& shape, Rank rank);

// Take log2 n rounds for any number of ranks: for short messages.
Plan bruck_all_reduce(const Shape& shape, Rank rank);
Plan bruck_reduce_scatter(const Shape& shape, Rank rank);
Plan bruck_all_gather(const Shape& shape, Rank rank);

// Broadcast from the root, or reduce to it.
Plan tree_plan(const Shape& shape, Rank rank);   // binomial
Plan chain_plan(const Shape& shape, Rank rank);  // of the ring
// Scatters from the root, or gathers to it, without ranks between.
Plan star_plan(const Shape& shape, Rank rank);

// Ranks are laid out host by host, shape.local a host. Inside a host windows are mapped; between
// hosts, ranks of equal index talk, and only put. So do the hosts of a site, and then sites.
Plan hierarchical_all_reduce(const Shape& shape, Rank rank);
Plan pipelined_all_reduce(const Shape& shape, Rank rank);         // hierarchical.cc
Plan hierarchical_reduce_scatter(const Shape& shape, Rank rank);  // hierarchical.cc
Plan hierarchical_all_gather(const Shape& shape, Rank rank);
Plan hierarchical_broadcast(const Shape& shape, Rank rank);
Plan hierarchical_reduce(const Shape& shape, Rank rank);
Plan hierarchical_barrier(const Shape& shape, Rank rank);

// Plans by the places of shape.order; see compose.cc.
Plan ordered_plan(const Shape& shape, Rank rank, Algorithm algorithm);

// Let every rank put to every other at once: for short messages.
Plan pairwise_reduce_scatter(const Shape& shape, Rank rank);
Plan pairwise_all_gather(const Shape& shape, Rank rank);
Plan pairwise_all_to_all(const Shape& shape, Rank rank);
Plan dissemination_barrier(const Shape& shape, Rank rank);

}  // namespace ringcomm
