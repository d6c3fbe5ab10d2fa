// The ring of ranks that have a device each.
#include <type_traits>

#include "cuda/launch.h"
#include "device/api.h"
#include "reduce/kernels.h"

namespace ringcomm::cuda {
namespace {

#include "cuda/kernels_device.inc.h"
#include "cuda/meetings.inc.h"
#include "cuda/ring.inc.h"

template <class Codec, class Op, int kSources>
__global__ void __launch_bounds__(kMeetingThreads, 1)
    ring_kernel(const __grid_constant__ RingArgs args, uint64_t element_bytes) {
  Context context;
  ring_body<Codec, Op, kSources>(context, args, element_bytes);
}

using Kernel = void (*)(RingArgs, uint64_t);
using KernelTable = TableOf<Kernel>;

template <class Codec, class Op, int kUnit = 1>
constexpr Kernel kKernel = ring_kernel < CodecFor<Codec, Op>,
                 OpFor<Codec, Op>, kWorthIt<CodecFor<Codec, Op>, OpFor<Codec, Op>> ? 2 : 0 > ;

#include "reduce/table.inc.h"

constinit const KernelTable kKernels = all_kernels();

}  // namespace

void launch_meeting(Stream stream, const RingArgs& args) {
  launch(stream, find(kKernels, args.chunks.reduction), {args.members.blocks, kMeetingThreads},
         args, args.chunks.reduction);
}

void load_ring_kernels() {
  for (const auto& row : kKernels.reduce) {
    for (const Kernel kernel : row) load_kernel(kernel);
  }
}

}  // namespace ringcomm::cuda
