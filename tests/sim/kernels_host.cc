#include "sim/kernels_host.h"

#include <array>
#include <span>

#include "base/error.h"
#include "sim/sim_memory.h"

namespace ringcomm::sim {

using namespace cuda;

void run_reduce(const ReduceArgs& args) {
  const Math& math = args.math;
  if (math.scale) {
    scale(math.dtype, math.factor, args.dst[0], args.src[0], args.count);
    return;
  }
  reduce({math.dtype, math.op, math.ranks, math.factor}, math.final,
         std::span(args.dst, static_cast<size_t>(args.n_dsts)),
         std::span(args.src, static_cast<size_t>(args.n_srcs)), args.count);
}

void run_leader(const LeaderArgs& args) {
  ReduceArgs one;
  one.math = args.math;
  one.count = args.count;
  one.n_dsts = one.n_srcs = args.n_ranks;
  for (int i = 0; i < args.n_ranks; ++i) {
    const uint64_t skip = args.slot[i]->staged != 0 ? 0 : args.first * size_of(args.math.dtype);
    one.src[i] = reinterpret_cast<const std::byte*>(args.slot[i]->input) + skip;
    one.dst[i] = reinterpret_cast<std::byte*>(args.slot[i]->output) + skip;
  }
  run_reduce(one);
}

void run_two_shot(const TwoShotArgs& /*args*/) {
  throw DeviceError("the two-shot kernel is not simulated yet");
}

}  // namespace ringcomm::sim
