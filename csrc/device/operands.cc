// What the kernels of hand-overs work on: where operands are, or are staged.
#include <algorithm>
#include <deque>
#include <numeric>

#include "device/handover.h"

namespace ringcomm::cuda {
namespace {

constexpr uint64_t kShort = 64 * 1024;  // of messages, in bytes

// With one source it is a copy.
Math copy_of(uint64_t element) {
  Math math;
  math.op = ReduceOp::kBor;
  math.dtype = element == 1   ? DType::kUint8
               : element == 2 ? DType::kUint16
               : element == 4 ? DType::kUint32
                              : DType::kUint64;
  return math;
}

// Whose inputs a kernel reads, and whose outputs it writes.
void set_pattern(LeaderArgs& args, Collective collective) {
  using enum Collective;
  const bool scatters = collective == kScatter || collective == kReduceScatter;
  args.input_is_split = scatters;
  args.output_is_split = collective == kGather || collective == kAllGather;
  args.from = args.output_is_split                                 ? Who::kPart
              : collective == kBroadcast || collective == kScatter ? Who::kRoot
                                                                   : Who::kAll;
  args.to = scatters                                         ? Who::kPart
            : collective == kGather || collective == kReduce ? Who::kRoot
                                                             : Who::kAll;
}

uint64_t before(const std::vector<uint64_t>& parts, size_t part) {
  return std::accumulate(parts.begin(), parts.begin() + static_cast<std::ptrdiff_t>(part),
                         uint64_t{0});
}

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

// ---- memory

const DeviceComm::Memory& DeviceComm::memory_with(Rank peer, bool messages) const {
  const auto pair = messages ? memory_.find(peer + 1) : memory_.end();
  return pair != memory_.end() ? pair->second : *group_;
}

// Where this rank stages what it gives that leader.
Span DeviceComm::region(Rank leader, bool messages) const {
  const Memory& memory = memory_with(leader, messages);
  std::byte* const mine = memory.of[static_cast<size_t>(rank_)] + kPrologue;
  if (!messages) return {mine + memory.window, memory.messages - memory.window};
  const bool pair = &memory != group_;
  const uint64_t all = memory.end - memory.messages;
  const uint64_t bytes = pair ? all : all / peers_.size() / 512 * 512;
  return {mine + memory.messages + (pair ? 0 : static_cast<uint64_t>(leader) * bytes), bytes};
}

uint64_t DeviceComm::seen_by(Rank leader, const std::byte* mine, bool messages) const {
  if (leader == rank_) return reinterpret_cast<uint64_t>(mine);
  const Memory& memory = memory_with(leader, messages);
  const RankInfo& theirs = peer(leader).area.info(&memory == group_ ? 0 : 1 + rank_);
  return theirs.seen[rank_] + static_cast<uint64_t>(mine - memory.of[static_cast<size_t>(rank_)]);
}

// 0: the leader does not see it as one.
uint64_t DeviceComm::address_at(Rank leader, const Spans& spans, uint64_t first, uint64_t bytes,
                                bool kept) {
  if (bytes == 0) return 0;
  const Span span{spans.at(first).data, bytes};
  if (spans.at(first).bytes < bytes) return 0;
  if (leader == rank_) return reinterpret_cast<uint64_t>(span.data);
  return exports_->address_at(leader, span, kept);
}

LeaderSlot& DeviceComm::slot_of(Rank leader, Rank from, bool messages) const {
  const Rank peer = leader == rank_ ? from : leader;
  return memory_with(peer, messages).prologue(leader).slots[messages ? 1 : 0][from];
}

void DeviceComm::find_slots(LeaderArgs& args, bool messages) const {
  for (Rank from = 0; from < size(); ++from) {
    const bool met = group_ != nullptr || memory_.contains(from + 1);
    if (from != rank_ && met) args.slot[from] = &slot_of(rank_, from, messages);
  }
}

// What is equal for all that a kernel of this rank does.
void DeviceComm::set_common(LeaderArgs& args, uint64_t element) const {
  args.math = copy_of(element);
  args.n_ranks = size();
  args.rank = rank_;
  args.abort = reinterpret_cast<const uint32_t*>(word(rank_, &own().abort()));
}

void DeviceComm::stage(Share& share, uint64_t seen, const Piece& piece) {
  share.slot.input = seen;
  share.slot.staged = 1;
  share.in = {piece};
}

// ---- collectives

void DeviceComm::hand_over(Stream stream, const Shape& shape, uint64_t call,
                           const Reduction& reduction, const Spans& input, const Spans& output,
                           bool kept) {
  const OnDevice here(api_, device_);
  if (shape.collective == Collective::kAllToAll) {
    const auto self = static_cast<size_t>(rank_);
    copy(stream, output, before(shape.recv, self), input, before(shape.send, self),
         shape.send[self]);
  }
  if (!kept) limit_commands(stream);
  Handover handover = prepare(shape, input, output, kept);
  for (Share& share : handover.shares) {
    if (share.slot.call == 0) share.slot.call = call;
  }
  for (Served& served : handover.served) {
    if (reduces(shape.collective)) served.args.math = math_of(reduction, true);
    if (shape.collective != Collective::kAllToAll) served.args.call = call;
  }
  run(stream, handover);
}

void DeviceComm::offer(const Shape& shape, const Spans& input, const Spans& output) {
  const OnDevice here(api_, device_);
  static_cast<void>(prepare(shape, input, output, true));
}

DeviceComm::Handover DeviceComm::prepare(const Shape& shape, const Spans& input,
                                         const Spans& output, bool kept) {
  if (shape.collective == Collective::kAllToAll) return by_each(shape, input, output, kept);
  Handover handover{.messages = false, .shares = {}, .served = {}};
  Served served;
  LeaderArgs& args = served.args;
  set_pattern(args, shape.collective);
  set_common(args, shape.element);
  args.root = shape.root;
  const bool split = args.input_is_split || args.output_is_split;
  args.parts = shape.collective == Collective::kBarrier ? 0 : split ? size() : 1;
  for (Rank part = 0; part < args.parts; ++part) {
    args.first[part] = split ? shape.shard_offset(part) : 0;
    args.length[part] = split ? shape.shard(part) : shape.bytes;
  }
  // A side that is not split is behind the one that is.
  const Span window = region(0, false);
  const auto parts = split ? static_cast<uint64_t>(size()) : 0;
  args.unit = window.bytes / (parts + 1) / 512 * 512;
  const uint64_t behind = parts * args.unit;
  const auto pieces = [&](const Spans& spans, bool is_split) {
    std::vector<Piece> found;
    if (spans.bytes() > 0 && !is_split) found.push_back({&spans, 0, spans.bytes(), behind});
    for (Rank part = 0; spans.bytes() > 0 && is_split && part < args.parts; ++part) {
      found.push_back(
          {&spans, args.first[part], args.length[part], static_cast<uint64_t>(part) * args.unit});
    }
    return found;
  };
  Share share{.leader = 0, .unit = args.unit, .window = Spans({window})};
  share.rounds = Segments{longest_part(args), args.unit}.count();
  share.slot.input = address_at(0, input, 0, input.bytes(), kept);
  share.slot.output = address_at(0, output, 0, output.bytes(), kept);
  if ((input.bytes() > 0 && share.slot.input == 0) ||
      (output.bytes() > 0 && share.slot.output == 0)) {
    const uint64_t seen = seen_by(0, window.data, false);
    share.slot.input = seen + (args.input_is_split ? 0 : behind);
    share.slot.output = seen + (args.output_is_split ? 0 : behind);
    share.slot.staged = 1;
    share.in = pieces(input, args.input_is_split);
    share.out = pieces(output, args.output_is_split);
  }
  if (rank_ == 0) {
    args.own = share.slot;
    std::fill_n(served.rounds.begin() + 1, size() - 1, share.rounds);
    find_slots(args, false);
    handover.served.push_back(served);
  }
  handover.shares.push_back(std::move(share));
  return handover;
}

// all_to_all: nobody knows what two others send to one another. So each is the leader of what it
// gets.
DeviceComm::Handover DeviceComm::by_each(const Shape& shape, const Spans& input,
                                         const Spans& output, bool kept) {
  Handover handover{.messages = false, .shares = {}, .served = {}};
  const Span window = region(rank_, false);
  const auto ranks = static_cast<uint64_t>(size());
  const uint64_t unit = window.bytes / (2 * ranks) / 512 * 512;  // parts to send, parts to get
  const auto rounds = [&](uint64_t bytes) { return Segments{bytes, unit}.count(); };
  Served served;
  LeaderArgs& args = served.args;
  set_common(args, shape.element);
  set_receiving(args, unit);
  Share own{.leader = rank_, .rounds = 1, .unit = unit, .window = Spans({window})};
  own.slot.output = seen_by(rank_, window.data, false) + ranks * unit;
  bool whole = true;
  for (Rank peer = 0; peer < size(); ++peer) {
    const auto at = static_cast<size_t>(peer);
    const uint64_t sends = peer == rank_ ? 0 : shape.send[at];
    const uint64_t gets = peer == rank_ ? 0 : shape.recv[at];
    const Piece to{&input, before(shape.send, at), sends, at * unit};
    const Piece from{&output, before(shape.recv, at), gets, (ranks + at) * unit};
    if (sends > 0) {
      Share share{.leader = peer, .rounds = rounds(sends), .unit = unit, .window = own.window};
      share.slot = {address_at(peer, input, to.first, sends, kept), 0, 0, sends};
      if (share.slot.input == 0) stage(share, seen_by(peer, window.data, false) + to.at, to);
      handover.shares.push_back(std::move(share));
    }
    if (gets == 0) continue;
    args.length[peer] = gets;
    args.first[peer] = address_at(rank_, output, from.first, gets, kept);
    whole = whole && args.first[peer] != 0;
    served.rounds[at] = rounds(gets);
    own.rounds = std::max(own.rounds, rounds(gets));
    own.out.push_back(from);
  }
  if (!whole) {
    own.slot.staged = 1;
    args.own = own.slot;
    handover.shares.push_back(std::move(own));
  }
  find_slots(args, false);
  handover.served.push_back(served);
  return handover;
}

// ---- messages

// Each step has at most one message to each peer and one from each, so ranks that send to one
// another, in pairs or in a circle, never wait for one another in vain.
void DeviceComm::transfer(Stream stream, std::span<const Transfer> transfers) {
  const OnDevice here(api_, device_);
  std::vector<Transfer> rest(transfers.begin(), transfers.end());
  while (!rest.empty()) {
    Handover handover{.messages = true, .shares = {}, .served = {}};
    std::deque<Spans> data;
    std::vector<Transfer> later;
    std::vector<std::array<bool, 2>> moved(peers_.size());
    for (const Transfer& transfer : rest) {
      bool& busy = moved[static_cast<size_t>(transfer.peer)][transfer.sending ? 1 : 0];
      if (std::exchange(busy, true)) {
        later.push_back(transfer);
      } else if (transfer.sending) {
        handover.shares.push_back(sent(transfer, data.emplace_back(std::vector{transfer.data})));
      } else {
        receive(handover, transfer);
      }
    }
    run(stream, handover);
    rest = std::move(later);
  }
}

// A short one is staged in any case: its sender goes on at once.
DeviceComm::Share DeviceComm::sent(const Transfer& message, const Spans& data) {
  const Span window = region(message.peer, true);
  const uint64_t bytes = message.data.bytes;
  Share share{.leader = message.peer, .unit = window.bytes, .window = Spans({window})};
  share.rounds = Segments{bytes, share.unit}.count();
  share.slot.call = bytes;
  if (bytes > kShort) share.slot.input = address_at(message.peer, data, 0, bytes, false);
  if (share.slot.input == 0) {
    stage(share, seen_by(message.peer, window.data, true), {&data, 0, bytes, 0});
  }
  return share;
}

// One kernel receives all that comes in rounds of one length.
void DeviceComm::receive(Handover& handover, const Transfer& message) {
  const uint64_t unit = region(message.peer, true).bytes;
  const auto same = [&](const Served& served) { return served.args.unit == unit; };
  auto served = std::ranges::find_if(handover.served, same);
  if (served == handover.served.end()) {
    served = handover.served.insert(served, Served());
    set_common(served->args, message.element);
    set_receiving(served->args, unit);
    find_slots(served->args, true);
  }
  const auto at = static_cast<size_t>(message.peer);
  const uint64_t element = std::min(message.element, size_of(served->args.math.dtype));
  served->args.math = copy_of(element);
  served->args.first[at] = reinterpret_cast<uint64_t>(message.data.data);
  served->args.length[at] = message.data.bytes;
  served->rounds[at] = Segments{message.data.bytes, unit}.count();
}

}  // namespace ringcomm::cuda
