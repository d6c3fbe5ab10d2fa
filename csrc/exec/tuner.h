// Chooses how large operations run, by measuring: the segment size, and whether copies bypass the
// caches. There is a contest for each collective and size, and every rank takes part. Segments
// shape plans, so rank 0 chooses them for all; each rank chooses its own kind of copy. Results are
// the same in all ways.
#pragma once

#include <atomic>
#include <memory>

#include "exec/contest.h"
#include "plan/shape.h"

namespace ringcomm {

// The way in which an executor carries out one operation.
struct Manner {
  bool streams = false;  // copies into the output go past the caches
  bool timed = false;    // how long it takes will be asked for
};

class Tuner {
 public:
  // A collective has contests for messages from 256 KiB up, by powers of two.
  static constexpr int kSizes = 10;
  static constexpr uint64_t kLeastBytes = 256 << 10;
  static constexpr uint64_t kLeastStreamed = 1 << 20, kUsuallyStreamed = 16 << 20;
  static constexpr std::array<uint64_t, 4> kSegments = {64 << 10, 128 << 10, 256 << 10, 512 << 10};
  static constexpr uint64_t kLargest = kSegments.back() << 2;
  static constexpr size_t kWords = kCollectives * kSizes;

  // `words`: rank 0's kWords, which all read; null: segments stay as they are. `threads`: rank 0's
  // for an operation; they need longer segments, because they meet after each of their steps.
  Tuner(Rank rank, std::atomic<uint8_t>* words, int threads = 1)
      : rank_(rank),
        words_(words),
        shift_(threads > 3   ? 2
               : threads > 1 ? 1
                             : 0) {}

  // Chooses for the next operation, the same one on every rank. Sets the segment in its shape.
  Manner next(Shape& shape, Algorithm algorithm);
  // Returns the manner for a readable shape, which has no contest: past the caches all_gather of 4
  // MiB took 0.85 times as long, and all_reduce of 4 MiB twice, of 25 MiB 0.6 to 0.9 times.
  Manner of_readable(Shape& shape) const;
  // Notes how long it took, if it was timed.
  void took(double seconds);

 private:
  struct Entry {
    Contest contest;
    int segments, kinds;  // the ways: each segment with each kind of copy
    int usual_kind;
    int way = 0;
  };
  int decide(const Entry& entry, size_t index) const;

  const Rank rank_;
  std::atomic<uint8_t>* const words_;
  const int shift_;  // of segments
  std::array<std::unique_ptr<Entry>, kWords> entries_;
  Entry* current_ = nullptr;
  size_t index_ = 0;
};

}  // namespace ringcomm
