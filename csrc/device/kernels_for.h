// Plans the kernels of an operation, from its shape and the ranks' links alone. So all ranks choose
// alike.
#pragma once

#include <optional>

#include "device/kernel_args.h"
#include "plan/plan.h"
#include "plan/shape.h"

namespace ringcomm::cuda {

Reduction copy_of(uint64_t element);  // of one source
// Returns the parts, with their places and their ranks. `alone`: one kernel does it all.
LeaderArgs parts_of(const Shape& shape, bool alone);
bool concerns(const LeaderArgs& args, Rank rank, Rank part);
// Fills in all but the operands.
Exchange exchange_of(const Shape& shape, Rank rank);

// The worst link between two ranks of a group that have a device each.
struct DeviceLink {
  bool nvlink = false;
  double flag = 3e-6;        // seconds until a peer sees a flag
  double byte_time = 5e-11;  // seconds for each byte that comes in
  int blocks = 1;            // that a kernel may have
};
// Returns the link as the model has it (benchmarks/README.md). `capability`: 90 is sm_90.
DeviceLink link_of(bool nvlink, int capability, int blocks);

// Returns the time by the model, without the launch.
double seconds_of(Algorithm kernel, const Shape& shape, const DeviceLink& link);
// Chooses the kernel for a group on these links: kHandOver hands over, which serves any. `asked`:
// that one wherever it has room. `window`: bytes of a rank's.
Algorithm kernel_for(const Shape& shape, const DeviceLink& link, uint64_t window,
                     std::optional<Algorithm> asked = {});
// Returns the table of a group of so many ranks, a line for each collective.
std::string kernels_text(int size, const DeviceLink& link, uint64_t window);
// Returns how many thread blocks the two-shot kernel has.
int blocks_for(const Shape& shape, const DeviceLink& link);

}  // namespace ringcomm::cuda
