// Operations of ranks that have a device each, by kernels that meet: no stream waits for a word of
// the host's memory. Nothing counts here, so a graph that has them does the same at each replay.
#include "device/device_comm.h"

namespace ringcomm::cuda {

Algorithm DeviceComm::kernel_for(const Shape& shape, std::optional<Algorithm> asked) const {
  return link_ ? cuda::kernel_for(shape, *link_, group_->messages, asked) : kByKernel;
}

std::string DeviceComm::kernels_text() const {
  return link_ ? cuda::kernels_text(size(), *link_, group_->messages) : "";
}

void DeviceComm::collective(Stream stream, const Call& call, Algorithm kernel) {
  if (kernel == kByKernel) return hand_over(stream, call);
  if (kernel == kByTwoShot) return two_shot(stream, call);
  one_step(stream, call, kernel);
}

Members DeviceComm::members(int blocks) const {
  Members all{.rank = rank_, .n_ranks = size(), .blocks = blocks, .flags = {}};
  all.abort = reinterpret_cast<const uint32_t*>(word(rank_, &own().abort()));
  for (Rank rank = 0; rank < size(); ++rank) all.flags[rank] = &group_->prologue(rank).flags;
  return all;
}

// What is not mapped yet is staged, round by round. Whether it is does not concern the others:
// their kernels read and write where they are told.
void DeviceComm::two_shot(Stream stream, const Call& call) {
  Handover handover = prepare(call.shape, call.input, call.output, call.kept);
  TwoShotArgs args{.members = members(blocks_for(call.shape, *link_)),
                   .part = handover.served.at(0).args,
                   .given = {}};
  args.part.call = call.call;
  if (reduces(call.shape.collective)) args.part.reduction = call.reduction;
  for (const Share& share : handover.shares) {
    args.given[share.leader] = share.slot;
    args.given[share.leader].call = call.call;
  }
  for (uint64_t round = 0; round < handover.rounds(); ++round) {
    for (const Piece& piece : handover.in) stage(stream, piece, round, false);
    args.part.round = round * args.part.unit;
    flush(stream);
    api_.launch(stream, args);
    for (const Piece& piece : handover.out) stage(stream, piece, round, true);
  }
}

// Operands in several pieces are put together in the window.
void DeviceComm::one_step(Stream stream, const Call& call, Algorithm kernel) {
  const Spans window({region(rank_, false)});
  const auto place = [&](const Spans& spans, uint64_t at) {
    if (spans.bytes() == 0) return Span();
    const Span first = spans.at(0);
    return first.bytes == spans.bytes() ? first : Span{window.at(at).data, spans.bytes()};
  };
  const uint64_t behind = (call.input.bytes() + kPiece - 1) / kPiece * kPiece;
  const Span in = place(call.input, 0), out = place(call.output, behind);
  Exchange exchange = exchange_of(call.shape, rank_);
  exchange.reduction =
      reduces(call.shape.collective) ? call.reduction : copy_of(call.shape.element);
  exchange.input = in.data;
  exchange.output = out.data;
  exchange.input_bytes = in.bytes;
  copy(stream, Spans({in}), 0, call.input, 0, in.bytes);
  flush(stream);
  const uint64_t windows = kPrologue + group_->end, lines = windows + 2 * kOneShotWindow;
  if (kernel == kByOneShot) {
    OneShotArgs args{.members = members(kOneShotBlocks), .exchange = exchange, .window = {}};
    for (size_t rank = 0; rank < peers_.size(); ++rank)
      args.window[rank] = group_->of[rank] + windows;
    api_.launch(stream, args);
  } else {
    LowLatencyArgs args{.members = members(kLowLatencyBlocks), .exchange = exchange, .lines = {}};
    for (size_t rank = 0; rank < peers_.size(); ++rank) args.lines[rank] = group_->of[rank] + lines;
    args.pieces = low_latency_bytes(size()) / kPiece;
    api_.launch(stream, args);
  }
  copy(stream, call.output, 0, Spans({out}), 0, out.bytes);
}

}  // namespace ringcomm::cuda
