// Work of streams: copies, words that are written and waited for, and kernels that need no
// hand-over. No function here waits for another rank.
#include <algorithm>

#include "device/device_comm.h"

namespace ringcomm::cuda {

constexpr int32_t kTwoShotBlocks = 16;

// ---- words

std::byte* DeviceComm::word(Rank of, const void* in_its_area) const {
  const auto* at = static_cast<const std::byte*>(in_its_area);
  return peer(of).device_area + (at - peer(of).area.base());
}

// They are put off until there is other work for the stream: a call of the driver costs as much for
// many words as for one.
void DeviceComm::flush(Stream stream) {
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

void DeviceComm::mark(Stream stream, int timeline, uint32_t value) {
  words_.push_back({word(rank_, &own().done(timeline)), value});
  flush(stream);
}

// ---- all_reduce by a kernel of each rank

// What comes before it in the stream has ended on all ranks that read this rank's window.
void DeviceComm::two_shot(Stream stream, const Reduction& reduction, const Spans& input,
                          const Spans& output) {
  const uint64_t element = size_of(reduction.dtype);
  TwoShotArgs args{};
  args.reduction = reduction;
  args.rank = rank_;
  args.n_ranks = size();
  args.blocks = kTwoShotBlocks;
  args.abort = reinterpret_cast<const uint32_t*>(word(rank_, &own().abort()));
  for (Rank rank = 0; rank < size(); ++rank) {
    args.window[rank] = group_->of[static_cast<size_t>(rank)] + kPrologue;
    args.flags[rank] = &group_->prologue(rank).flags;
  }
  const Spans window({{args.window[rank_], group_->messages}});
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
