// Chooses how many flows carry the bytes for a peer: one more while that brings more, fewer when it
// does not. A trial of one more, or one less, is compared with the usual number before and after
// it: a path that changes meanwhile shows in both. Only time counts in which there always was more
// to send. After a trial that changed nothing the next one waits, longer each time.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "base/deadline.h"

namespace ringcomm {

class FlowCount {
 public:
  static constexpr double kGain = 1.05;  // a flow must make the sum so much faster
  static constexpr double kFast = 1e9;   // bytes a second; on a near path, processors set them
  static constexpr size_t kWindows = 5;  // the median of so many measurements counts
  static constexpr int kRampUp = 2;      // windows that pass before, while flows get their pace
  static constexpr int kRoundTrips = 4;  // a window takes at least so many, and
  static constexpr Clock::duration kShortest = std::chrono::milliseconds(100);
  static constexpr Clock::duration kNear = std::chrono::milliseconds(1);  // round trip
  static constexpr Clock::duration kPause = std::chrono::seconds(2);
  static constexpr Clock::duration kLongestPause = std::chrono::minutes(10);

  explicit FlowCount(int most) : most_(most) {}
  int count() const { return count_; }

  // Notes that so many bytes arrived since the last call. `full`: there is more to send than flows
  // take now.
  void sample(Clock::time_point now, uint64_t arrived, bool full, Clock::duration round_trip) {
    const auto since = now - std::exchange(at_, now);
    if (!std::exchange(full_, full) || !full) return;
    bytes_ += arrived;
    time_ += since;
    if (time_ < std::max(kShortest, kRoundTrips * round_trip)) return;
    const double seconds = std::chrono::duration<double>(std::exchange(time_, {})).count();
    const double rate = static_cast<double>(std::exchange(bytes_, 0)) / seconds;
    if (++windows_ <= kRampUp) return;
    rates_[static_cast<size_t>(windows_) % kWindows] = rate;
    if (windows_ >= kRampUp + static_cast<int>(kWindows)) decide(now, round_trip < kNear);
  }

 private:
  void decide(Clock::time_point now, bool near) {
    auto sorted = rates_;
    std::ranges::sort(sorted);
    const double rate = sorted[kWindows / 2];
    if (count_ != usual_) {
      tried_ = rate;
      return go(usual_);
    }
    const double tried = std::exchange(tried_, 0), usual = (before_ + rate) / 2;
    const bool won = tried > 0 && (upward_ ? tried > kGain * usual : kGain * tried >= usual);
    if (won) usual_ += upward_ ? 1 : -1;
    if (won) pause_ = kPause;
    before_ = won ? tried : rate;
    if (tried > 0 && (!won || usual_ == (upward_ ? most_ : 1))) {
      upward_ = !upward_;
      next_ = now + pause_;
      pause_ = std::min(2 * pause_, kLongestPause);
    }
    upward_ = usual_ == 1 || (upward_ && usual_ < most_);
    const bool tries = now >= next_ && !(upward_ && near && before_ > kFast);
    go(tries ? usual_ + (upward_ ? 1 : -1) : usual_);
  }
  void go(int count) {
    if (std::exchange(count_, count) != count) windows_ = 0;
  }

  const int most_;
  int count_ = 1, usual_ = 1;  // they differ during a trial
  int windows_ = 0;            // since count_ has changed
  bool upward_ = true, full_ = false;
  double before_ = 0, tried_ = 0;  // bytes a second, before the trial and in it; 0: not yet
  std::array<double, kWindows> rates_{};
  uint64_t bytes_ = 0;  // in the window so far, as its time
  Clock::duration time_{}, pause_ = kPause;
  Clock::time_point at_, next_;
};

}  // namespace ringcomm
