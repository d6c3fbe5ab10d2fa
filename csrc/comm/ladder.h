// What each layer costs: the same in-place float32 SUM all_reduce timed at three heights, for
// benchmarks/ladder.py. Collective over the group; each returns seconds per call.
//
// The two lower rungs count signals on their own, behind the group's back: give each call a group
// that has run nothing yet, and destroy it afterwards.
#pragma once

#include <span>
#include <vector>

#include "comm/communicator.h"

namespace ringcomm {

// A loop written by hand on the transport: publish, signal, wait, add.
std::vector<double> time_handwritten(Communicator& group, std::span<float> data, int iterations);
// The plan, interpreted: what planning as data costs.
std::vector<double> time_plan(Communicator& group, std::span<float> data, int iterations);
// Communicator::run: fingerprint, plan cache, queue, flight state.
std::vector<double> time_engine(Communicator& group, std::span<float> data, int iterations);

}  // namespace ringcomm
