// The kernels of one rank, for itself or as a leader.
#include <type_traits>

#include "cuda/launch.h"
#include "device/api.h"
#include "reduce/kernels.h"

namespace ringcomm::cuda {
namespace {

#include "cuda/kernels_device.inc.h"

template <class Codec, class Op, int kSources>
__global__ void __launch_bounds__(kThreads, kBlocks)
    reduce_kernel(const __grid_constant__ LeaderArgs args, uint64_t element_bytes) {
  Context context;
  reduce_body<Codec, Op, kSources>(context, args, element_bytes);
}

using Kernel = BySources<void (*)(LeaderArgs, uint64_t)>;
using KernelTable = TableOf<Kernel>;

template <class Codec, class Op>
constexpr Kernel by_sources() {
  const auto any = reduce_kernel<Codec, Op, 0>;
  if constexpr (kWorthIt<Codec, Op>) {
    return {any, any, reduce_kernel<Codec, Op, 2>, reduce_kernel<Codec, Op, 4>,
            reduce_kernel<Codec, Op, 8>};
  } else if constexpr (std::is_same_v<Op, Bor>) {
    return {any, reduce_kernel<Codec, Op, 1>, any, any, any};
  } else {
    return {any, any, any, any, any};
  }
}

template <class Codec, class Op, int kUnit = 1>
constexpr Kernel kKernel = by_sources<CodecFor<Codec, Op>, OpFor<Codec, Op>>();

#include "reduce/table.inc.h"

constinit const KernelTable kKernels = all_kernels();

}  // namespace

void launch_leader(Stream stream, const LeaderArgs& leader, int multiprocessors) {
  uint64_t bytes = 0;
  for (int part = 0; part < leader.parts; ++part) {
    bytes += std::min(leader.length[leader.begin + part], leader.unit);
  }
  const int blocks = std::max(1, blocks_for(bytes, multiprocessors) / leader.parts);
  launch(stream, find(kKernels, leader.reduction).of(sources_of(leader)),
         {blocks, kThreads, leader.parts}, leader, leader.reduction);
}

void load_kernels() {
  for (const auto& row : kKernels.reduce) {
    for (const Kernel& entry : row) entry.for_each([](const auto kernel) { load_kernel(kernel); });
  }
  load_meeting_kernels();
  load_ring_kernels();
}

}  // namespace ringcomm::cuda
