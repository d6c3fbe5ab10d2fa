// Kernels whose sums NVLink's switches do.
#include <type_traits>

#include "cuda/launch.h"
#include "device/api.h"
#include "reduce/kernels.h"

namespace ringcomm::cuda {
namespace {

#include "cuda/kernels_device.inc.h"
#include "cuda/meetings.inc.h"
#include "cuda/nvls.inc.h"

template <class Codec, class Op>
__global__ void __launch_bounds__(kMeetingThreads, 1)
    nvls_kernel(const __grid_constant__ NvlsArgs args, uint64_t element_bytes) {
  Context context;
  nvls_body<Codec, Op>(context, args, element_bytes);
}

constinit const NvlsTable<void (*)(NvlsArgs, uint64_t)> kKernels{
    nvls_kernel<Bits<uint8_t>, Bor>, nvls_kernel<Float<float>, SumThen>,
    nvls_kernel<Float16, SumThen>, nvls_kernel<BFloat16, SumThen>};

}  // namespace

void launch_meeting(Stream stream, const NvlsArgs& args) {
  launch(stream, kKernels.of(args.chunks), {args.members.blocks, kMeetingThreads}, args,
         args.chunks.reduction);
}

// Code for older devices runs on new ones, and has no such instructions.
bool has_nvls_kernels() {
  cudaFuncAttributes attributes;
  const auto* const kernel = reinterpret_cast<const void*>(kKernels.single);
  check("cudaFuncGetAttributes", cudaFuncGetAttributes(&attributes, kernel));
  return attributes.ptxVersion >= 90;
}

void load_nvls_kernels() {
  for (const auto kernel : {kKernels.copy, kKernels.single, kKernels.half, kKernels.brain}) {
    load_kernel(kernel);
  }
}

}  // namespace ringcomm::cuda
