// Turns operations into work of streams: copies, kernels, and words that are written and waited
// for. No function here waits for another rank.
#include <algorithm>

#include "device/device_comm.h"
#include "plan/cursor.h"

namespace ringcomm::cuda {
namespace {

constexpr uint64_t kChunks = 4;  // of messages, in the memory for them
constexpr int32_t kTwoShotBlocks = 16;

Math math_of(const Reduction& reduction, bool final) {
  Math math;
  math.dtype = reduction.dtype;
  math.op = reduction.op;
  math.final = final;
  math.ranks = reduction.ranks;
  math.e4m3_overflow = e4m3_overflow();
  return math;
}

// fn(piece of `spans`, bytes before it) for [offset, offset + bytes).
template <typename Function>
void each_piece(const Spans& spans, uint64_t offset, uint64_t bytes, Function&& fn) {
  for (uint64_t done = 0; done < bytes;) {
    const Span span = spans.at(offset + done);
    const uint64_t length = std::min(span.bytes, bytes - done);
    fn(Span{span.data, length}, done);
    done += length;
  }
}

}  // namespace

// ---- words

std::byte* DeviceComm::word(Rank of, const void* in_its_area) const {
  const auto* at = static_cast<const std::byte*>(in_its_area);
  return peer(of).device_area + (at - peer(of).area.base());
}

// These are put off until there is other work for the stream: a call of the driver costs as much
// for many words as for one.
void DeviceComm::signal(Rank to, int lane, uint32_t by) {
  Peer& peer = this->peer(to);
  peer.sent[lane] += by;
  words_.push_back({word(to, &peer.area.line(rank_, lane)), peer.sent[lane], Word::kWrite});
}

void DeviceComm::await(Rank from, int lane, uint32_t by) {
  std::atomic<uint32_t>& awaited = peer(from).awaited[lane];
  const uint32_t value = awaited.load(std::memory_order_relaxed) + by;
  awaited.store(value, std::memory_order_relaxed);  // partner: release(), which comes again
  words_.push_back({word(rank_, &own().line(from, lane)), value, Word::kWait});
}

void DeviceComm::flush(Stream stream) {
  if (!words_.empty()) api_.each_word(stream, words_);
  words_.clear();
}

void DeviceComm::copy(Stream stream, std::byte* to, const std::byte* from, uint64_t bytes) {
  flush(stream);
  api_.copy(stream, to, from, bytes);
}

template <typename Args>
void DeviceComm::launch(Stream stream, const Args& args) {
  flush(stream);
  api_.launch(stream, args);
}

void DeviceComm::mark(Stream stream, int timeline, uint32_t value) {
  const OnDevice here(api_, device_);
  api_.write(stream, word(rank_, &own().done(timeline)), value);
}

// ---- plans

struct DeviceComm::Lowering {
  void run() {
    for (; cursor; cursor.next()) {
      const Step& step = *cursor;
      if (step.verb == Verb::kCopy) copy(step);
      if (step.verb == Verb::kReduce) reduce(step);
      if (step.verb == Verb::kSignal) comm.signal(step.peer, step.lane);
      if (step.verb == Verb::kWait) comm.await(step.peer, step.lane);
    }
  }

  const Ref& ref(const Step& step, size_t i) const { return plan.refs[step.first_ref + i]; }

  // Where the byte `done` bytes into an operand is, and how many follow without a seam.
  Span locate(const Ref& ref, uint64_t done) const {
    const uint64_t offset = cursor.offset(ref) + done;
    if (ref.space == Space::kInput) return input.at(offset);
    if (ref.space == Space::kOutput) return output.at(offset);
    const Geometry& geometry = comm.geometry_;
    const uint64_t inbox = ref.space == Space::kInbox ? geometry.inbox_offset(ref.from) : 0;
    return {comm.half(ref.rank, half) + inbox + offset, UINT64_MAX};
  }

  void copy(const Step& step) {
    for (uint64_t done = 0, total = cursor.bytes(); done < total;) {
      const Span to = locate(ref(step, 0), done), from = locate(ref(step, 1), done);
      const uint64_t bytes = std::min({total - done, to.bytes, from.bytes});
      done += bytes;
      if (to.data != from.data) comm.copy(stream, to.data, from.data, bytes);
    }
  }

  void reduce(const Step& step) {
    ReduceArgs args{};
    args.math = math_of(reduction, step.final);
    args.n_dsts = step.dst_count;
    args.n_srcs = step.src_count;
    for (uint64_t done = 0, total = cursor.bytes(); done < total;) {
      uint64_t bytes = total - done;
      for (int i = 0; i < args.n_dsts + args.n_srcs; ++i) {
        const Span span = locate(ref(step, static_cast<size_t>(i)), done);
        bytes = std::min(bytes, span.bytes);
        i < args.n_dsts ? args.dst[i] = span.data : args.src[i - args.n_dsts] = span.data;
      }
      args.count = bytes / size_of(reduction.dtype);
      comm.launch(stream, args);
      done += bytes;
    }
  }

