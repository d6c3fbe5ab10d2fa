#include "exec/tuner.h"

#include <bit>

#include "plan/select.h"

namespace ringcomm {
namespace {

constexpr int kUsualSegment = 2;

// Does the collective copy into its outputs? Sums go there straight from the addition.
bool copies(Collective collective) {
  return collective != Collective::kReduce && collective != Collective::kReduceScatter;
}

// Bytes of the longer side. All ranks agree on it, except in all_to_all, which has no segments.
uint64_t bytes_of(const Shape& shape) {
  if (shape.collective == Collective::kAllToAll) {
    return offset_of(shape.recv, shape.size);
  }
  const uint64_t ranks = sharded(shape.collective) ? static_cast<uint64_t>(shape.size) : 1;
  return message_bytes(shape) * ranks;
}

}  // namespace

Manner Tuner::of_readable(Shape& shape) const {
  shape.geometry.segment_bytes = kSegments[kUsualSegment] << shift_;
  return {!reduces(shape.collective) || bytes_of(shape) >= kUsuallyStreamed};
}

Manner Tuner::next(Shape& shape, Algorithm algorithm) {
  current_ = nullptr;
  const uint64_t bytes = bytes_of(shape);
  if (bytes < kLeastBytes) return {};
  const int size = std::min(static_cast<int>(std::bit_width(bytes / kLeastBytes)), kSizes) - 1;
  index_ = static_cast<size_t>(static_cast<int>(shape.collective) * kSizes + size);
  const bool windows = words_ != nullptr && algorithm == Algorithm::kDirect;
  const bool streams = bytes >= kLeastStreamed && copies(shape.collective);
  const int segments =
      windows && shape.collective != Collective::kScatter && shape.collective != Collective::kGather
          ? static_cast<int>(kSegments.size())
          : 1;
  const int kinds = streams ? 2 : 1;
  if (segments * kinds == 1) return {};
  auto& entry = entries_[index_];
  if (!entry) {
    // Until it is known: sums are mostly made in place, where the line is in the cache already.
    const int kind = streams && bytes >= kUsuallyStreamed && !reduces(shape.collective) ? 1 : 0;
    const int usual = (segments > 1 ? kUsualSegment * kinds : 0) + kind;
    entry = std::make_unique<Entry>(Contest(segments * kinds, usual), segments, kinds, kind);
  }
  entry->way = entry->contest.next([&] { return decide(*entry, index_); });
  current_ = entry.get();
  if (segments > 1) {
    shape.geometry.segment_bytes = kSegments[static_cast<size_t>(entry->way / kinds)] << shift_;
  }
  return {entry->way % kinds == 1, entry->contest.tries_now()};
}

void Tuner::took(double seconds) {
  Contest& contest = current_->contest;
  contest.took(current_->way, seconds);
  if (rank_ != 0 || current_->segments == 1 || !contest.last_try()) return;
  const int segment = contest.fastest() / current_->kinds;
  words_[index_].store(static_cast<uint8_t>(segment), std::memory_order_release);  // decide()
}

// Rank 0 wrote its choice before it began the previous operation. That operation has ended here, so
// it had begun on rank 0. So this rank reads rank 0's choice. Rank 0 writes its next choice when
// the last try of the next period has ended there. By then all ranks have begun that try, and so
// have read this choice.
int Tuner::decide(const Entry& entry, size_t index) const {
  int segment = 0;
  if (entry.segments > 1) {
    const int said = words_[index].load(std::memory_order_acquire);  // partner: took()
    segment = said % entry.segments;                                 // it is another process's
  }
  const int first = segment * entry.kinds;
  return entry.contest.fastest(first, entry.kinds, first + entry.usual_kind);
}

}  // namespace ringcomm
