// The kernels that need no meeting: reduce, scale, and the leader's.
#include <type_traits>

#include "cuda/launch.h"
#include "device/api.h"
#include "reduce/kernels.h"

namespace ringcomm::cuda {
namespace {

#include "cuda/kernels_device.inc.h"

template <class Codec, class Op, int kSources>
__global__ void __launch_bounds__(kThreads, kBlocks)
    reduce_kernel(const __grid_constant__ ReduceArgs args, const __grid_constant__ Launch launch) {
  Context context;
  reduce_body<Codec, Op, kSources>(context, args, launch);
}

using Kernel = BySources<void (*)(ReduceArgs, Launch)>;
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

void launch_reduce(Stream stream, const ReduceArgs& args, int multiprocessors) {
  const uint64_t size = size_of(args.math.dtype);
  launch(stream, find(kKernels, args.math).of(args.n_srcs),
         {blocks_for(args.count * size, multiprocessors), kThreads}, args, Launch{size});
}

void launch_leader(Stream stream, const LeaderArgs& leader, int multiprocessors) {
  uint64_t bytes = 0;
  for (int part = 0; part < leader.parts; ++part) {
    bytes += std::min(leader.length[leader.begin + part], leader.unit);
  }
  const int blocks = std::max(1, blocks_for(bytes, multiprocessors) / leader.parts);
  const Launch launched{size_of(leader.math.dtype), true, leader};
  ReduceArgs args{};
  args.math = leader.math;
  launch(stream, find(kKernels, leader.math).of(leader.from == Who::kAll ? leader.n_ranks : 1),
         {blocks, kThreads, leader.parts}, args, launched);
}

void load_kernels() {
  const auto load = [](const Kernel& entry) {
    for (const auto kernel : {entry.any, entry.one, entry.two, entry.four, entry.eight})
      load_kernel(kernel);
  };
  for (const auto& row : kKernels.reduce) std::for_each(std::begin(row), std::end(row), load);
  for (const Kernel& entry : kKernels.scale) load(entry);
  load_two_shot_kernels();
}

}  // namespace ringcomm::cuda
