// Arguments of kernels that meet, with addresses as the host sees them.
#pragma once

#include "device/kernel_args.h"
#include "sim/sim_graphs.h"

namespace ringcomm::sim {

inline void set_host_side(Addresses& to_host, cuda::Members& members) {
  to_host(members.abort, sizeof *members.abort, true);
  for (int i = 0; i < members.n_ranks; ++i) to_host(members.flags[i], sizeof(cuda::Flags));
}

inline void set_host_side(Addresses& to_host, cuda::Exchange& exchange) {
  to_host(exchange.input, exchange.input_bytes);
  to_host(exchange.output, 0);
}

inline void set_host_side(Addresses& to_host, cuda::TwoShotArgs& args) {
  set_host_side(to_host, args.members);
  // Other ranks read these addresses as they see them, also those of registered memory.
  for (cuda::LeaderSlot& slot : args.given) {
    slot.input &= ~kDeviceSide;
    slot.output &= ~kDeviceSide;
  }
  for (uint64_t* const operand : {&args.part.own.input, &args.part.own.output}) {
    auto* at = reinterpret_cast<std::byte*>(*operand);
    to_host(at, 1);
    *operand = reinterpret_cast<uint64_t>(at);
  }
}

inline void set_host_side(Addresses& to_host, cuda::OneShotArgs& args) {
  set_host_side(to_host, args.members);
  set_host_side(to_host, args.exchange);
  for (int i = 0; i < args.members.n_ranks; ++i) to_host(args.window[i], 2 * cuda::kOneShotWindow);
}

inline void set_host_side(Addresses& to_host, cuda::LowLatencyArgs& args) {
  set_host_side(to_host, args.members);
  set_host_side(to_host, args.exchange);
  for (int i = 0; i < args.members.n_ranks; ++i) to_host(args.lines[i], cuda::kPieceLines);
}

inline void set_host_side(Addresses& to_host, cuda::Chunks& chunks, int count) {
  for (int i = 0; i < count; ++i) {
    to_host(chunks.input[i], chunks.bytes[i]);
    to_host(chunks.output[i], chunks.bytes[i]);
  }
}

inline void set_host_side(Addresses& to_host, cuda::RingArgs& args) {
  set_host_side(to_host, args.members);
  to_host(args.slots, cuda::kRingBytes);
  to_host(args.next_slots, cuda::kRingBytes);
  set_host_side(to_host, args.chunks, args.members.n_ranks);
}

}  // namespace ringcomm::sim
