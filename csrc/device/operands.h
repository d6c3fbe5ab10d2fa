// Makes hand-overs: finds where the operands of kernels are, or stages them.
#pragma once

#include "device/handover.h"

namespace ringcomm::cuda {

// A message on a device.
struct Transfer {
  bool sending;
  Rank peer;
  Span data;
  uint64_t element;  // bytes
};

class Operands {
 public:
  explicit Operands(Peers& peers) : peers_(peers), rank_(peers.rank()) {}

  // Makes a collective's hand-over, whose spans live as long. Memory that is `kept` stays mapped
  // for graphs.
  Handover by_kernels(const Shape& shape, const Spans& input, const Spans& output, bool kept);
  // Makes the same for copy engines.
  Handover by_copies(const Shape& shape, const Spans& input, const Spans& output) const;
  // Adds a message. There is at most one to each peer, and one from each.
  void send(Handover& handover, const Transfer& message, const Spans& data);
  void receive(Handover& handover, const Transfer& message);

  // Sets how much of each part goes in a round. Returns how many rounds there are.
  uint64_t set_unit(LeaderArgs& args) const;
  // Returns the place in the window of a side's part. A side that is not split has one.
  std::byte* staged_at(const LeaderArgs& args, Rank part, bool is_split) const;
  // Returns the parts of a side that is staged.
  std::vector<StagedOperand> staged_operands(const LeaderArgs& args, const Spans& spans,
                                             bool is_split) const;

 private:
  using Share = Handover::Share;
  using Served = Handover::Served;

  Handover by_each(const Shape& shape, const Spans& input, const Spans& output, bool kept);
  uint64_t address_at(Rank leader, const Spans& spans, uint64_t first, uint64_t bytes, bool kept);
  // Sets what is equal for all that a kernel of this rank does.
  void set_common(LeaderArgs& args, uint64_t element) const;

  Peers& peers_;
  const Rank rank_;
};

}  // namespace ringcomm::cuda
