// Finds the fastest of a few ways by trying. It tries each way in turn, uses the best, and tries
// all again after 1,024 turns. The way of a turn depends only on its number and on the last
// decision. So ranks that take the same turns and decide the same go the same ways.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>

namespace ringcomm {

class Contest {
 public:
  static constexpr int kMostWays = 8;
  static constexpr uint32_t kTries = 3;      // of each way; the best counts: others were disturbed
  static constexpr uint32_t kPeriod = 1024;  // turns after which all are tried again
  static constexpr double kMargin = 0.05;    // another must be so much better than the usual one

  Contest(int ways, int usual) : ways_(ways), usual_(usual), decided_(usual) { costs_.fill(kNone); }

  // Returns the way of the next turn. One turn after all tries, `decide` names the winner. By then
  // this rank has heard that the last try has ended on every rank.
  int next(auto&& decide) {
    at_ = turns_++ % kPeriod;
    if (at_ == 0) costs_.fill(kNone);
    if (at_ < tries()) return (usual_ + static_cast<int>(at_)) % ways_;
    if (at_ == tries() + 1) decided_ = decide();
    return decided_;
  }
  bool tries_now() const { return at_ < tries(); }  // then call took() for this turn
  bool last_try() const { return at_ + 1 == tries(); }
  void took(int way, double cost) {
    double& best = costs_[static_cast<size_t>(way)];
    best = std::min(best, cost);
  }
  // Returns the best of `count` ways from `first` on: `usual`, unless another is clearly better.
  int fastest(int first, int count, int usual) const {
    const auto weighed = [&](int way) {
      return costs_[static_cast<size_t>(way)] * (way == usual ? 1 - kMargin : 1);
    };
    int best = usual;
    for (int way = first; way < first + count; ++way) {
      if (weighed(way) < weighed(best)) best = way;
    }
    return best;
  }
  int fastest() const { return fastest(0, ways_, usual_); }

 private:
  static constexpr double kNone = std::numeric_limits<double>::infinity();
  uint32_t tries() const { return kTries * static_cast<uint32_t>(ways_); }

  int ways_, usual_, decided_;
  uint32_t turns_ = 0, at_ = 0;
  std::array<double, kMostWays> costs_;
};

}  // namespace ringcomm
