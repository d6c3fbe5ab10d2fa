// Plans the kernels of an operation, from its shape and the ranks' links alone. So all ranks choose
// alike.
#pragma once

#include <optional>

#include "device/kernel_args.h"
#include "plan/plan.h"
#include "plan/shape.h"

namespace ringcomm::cuda {

// Parts, where they are, and whose they are. `alone`: one kernel does it all.
Reduction copy_of(uint64_t element);  // of one source
LeaderArgs parts_of(const Shape& shape, bool alone);
bool concerns(const LeaderArgs& args, Rank rank, Rank part);  // has it something to do with that?
// All but the operands.
Exchange exchange_of(const Shape& shape, Rank rank);

// The worst link between two ranks of a group that have a device each.
struct Link {
  bool nvlink = false;
  double flag = 3e-6;        // seconds until a peer sees a flag
  double byte_time = 5e-11;  // seconds for each byte that comes in
  int blocks = 1;            // that a kernel may have
};
// `capability`: 90 is sm_90. What NVLink carries is in benchmarks/README.md.
Link link_of(bool nvlink, int capability, int blocks);

// By the model, without the launch.
double seconds_of(Algorithm kernel, const Shape& shape, const Link& link);
// A kernel for a group on these links: kHandOver hands over, which serves any. `asked`: that one
// wherever it has room. `window`: bytes of a rank's.
Algorithm kernel_for(const Shape& shape, const Link& link, uint64_t window,
                     std::optional<Algorithm> asked = {});
// The table of a group of so many ranks, a line for each collective.
std::string kernels_text(int size, const Link& link, uint64_t window);
// Thread blocks of the two-shot kernel.
int blocks_for(const Shape& shape, const Link& link);

}  // namespace ringcomm::cuda
