// Input and output of an operation: lists of memory with virtual offsets, so that list and
// coalesced forms need no packing.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ringcomm {

struct Span {
  std::byte* data = nullptr;
  uint64_t bytes = 0;
  bool operator==(const Span&) const = default;
};

inline uint64_t bytes_of(const std::vector<Span>& spans) {
  uint64_t bytes = 0;
  for (const Span& span : spans) bytes += span.bytes;
  return bytes;
}

// Consecutive spans seen as one range of bytes.
class Spans {
 public:
  Spans() = default;
  explicit Spans(const std::vector<Span>& spans) { assign(spans); }

  void assign(const std::vector<Span>& spans) {
    spans_.clear();
    starts_.clear();
    bytes_ = 0;
    for (const Span& span : spans) {
      if (span.bytes == 0) continue;
      spans_.push_back(span);
      starts_.push_back(bytes_);
      bytes_ += span.bytes;
    }
  }

  uint64_t bytes() const { return bytes_; }

  // Returns the memory at `offset`, and how much follows without a seam. offset < bytes().
  Span at(uint64_t offset) const {
    if (spans_.size() == 1) return {spans_[0].data + offset, bytes_ - offset};
    const auto after = std::upper_bound(starts_.begin(), starts_.end(), offset);
    const auto index = static_cast<size_t>(after - starts_.begin()) - 1;
    const uint64_t within = offset - starts_[index];
    return {spans_[index].data + within, spans_[index].bytes - within};
  }

 private:
  std::vector<Span> spans_;
  std::vector<uint64_t> starts_;
  uint64_t bytes_ = 0;
};

}  // namespace ringcomm
