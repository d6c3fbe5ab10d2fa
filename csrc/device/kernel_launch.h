// A group's operations on its devices, as work of a stream: by hand-overs, which any ranks of a
// host can do, or by kernels that wait for one another, where each rank has a device. Then no
// stream waits for a word of the host's memory. No function here waits for another rank, and
// nothing counts: a graph that has an operation does the same at each replay.
#pragma once

#include "device/operands.h"

namespace ringcomm::cuda {

// One thread at a time may call it, on the group's device.
class KernelLaunch {
 public:
  KernelLaunch(Peers& peers, StreamWords& words)
      : peers_(peers), rank_(peers.rank()), words_(words), operands_(peers) {}

  struct Call {
    const Shape& shape;
    uint64_t call;  // equal where ranks call the same
    const Reduction& reduction;
    const Spans &input, &output;
    bool kept = false;                     // stays mapped for graphs
    std::chrono::nanoseconds patience{0};  // of a kernel that waits for others; 0: no end
  };
  // Enqueues an operation by kernels that read inputs and write outputs of all ranks, and add up in
  // rank order. Words at the end of it may be put off.
  void collective(Stream stream, const Call& call, Algorithm kernel);
  // Exports what collective() needs.
  void offer(const Shape& shape, const Spans& input, const Spans& output);
  // Enqueues messages that make progress side by side.
  void transfer(Stream stream, std::span<const Transfer> transfers);

 private:
  void hand_over(Stream stream, const Call& call, bool by_engines);
  Members members(int blocks, const Call& call) const;
  void two_shot(Stream stream, const Call& call);
  void one_step(Stream stream, const Call& call, Algorithm kernel);
  void by_ring(Stream stream, const Call& call);

  Peers& peers_;
  const Rank rank_;
  StreamWords& words_;
  Operands operands_;
};

}  // namespace ringcomm::cuda
