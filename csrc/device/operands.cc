#include "device/operands.h"

namespace ringcomm::cuda {
namespace {

constexpr uint64_t kShort = 64 * 1024;  // of messages, in bytes

// Part p comes from rank p to the leader, where `first` says.
void set_receiving(LeaderArgs& args, uint64_t unit) {
  args.parts = args.n_ranks;
  args.root = args.rank;
  args.from = Who::kPart;
  args.to = Who::kRoot;
  args.output_is_split = true;
  args.unit = unit;
}

}  // namespace

// 0: the leader does not see it as one.
uint64_t Operands::address_at(Rank leader, const Spans& spans, uint64_t first, uint64_t bytes,
                              bool kept) {
  if (bytes == 0) return 0;
  const Span span{spans.at(first).data, bytes};
  if (spans.at(first).bytes < bytes) return 0;
  if (leader == rank_) return reinterpret_cast<uint64_t>(span.data);
  return peers_.exports().address_at(leader, span, kept);
}

void Operands::set_common(LeaderArgs& args, uint64_t element) const {
  args.reduction = copy_of(element);
  args.n_ranks = peers_.size();
  args.rank = rank_;
  args.abort = reinterpret_cast<const uint32_t*>(peers_.word(rank_, &peers_.own().abort()));
}

// ---- collectives

uint64_t Operands::set_unit(LeaderArgs& args) const {
  const auto parts = static_cast<uint64_t>(std::max(1, args.parts));
  const uint64_t sides = parts + (args.input_is_split != args.output_is_split ? 1 : 0);
  args.unit = peers_.region(rank_, false).bytes / sides / 512 * 512;
  return Segments{*std::max_element(args.length, args.length + parts), args.unit}.count();
}

// In the window a side of one part is behind that of several; else both are in the same place.
std::byte* Operands::staged_at(const LeaderArgs& args, Rank part, bool is_split) const {
  const bool behind = !is_split && args.input_is_split != args.output_is_split;
  return peers_.region(rank_, false).data +
         static_cast<uint64_t>(behind ? args.parts : part) * args.unit;
}

std::vector<StagedOperand> Operands::staged_operands(const LeaderArgs& args, const Spans& spans,
                                                     bool is_split) const {
  std::vector<StagedOperand> operands;
  for (Rank part = 0; spans.bytes() > 0 && part < (is_split ? args.parts : 1); ++part) {
    operands.push_back({&spans, is_split ? args.first[part] : 0,
                        is_split ? args.length[part] : spans.bytes(), args.unit,
                        staged_at(args, part, is_split)});
  }
  return operands;
}

Handover Operands::by_kernels(const Shape& shape, const Spans& input, const Spans& output,
                              bool kept) {
  if (shape.collective == Collective::kAllToAll) return by_each(shape, input, output, kept);
  const bool alone = peers_.one_device() || shape.collective == Collective::kBarrier;
  Served served;
  LeaderArgs& args = served.args;
  args = parts_of(shape, alone);
  set_common(args, shape.element);
  const uint64_t rounds = set_unit(args);

  Handover handover;
  bool whole = true;
  for (Rank leader = 0; leader < peers_.size(); ++leader) {
    if (alone ? leader > 0 : !concerns(args, rank_, leader)) continue;
    const LeaderSlot slot{address_at(leader, input, 0, input.bytes(), kept),
                          address_at(leader, output, 0, output.bytes(), kept)};
    whole = whole && (slot.input != 0 || input.bytes() == 0);
    whole = whole && (slot.output != 0 || output.bytes() == 0);
    handover.shares.push_back({leader, slot, rounds});
  }
  if (!whole) {
    handover.in = staged_operands(args, input, args.input_is_split);
    handover.out = staged_operands(args, output, args.output_is_split);
    for (Share& share : handover.shares) {
      share.slot = {peers_.seen_by(share.leader, staged_at(args, 0, args.input_is_split), false),
                    peers_.seen_by(share.leader, staged_at(args, 0, args.output_is_split), false),
                    1};
    }
  }
  const auto own = std::ranges::find(handover.shares, rank_, &Share::leader);
  if (own == handover.shares.end()) return handover;
  args.own = own->slot;
  handover.shares.erase(own);
  for (Rank rank = 0; rank < peers_.size(); ++rank) {
    if (alone || concerns(args, rank, rank_)) served.rounds[static_cast<size_t>(rank)] = rounds;
  }
  if (!alone) args.begin = rank_, args.parts = 1;
  handover.served.push_back(served);
  return handover;
}

// Others pull this rank's input from where it is staged: hosts know the addresses of windows, and
// not those of others' tensors. Ranks pull in turn from those behind
// them, so that not all pull from one at once.
Handover Operands::by_copies(const Shape& shape, const Spans& input, const Spans& output) const {
  const Exchange exchange = exchange_of(shape, rank_);
  const bool split =
      shape.collective == Collective::kScatter || shape.collective == Collective::kAllToAll;
  const Span window = peers_.region(rank_, false);
  const uint64_t unit = window.bytes / (split ? static_cast<size_t>(peers_.size()) : 1) / 512 * 512;
  const auto place = [&](Rank of, Rank to) {
    return peers_.group().window(of) + (split ? static_cast<uint64_t>(to) * unit : 0);
  };
  Handover handover;
  for (Rank i = 1; i < peers_.size(); ++i) {
    const Rank peer = shape.after(rank_, -i);
    const uint64_t sent = exchange.sent_bytes[peer], bytes = exchange.bytes[peer];
    if (sent > 0) {
      if (split || handover.in.empty())
        handover.in.push_back({&input, exchange.sent_first[peer], sent, unit, place(rank_, peer)});
      handover.shares.push_back({peer, {0, 0, 1, sent}, Segments{sent, unit}.count()});
    }
    if (bytes == 0) continue;
    const StagedOperand operand{&output, exchange.to[peer], bytes, unit, place(peer, rank_)};
    handover.pulls.push_back({peer, operand, Segments{bytes, unit}.count()});
  }
  return handover;
}

// all_to_all: no rank knows how much two others send to one another. So each leads where it
// receives, also where all share a device.
Handover Operands::by_each(const Shape& shape, const Spans& input, const Spans& output, bool kept) {
  const Span window = peers_.region(rank_, false);
  const auto ranks = static_cast<size_t>(peers_.size());
  const uint64_t unit = window.bytes / (2 * ranks) / 512 * 512;  // parts to send, parts to get
  const auto rounds = [&](uint64_t bytes) {
    return bytes == 0 ? 0 : Segments{bytes, unit}.count();
  };
  Handover handover;
  Served served;
  LeaderArgs& args = served.args;
  set_common(args, shape.element);
  set_receiving(args, unit);
  bool whole = true;
  for (size_t at = 0; at < ranks; ++at) {
    const auto peer = static_cast<Rank>(at);
    if (peer == rank_) continue;
    const StagedOperand to{&input, offset_of(shape.send, peer), shape.send[at], unit,
                           window.data + at * unit};
    const StagedOperand from{&output, offset_of(shape.recv, peer), shape.recv[at], unit,
                             window.data + (ranks + at) * unit};
    const LeaderSlot slot{address_at(peer, input, to.first, to.length, kept), 0, 0, to.length};
    if (to.length > 0) handover.shares.push_back({peer, slot, rounds(to.length)});
    args.length[at] = from.length;
    args.first[at] = address_at(rank_, output, from.first, from.length, kept);
    served.rounds[at] = rounds(from.length);
    handover.in.push_back(to);
    handover.out.push_back(from);
    whole =
        whole && (slot.input != 0 || to.length == 0) && (args.first[at] != 0 || from.length == 0);
  }
  if (whole) handover.in.clear(), handover.out.clear();
  for (Share& share : whole ? std::span<Share>() : std::span(handover.shares)) {
    std::byte* const mine = window.data + static_cast<size_t>(share.leader) * unit;
    share.slot = {peers_.seen_by(share.leader, mine, false), 0, 1, share.slot.call};
  }
  if (!whole) args.own = {0, reinterpret_cast<uint64_t>(window.data + ranks * unit), 1};
  handover.served.push_back(served);
  return handover;
}

// ---- messages

// A short one is staged in any case: its sender goes on at once.
void Operands::send(Handover& handover, const Transfer& message, const Spans& data) {
  const Span window = peers_.region(message.peer, true);
  const uint64_t bytes = message.data.bytes;
  Share share{message.peer, {0, 0, 0, bytes}, Segments{bytes, window.bytes}.count()};
  if (bytes > kShort) share.slot.input = address_at(message.peer, data, 0, bytes, false);
  const bool aligned = share.slot.input % 8 == 0;  // whatever type its receiver takes it for
  if (share.slot.input == 0 || !aligned) {
    share.slot.input = peers_.seen_by(message.peer, window.data, true);
    share.slot.staged = 1;
    handover.in.push_back({&data, 0, bytes, window.bytes, window.data});
  }
  handover.shares.push_back(share);
}

// One kernel receives all that comes in rounds of one length.
void Operands::receive(Handover& handover, const Transfer& message) {
  const uint64_t unit = peers_.region(message.peer, true).bytes;
  const auto same = [&](const Served& served) { return served.args.unit == unit; };
  auto served = std::ranges::find_if(handover.served, same);
  if (served == handover.served.end()) {
    served = handover.served.insert(served, Served());
    set_common(served->args, message.element);
    set_receiving(served->args, unit);
  }
  const auto at = static_cast<size_t>(message.peer);
  served->args.reduction =
      copy_of(std::min(message.element, size_of(served->args.reduction.dtype)));
  served->args.first[at] = reinterpret_cast<uint64_t>(message.data.data);
  served->args.length[at] = message.data.bytes;
  served->rounds[at] = Segments{message.data.bytes, unit}.count();
}

}  // namespace ringcomm::cuda
