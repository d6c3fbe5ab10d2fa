// Turns operations into work of streams: copies, kernels, and words that are written and waited
// for. No function here waits for another rank.
#include <algorithm>

#include "device/device_comm.h"
#include "plan/cursor.h"

namespace ringcomm::cuda {
namespace {

constexpr int32_t kTwoShotBlocks = 16;
constexpr uint32_t kMostCommands = 256;  // of a batch, of which two are in a stream

}  // namespace

Math math_of(const Reduction& reduction, bool final) {
  Math math;
  math.dtype = reduction.dtype;
  math.op = reduction.op;
  math.final = final;
  math.ranks = reduction.ranks;
  math.e4m3_overflow = e4m3_overflow();
  return math;
}

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
  commands_ += static_cast<uint32_t>(words_.size()) + 1;  // and what comes after them
  if (!words_.empty()) api_.each_word(stream, words_);
  words_.clear();
}

void DeviceComm::copy(Stream stream, std::byte* to, const std::byte* from, uint64_t bytes) {
  flush(stream);
  api_.copy(stream, to, from, bytes);
}

void DeviceComm::copy(Stream stream, const Spans& to, uint64_t at, const Spans& from,
                      uint64_t first, uint64_t bytes) {
  while (bytes > 0) {
    const Span dst = to.at(at), src = from.at(first);
    const uint64_t piece = std::min({bytes, dst.bytes, src.bytes});
    if (dst.data != src.data) copy(stream, dst.data, src.data, piece);
    at += piece;
    first += piece;
    bytes -= piece;
  }
}

void DeviceComm::begin_watched() { words_.push_back({word(rank_, &own().replaying()), 1}); }

void DeviceComm::end_watched(Stream stream) {
  words_.push_back({word(rank_, &own().replaying()), 0});
  flush(stream);
}

void DeviceComm::mark(Stream stream, int timeline, uint32_t value) {
  const OnDevice here(api_, device_);
  words_.push_back({word(rank_, &own().done(timeline)), value});
  flush(stream);
}

// ---- plans

// A stream that waits takes some 1,000 commands. Then the driver makes its caller wait, with a lock
// that all other calls need. So the caller waits here before that.
void DeviceComm::limit_commands(Stream stream) {
  if (commands_ < kMostCommands) return;
  commands_ = 0;
  mark(stream, spare_timeline(), ++batches_);
  await_done_(spare_timeline(), batches_ - 1);
}

struct DeviceComm::Lowering {
  void run() {
    for (; cursor; cursor.next()) {
      const Step& step = *cursor;
      if (step.verb == Verb::kCopy) copy(step);
      if (step.verb == Verb::kReduce) reduce(step);
      if (step.verb == Verb::kSignal) comm.signal(step.peer, step.lane);
      if (step.verb == Verb::kWait) comm.await(step.peer, step.lane);
      comm.limit_commands(stream);
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
      comm.flush(stream);
      comm.api_.launch(stream, args);
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
  if (args.count > 0) api_.launch(stream, args);
}

// ---- all_reduce by a kernel of each rank

// Its window is used by nothing else, so nobody reads what it overwrites.
void DeviceComm::two_shot(Stream stream, const Reduction& reduction, const Spans& input,
                          const Spans& output) {
  const OnDevice here(api_, device_);
  const uint64_t element = size_of(reduction.dtype);
  TwoShotArgs args{};
  args.math = math_of(reduction, true);
  args.rank = rank_;
  args.n_ranks = size();
  args.blocks = kTwoShotBlocks;
  args.abort = reinterpret_cast<const uint32_t*>(word(rank_, &own().abort()));
  for (Rank rank = 0; rank < size(); ++rank) {
    args.window[rank] = group_->of[static_cast<size_t>(rank)] + kPrologue + group_->window;
    args.flags[rank] = &group_->prologue(rank).flags;
  }
  const Spans window({{args.window[rank_], group_->messages - group_->window}});
  const Segments rounds{input.bytes(), window.bytes() / element * element};
  for (uint64_t i = 0; i < rounds.count(); ++i) {
    const uint64_t offset = rounds.offset(i), bytes = rounds.length(i);
    const Span in = bytes > 0 ? input.at(offset) : Span();
    const Span out = bytes > 0 ? output.at(offset) : Span();
    const bool whole = std::min(in.bytes, out.bytes) >= bytes;
    args.count = bytes / element;
    args.input = whole ? in.data : args.window[rank_];
    args.output = whole ? out.data : args.window[rank_];
    if (!whole) copy(stream, window, 0, input, offset, bytes);
    flush(stream);
    api_.launch(stream, args);
    if (!whole) copy(stream, output, offset, window, 0, bytes);
  }
}

}  // namespace ringcomm::cuda
