// The kernels of ranks that have a device each.
#include <type_traits>

#include "cuda/launch.h"
#include "device/api.h"
#include "reduce/kernels.h"

namespace ringcomm::cuda {
namespace {

#include "cuda/kernels_device.inc.h"

template <class Codec, class Op>
__global__ void __launch_bounds__(kTwoShotThreads, 1)
    two_shot_kernel(const __grid_constant__ TwoShotArgs args, uint64_t element_bytes) {
  Context context;
  two_shot_body<Codec, Op>(context, args, element_bytes);
}

using Kernel = void (*)(TwoShotArgs, uint64_t);
using KernelTable = TableOf<Kernel>;

template <class Codec, class Op, int kUnit = 1>
constexpr Kernel kKernel = two_shot_kernel<CodecFor<Codec, Op>, OpFor<Codec, Op>>;

#include "reduce/table.inc.h"

constinit const KernelTable kKernels = all_kernels();

}  // namespace

void launch_two_shot(Stream stream, const TwoShotArgs& args) {
  launch(stream, find(kKernels, args.reduction), {args.blocks, kTwoShotThreads}, args);
}

void load_two_shot_kernels() {
  for (const auto& row : kKernels.reduce) {
    for (const Kernel kernel : row) load_kernel(kernel);
  }
}

}  // namespace ringcomm::cuda
