// The kernels on the calling thread.
#pragma once

#include "cuda/kernels.h"

namespace ringcomm::sim {

void run_reduce(const cuda::ReduceArgs& args);
void run_leader(const cuda::LeaderArgs& args);
void run_two_shot(const cuda::TwoShotArgs& args);

}  // namespace ringcomm::sim
