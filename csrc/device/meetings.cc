// Operations of ranks that have a device each, by kernels that meet: no stream waits for a word of
// the host's memory. Nothing counts here, so a graph that has them does the same at each replay.
#include "device/device_comm.h"

namespace ringcomm::cuda {

Algorithm DeviceComm::kernel_for(const Shape& shape, std::optional<Algorithm> asked) const {
  return link_ ? cuda::kernel_for(shape, *link_, group_->messages, asked) : kHandOver;
}

std::string DeviceComm::kernels_text() const {
  return link_ ? cuda::kernels_text(size(), *link_, group_->messages) : "";
}

void DeviceComm::collective(Stream stream, const Call& call, Algorithm kernel) {
  exports_->begin();
  if (kernel == kHandOver || kernel == kByCopies)
    return hand_over(stream, call, kernel == kByCopies);
  if (kernel == kByTwoShot) return two_shot(stream, call);
  if (kernel == kByRing) return by_ring(stream, call);
  one_step(stream, call, kernel);
}

Members DeviceComm::members(int blocks, const Call& call) const {
  Members all{.rank = rank_, .n_ranks = size(), .blocks = blocks, .flags = {}};
  all.abort = reinterpret_cast<uint32_t*>(word(rank_, &own().abort()));
  all.patience = static_cast<uint64_t>(call.patience.count());
  for (Rank rank = 0; rank < size(); ++rank) all.flags[rank] = &group_->prologue(rank).flags;
  return all;
}

// What is not mapped yet is staged, round by round. Whether it is does not concern the others:
// their kernels read and write where they are told.
void DeviceComm::two_shot(Stream stream, const Call& call) {
  Handover handover = prepare(call.shape, call.input, call.output, call.kept);
  TwoShotArgs args{.members = members(blocks_for(call.shape, *link_), call),
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
  const uint64_t windows = kPrologue + group_->end + kRingBytes;
  const uint64_t lines = windows + 2 * kOneShotWindow;
  if (kernel == kByOneShot) {
    OneShotArgs args{.members = members(kOneShotBlocks, call), .exchange = exchange, .window = {}};
    for (size_t rank = 0; rank < peers_.size(); ++rank)
      args.window[rank] = group_->of[rank] + windows;
    api_.launch(stream, args);
  } else {
    LowLatencyArgs args{
        .members = members(kLowLatencyBlocks, call), .exchange = exchange, .lines = {}};
    for (size_t rank = 0; rank < peers_.size(); ++rank) args.lines[rank] = group_->of[rank] + lines;
    args.pieces = low_latency_bytes(size()) / kPiece;
    api_.launch(stream, args);
  }
  copy(stream, call.output, 0, Spans({out}), 0, out.bytes);
}

// Operands in several pieces are staged, round by round. All ranks have the same rounds, since what
// they write to one another follows alike on both sides.
void DeviceComm::by_ring(Stream stream, const Call& call) {
  const Collective collective = call.shape.collective;
  const bool chain = collective == Collective::kBroadcast || collective == Collective::kReduce;
  Chunks chunks{.reduction = reduces(collective) ? call.reduction : copy_of(call.shape.element),
                .sums = reduces(collective),
                .gathers = collective != Collective::kReduceScatter,
                .input = {},
                .output = {},
                .bytes = {}};
  LeaderArgs parts = parts_of(call.shape, chain);
  set_unit(parts);
  const uint64_t longest = *std::max_element(parts.length, parts.length + parts.parts);
  const auto place = [&](const Spans& spans, bool is_split, Rank part) -> std::byte* {
    if (spans.bytes() == 0 || (!is_split && !chain && part != rank_)) return nullptr;
    const Span first = spans.at(0);
    if (first.bytes < spans.bytes()) return staged_at(parts, is_split ? part : 0, is_split);
    return first.data + parts.round + (is_split ? parts.first[part] : 0);
  };
  const auto stage_all = [&](const Spans& spans, bool is_split, uint64_t round, bool back) {
    if (spans.bytes() == 0 || spans.at(0).bytes == spans.bytes()) return;
    for (const Piece& piece : pieces_of(parts, spans, is_split)) stage(stream, piece, round, back);
  };
  for (uint64_t round = 0; round < Segments{longest, parts.unit}.count(); ++round) {
    parts.round = round * parts.unit;
    for (Rank part = 0; part < parts.parts; ++part) {
      chunks.input[part] = place(call.input, parts.input_is_split, part);
      chunks.output[part] = place(call.output, parts.output_is_split, part);
      chunks.bytes[part] = Segments{parts.length[part], parts.unit}.length(round);
    }
    stage_all(call.input, parts.input_is_split, round, false);
    flush(stream);
    launch_ring(stream, call, chunks, chain);
    stage_all(call.output, parts.output_is_split, round, true);
  }
}

void DeviceComm::launch_ring(Stream stream, const Call& call, const Chunks& chunks, bool chain) {
  const auto slots = [&](Rank rank) {
    return group_->of[static_cast<size_t>(rank)] + kPrologue + group_->end;
  };
  RingArgs args{.members = members(kRingBlocks, call), .chunks = chunks, .chain = chain};
  args.root = call.shape.root;
  args.slots = slots(rank_);
  args.next_slots = slots(call.shape.after(rank_));
  api_.launch(stream, args);
}

}  // namespace ringcomm::cuda