  DeviceComm& comm;
  const Stream stream;
  const Plan& plan;
  const uint64_t half;
  const Reduction& reduction;
  const Spans& input;
  const Spans& output;
  PlanCursor cursor{plan};
};

std::byte* DeviceComm::half(Rank rank, uint64_t half) const {
  return group_->of[static_cast<size_t>(rank)] + kPrologue + half * geometry_.half_bytes();
}

void DeviceComm::run(Stream stream, const Plan& plan, uint64_t sequence, const Reduction& reduction,
                     const Spans& input, const Spans& output) {
  const OnDevice here(api_, device_);
  Lowering{*this, stream, plan, sequence % 2, reduction, input, output}.run();
  flush(stream);
}

void DeviceComm::scale(Stream stream, DType dtype, double factor, Span dst, const std::byte* src) {
  const OnDevice here(api_, device_);
  ReduceArgs args{};
  args.math = math_of({dtype, ReduceOp::kSum, 1, factor}, true);
  args.math.scale = true;
  args.math.factor = factor;
  args.count = dst.bytes / size_of(dtype);
  args.n_dsts = args.n_srcs = 1;
  args.dst[0] = dst.data;
  args.src[0] = src;
  if (args.count > 0) launch(stream, args);
}

// ---- all_reduce by kernels of its own

void DeviceComm::all_reduce(Stream stream, uint64_t sequence, const Reduction& reduction,
                            const Spans& input, const Spans& output) {
  const OnDevice here(api_, device_);
  const uint64_t element = size_of(reduction.dtype);
  const uint64_t most = geometry_.window_bytes() / element * element;
  const Rounds rounds{sequence, input, output, math_of(reduction, true), {input.bytes(), most}};
  if (!one_device_) return two_shot(stream, rounds);
  const bool staged = !fill_slot(rounds);
  rank_ == 0 ? lead(stream, rounds, staged) : follow(stream, rounds, staged);
  flush(stream);
}

// Says where the leader's kernel finds this rank's operands: false, where that is in the window.
bool DeviceComm::fill_slot(const Rounds& rounds) {
  const uint64_t bytes = rounds.bytes.total;
  LeaderSlot& slot = own().slot(rounds.sequence);
  slot = {};
  if (bytes == 0) return true;
  const Span in = rounds.input.at(0), out = rounds.output.at(0);
  const bool whole = in.bytes >= bytes && out.bytes >= bytes;
  if (rank_ == 0 && whole) {
    slot.input = reinterpret_cast<uint64_t>(in.data);
    slot.output = reinterpret_cast<uint64_t>(out.data);
  } else if (whole) {
    slot.input = exports_->at_leader({in.data, bytes}, rounds.sequence);
    slot.output =
        in.data == out.data ? slot.input : exports_->at_leader({out.data, bytes}, rounds.sequence);
  }
  if (slot.input != 0 && slot.output != 0) return true;
  const uint64_t offset = kPrologue + rounds.sequence % 2 * geometry_.half_bytes();
  const uint64_t seen =
      rank_ == 0 ? reinterpret_cast<uint64_t>(group_->of[0]) : peer(0).area.info(0).seen[rank_];
  slot = {seen + offset, seen + offset, 1};
  return false;
}

// Copies round i of the input into the window; unstage() copies the window into the output.
void DeviceComm::stage(Stream stream, const Rounds& rounds, uint64_t i) {
  std::byte* const window = half(rank_, rounds.sequence % 2);
  each_piece(rounds.input, rounds.bytes.offset(i), rounds.bytes.length(i),
             [&](Span from, uint64_t done) { copy(stream, window + done, from.data, from.bytes); });
}

void DeviceComm::unstage(Stream stream, const Rounds& rounds, uint64_t i) {
  const std::byte* const window = half(rank_, rounds.sequence % 2);
  each_piece(rounds.output, rounds.bytes.offset(i), rounds.bytes.length(i),
             [&](Span to, uint64_t done) { copy(stream, to.data, window + done, to.bytes); });
}

// Waits for all, computes for all, tells all: round after round. Ranks whose operands lie where
// they are have said so for all rounds at once, so only for those that are staged is there a wait.
void DeviceComm::lead(Stream stream, const Rounds& rounds, bool staged) {
  LeaderArgs args{};
  args.math = rounds.math;
  args.n_ranks = size();
  const uint64_t element = size_of(args.math.dtype);
  args.abort = reinterpret_cast<const uint32_t*>(word(rank_, &own().abort()));
  for (Rank rank = 0; rank < size(); ++rank) {
    const LeaderSlot& slot = peer(rank).area.slot(rounds.sequence);
    args.slot[rank] = reinterpret_cast<const LeaderSlot*>(word(rank, &slot));
  }
  for (uint64_t i = 0; i < rounds.bytes.count(); ++i) {
    if (staged) stage(stream, rounds, i);
    for (Rank rank = 1; rank < size(); ++rank) await(rank, kDataLane);
    args.first = rounds.bytes.offset(i) / element;
    args.count = rounds.bytes.length(i) / element;
    if (args.count > 0) launch(stream, args);
    for (Rank rank = 1; rank < size(); ++rank) signal(rank, kDataLane);
    if (staged) unstage(stream, rounds, i);
  }
}

void DeviceComm::follow(Stream stream, const Rounds& rounds, bool staged) {
  const auto number = static_cast<uint32_t>(rounds.bytes.count());
  if (!staged) {
    signal(0, kDataLane, number);
    return await(0, kDataLane, number);
  }
  for (uint64_t i = 0; i < number; ++i) {
    stage(stream, rounds, i);
    signal(0, kDataLane);
    await(0, kDataLane);
    unstage(stream, rounds, i);
  }
}

void DeviceComm::two_shot(Stream stream, const Rounds& rounds) {
  TwoShotArgs args{};
  args.math = rounds.math;
  args.rank = rank_;
  args.n_ranks = size();
  args.blocks = kTwoShotBlocks;
  args.abort = reinterpret_cast<const uint32_t*>(word(rank_, &own().abort()));
  for (Rank rank = 0; rank < size(); ++rank) {
    args.window[rank] = half(rank, rounds.sequence % 2);
    args.flags[rank] =
        reinterpret_cast<TwoShotFlags*>(group_->of[static_cast<size_t>(rank)] + kProofs);
  }
  for (uint64_t i = 0; i < rounds.bytes.count(); ++i) {
    const uint64_t offset = rounds.bytes.offset(i), bytes = rounds.bytes.length(i);
    const Span in = bytes > 0 ? rounds.input.at(offset) : Span();
    const Span out = bytes > 0 ? rounds.output.at(offset) : Span();
    const bool whole = std::min(in.bytes, out.bytes) >= bytes;
    args.count = bytes / size_of(args.math.dtype);
    args.input = whole ? in.data : args.window[rank_];
    args.output = whole ? out.data : args.window[rank_];
    if (!whole) stage(stream, rounds, i);
    launch(stream, args);
    if (!whole) unstage(stream, rounds, i);
  }
}

// ---- messages

// Each step sends a chunk to every peer and then receives one of every peer, so ranks that send to
// one another, in pairs or in a subgroup, never wait for one another in vain. Messages to one peer,
// or from it, follow one another: there they may be received one by one.
void DeviceComm::transfer(Stream stream, std::span<const Transfer> transfers) {
  const OnDevice here(api_, device_);
  std::vector<Transfer> rest(transfers.begin(), transfers.end());
  while (!rest.empty()) {
    std::vector<size_t> over;
    for (const bool sending : {true, false}) {
      std::vector<bool> moved(peers_.size());
      for (size_t i = 0; i < rest.size(); ++i) {
        auto& [sends, peer, data] = rest[i];
        if (sends != sending || moved[static_cast<size_t>(peer)]) continue;
        moved[static_cast<size_t>(peer)] = true;
        const Span chunk{data.data, std::min(slot(rank_, peer, 0).bytes, data.bytes)};
        sending ? send_chunk(stream, peer, chunk) : receive_chunk(stream, peer, chunk);
        data = {data.data + chunk.bytes, data.bytes - chunk.bytes};
        if (data.bytes == 0) over.push_back(i);
      }
    }
    std::sort(over.rbegin(), over.rend());
    for (const size_t i : over) rest.erase(rest.begin() + static_cast<std::ptrdiff_t>(i));
  }
  flush(stream);
}

// Where rank `of` receives this chunk of what `from` sends, and how large it may be.
Span DeviceComm::slot(Rank of, Rank from, uint64_t chunk) const {
  const Rank peer = of == rank_ ? from : of;
  if (const auto pair = memory_.find(peer + 1); pair != memory_.end()) {
    const uint64_t unit = pair->second.bytes / kChunks;
    std::byte* const first = pair->second.of[static_cast<size_t>(of)] + kPrologue;
    return {first + chunk % kChunks * unit, unit};
  }
  const uint64_t messages = group_->bytes - 2 * geometry_.half_bytes();
  const uint64_t unit = messages / peers_.size() / (64 * kChunks) * 64;
  return {half(of, 2) + (static_cast<uint64_t>(from) * kChunks + chunk % kChunks) * unit, unit};
}

void DeviceComm::send_chunk(Stream stream, Rank to, Span data) {
  const uint64_t number = peer(to).messages[1]++;
  if (number >= kChunks) await(to, kMessageCreditLane);
  if (data.bytes > 0) copy(stream, slot(to, rank_, number).data, data.data, data.bytes);
  signal(to, kMessageLane);
}

void DeviceComm::receive_chunk(Stream stream, Rank from, Span data) {
  const uint64_t number = peer(from).messages[0]++;
  await(from, kMessageLane);
  if (data.bytes > 0) copy(stream, data.data, slot(rank_, from, number).data, data.bytes);
  signal(from, kMessageCreditLane);
}

}  // namespace ringcomm::cuda
