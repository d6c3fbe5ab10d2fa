// The kernels of ranks that have a device each.
#include <type_traits>

#include "cuda/launch.h"
#include "device/api.h"
#include "reduce/kernels.h"

namespace ringcomm::cuda {
namespace {

#include "cuda/kernels_device.inc.h"
#include "cuda/meetings.inc.h"

template <class Codec, class Op, int kSources>
__global__ void __launch_bounds__(kMeetingThreads, 1)
    two_shot_kernel(const __grid_constant__ TwoShotArgs args, uint64_t element_bytes) {
  Context context;
  two_shot_body<Codec, Op, kSources>(context, args, element_bytes);
}

template <class Codec, class Op>
__global__ void __launch_bounds__(kMeetingThreads, 1)
    one_shot_kernel(const __grid_constant__ OneShotArgs args, uint64_t element_bytes) {
  Context context;
  one_shot_body<Codec, Op>(context, args, element_bytes);
}

template <class Codec, class Op>
__global__ void __launch_bounds__(kMeetingThreads, 1)
    low_latency_kernel(const __grid_constant__ LowLatencyArgs args, uint64_t element_bytes) {
  Context context;
  low_latency_body<Codec, Op>(context, args, element_bytes);
}

struct Kernel {
  BySources<void (*)(TwoShotArgs, uint64_t)> two_shot;
  void (*one_shot)(OneShotArgs, uint64_t);
  void (*low_latency)(LowLatencyArgs, uint64_t);
};
using KernelTable = TableOf<Kernel>;

template <class Codec, class Op>
constexpr Kernel kernels_of() {
  const auto any = two_shot_kernel<Codec, Op, 0>;
  const auto one_shot = one_shot_kernel<Codec, Op>;
  const auto low_latency = low_latency_kernel<Codec, Op>;
  if constexpr (kWorthIt<Codec, Op>) {
    return {{any, any, two_shot_kernel<Codec, Op, 2>, two_shot_kernel<Codec, Op, 4>,
             two_shot_kernel<Codec, Op, 8>},
            one_shot,
            low_latency};
  } else if constexpr (std::is_same_v<Op, Bor>) {
    return {{any, two_shot_kernel<Codec, Op, 1>, any, any, any}, one_shot, low_latency};
  } else {
    return {{any, any, any, any, any}, one_shot, low_latency};
  }
}

template <class Codec, class Op, int kUnit = 1>
constexpr Kernel kKernel = kernels_of<CodecFor<Codec, Op>, OpFor<Codec, Op>>();

#include "reduce/table.inc.h"

constinit const KernelTable kKernels = all_kernels();

Grid grid_of(const Members& members) { return {members.blocks, kMeetingThreads}; }

}  // namespace

void launch_meeting(Stream stream, const TwoShotArgs& args) {
  const Reduction& what = args.part.reduction;
  const auto kernel = find(kKernels, what).two_shot.of(sources_of(args.part));
  launch(stream, kernel, grid_of(args.members), args, what);
}

void launch_meeting(Stream stream, const OneShotArgs& args) {
  const Reduction& what = args.exchange.reduction;
  launch(stream, find(kKernels, what).one_shot, grid_of(args.members), args, what);
}

void launch_meeting(Stream stream, const LowLatencyArgs& args) {
  const Reduction& what = args.exchange.reduction;
  launch(stream, find(kKernels, what).low_latency, grid_of(args.members), args, what);
}

void load_meeting_kernels() {
  for (const auto& row : kKernels.reduce) {
    for (const auto& [two_shot, one_shot, low_latency] : row) {
      two_shot.for_each([](const auto kernel) { load_kernel(kernel); });
      load_kernel(one_shot);
      load_kernel(low_latency);
    }
  }
}

}  // namespace ringcomm::cuda
