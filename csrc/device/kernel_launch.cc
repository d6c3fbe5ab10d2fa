#include "device/kernel_launch.h"

#include <deque>

namespace ringcomm::cuda {

void KernelLaunch::collective(Stream stream, const Call& call, Algorithm kernel) {
  peers_.exports().begin();
  if (kernel == kHandOver || kernel == kByCopies)
    return hand_over(stream, call, kernel == kByCopies);
  if (kernel == kByTwoShot) return two_shot(stream, call);
  if (kernel == kByRing) return by_ring(stream, call);
  one_step(stream, call, kernel);
}

void KernelLaunch::offer(const Shape& shape, const Spans& input, const Spans& output) {
  peers_.exports().begin();
  static_cast<void>(operands_.by_kernels(shape, input, output, true));
}

// ---- hand-overs

void KernelLaunch::hand_over(Stream stream, const Call& call, bool by_engines) {
  const Shape& shape = call.shape;
  const bool exchange = shape.collective == Collective::kAllToAll;
  if (exchange || by_engines) {
    const Exchange own = exchange_of(shape, rank_);
    words_.copy(stream, call.output, own.to[rank_], call.input, own.first[rank_], own.bytes[rank_]);
  }
  Handover handover = by_engines ? operands_.by_copies(shape, call.input, call.output)
                                 : operands_.by_kernels(shape, call.input, call.output, call.kept);
  for (auto& share : handover.shares) share.slot.call = exchange ? share.slot.call : call.call;
  for (auto& served : handover.served) {
    served.args.call = exchange ? 0 : call.call;
    if (reduces(shape.collective)) served.args.reduction = call.reduction;
  }
  run(peers_, words_, stream, handover);
}

// Each step has at most one message to each peer and one from each, so ranks that send to one
// another, in pairs or in a ring, never wait for one another in vain.
void KernelLaunch::transfer(Stream stream, std::span<const Transfer> transfers) {
  peers_.exports().begin();
  std::vector<Transfer> rest(transfers.begin(), transfers.end());
  while (!rest.empty()) {
    Handover handover;
    handover.messages = true;
    std::deque<Spans> data;
    std::vector<Transfer> later;
    std::vector<std::array<bool, 2>> moved(static_cast<size_t>(peers_.size()));
    for (const Transfer& transfer : rest) {
      bool& busy = moved[static_cast<size_t>(transfer.peer)][transfer.sending ? 1 : 0];
      if (std::exchange(busy, true)) {
        later.push_back(transfer);
      } else if (transfer.sending) {
        operands_.send(handover, transfer, data.emplace_back(std::vector{transfer.data}));
      } else {
        operands_.receive(handover, transfer);
      }
    }
    run(peers_, words_, stream, handover);
    rest = std::move(later);
  }
}

// ---- kernels that wait for one another

Members KernelLaunch::members(int blocks, const Call& call) const {
  Members all{.rank = rank_, .n_ranks = peers_.size(), .blocks = blocks, .flags = {}};
  all.abort = reinterpret_cast<uint32_t*>(peers_.word(rank_, &peers_.own().abort()));
  all.patience = static_cast<uint64_t>(call.patience.count());
  for (Rank rank = 0; rank < peers_.size(); ++rank) all.flags[rank] = peers_.group().flags(rank);
  return all;
}

// Operands that are not mapped yet are staged, round by round. That does not concern the others:
// their kernels read and write where they are told.
void KernelLaunch::two_shot(Stream stream, const Call& call) {
  Handover handover = operands_.by_kernels(call.shape, call.input, call.output, call.kept);
  TwoShotArgs args{.members = members(blocks_for(call.shape, *peers_.link()), call),
                   .part = handover.served.at(0).args,
                   .given = {}};
  args.part.call = call.call;
  args.part.abort = nullptr;  // its meetings look, and it reads nothing that a host releases
  if (reduces(call.shape.collective)) args.part.reduction = call.reduction;
  for (const auto& share : handover.shares) {
    args.given[share.leader] = share.slot;
    args.given[share.leader].call = call.call;
  }
  for (uint64_t round = 0; round < handover.rounds(); ++round) {
    for (const StagedOperand& operand : handover.in) stage(words_, stream, operand, round, false);
    args.part.round = round * args.part.unit;
    words_.launch(stream, args);
    for (const StagedOperand& operand : handover.out) stage(words_, stream, operand, round, true);
  }
}

// Operands in several pieces are put together in the window.
void KernelLaunch::one_step(Stream stream, const Call& call, Algorithm kernel) {
  const Spans window({peers_.region(rank_, false)});
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
  words_.copy(stream, Spans({in}), 0, call.input, 0, in.bytes);
  const SubgroupMemory& memory = peers_.group();
  if (kernel == kByOneShot) {
    const int blocks = std::min(kMostOneShot, peers_.link()->blocks);
    OneShotArgs args{.members = members(blocks, call), .exchange = exchange, .window = {}};
    for (Rank rank = 0; rank < peers_.size(); ++rank) args.window[rank] = memory.one_shot(rank);
    words_.launch(stream, args);
  } else {
    LowLatencyArgs args{
        .members = members(kLowLatencyBlocks, call), .exchange = exchange, .lines = {}};
    for (Rank rank = 0; rank < peers_.size(); ++rank) args.lines[rank] = memory.lines(rank);
    args.pieces = low_latency_bytes(peers_.size()) / kPiece;
    words_.launch(stream, args);
  }
  words_.copy(stream, call.output, 0, Spans({out}), 0, out.bytes);
}

// Operands in several pieces are staged, round by round. All ranks have the same rounds, since what
// they write to one another follows alike on both sides.
void KernelLaunch::by_ring(Stream stream, const Call& call) {
  const Collective collective = call.shape.collective;
  const bool chain = collective == Collective::kBroadcast || collective == Collective::kReduce;
  RingArgs args{.members = members(kRingBlocks, call), .chunks = {}, .chain = chain};
  args.root = call.shape.root;
  args.slots = peers_.group().slots(rank_);
  args.next_slots = peers_.group().slots(call.shape.after(rank_));
  Chunks& chunks = args.chunks;
  chunks.reduction = reduces(collective) ? call.reduction : copy_of(call.shape.element);
  chunks.sums = reduces(collective);
  chunks.gathers = collective != Collective::kReduceScatter;
  LeaderArgs parts = parts_of(call.shape, chain);
  const uint64_t rounds = operands_.set_unit(parts);
  const auto place = [&](const Spans& spans, bool is_split, Rank part) -> std::byte* {
    if (spans.bytes() == 0 || (!is_split && !chain && part != rank_)) return nullptr;
    const Span first = spans.at(0);
    if (first.bytes < spans.bytes())
      return operands_.staged_at(parts, is_split ? part : 0, is_split);
    return first.data + parts.round + (is_split ? parts.first[part] : 0);
  };
  const auto stage_all = [&](const Spans& spans, bool is_split, uint64_t round, bool back) {
    if (spans.bytes() == 0 || spans.at(0).bytes == spans.bytes()) return;
    for (const StagedOperand& operand : operands_.staged_operands(parts, spans, is_split))
      stage(words_, stream, operand, round, back);
  };
  for (uint64_t round = 0; round < rounds; ++round) {
    parts.round = round * parts.unit;
    for (Rank part = 0; part < parts.parts; ++part) {
      chunks.input[part] = place(call.input, parts.input_is_split, part);
      chunks.output[part] = place(call.output, parts.output_is_split, part);
      chunks.bytes[part] = Segments{parts.length[part], parts.unit}.length(round);
    }
    stage_all(call.input, parts.input_is_split, round, false);
    words_.launch(stream, args);
    stage_all(call.output, parts.output_is_split, round, true);
  }
}

}  // namespace ringcomm::cuda
