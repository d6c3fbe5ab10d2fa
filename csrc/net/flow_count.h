// How many flows carry what a process has for a peer: one more while it brings more, fewer when
// not. Each trial compares the usual number with one more or one less, by the bytes that arrived
// while there always were more to send. After a trial that changed nothing the next one waits,
// longer each time.
#pragma once

#include <algorithm>
#include <array>
#include <utility>

#include "base/deadline.h"

namespace ringcomm {

class FlowCount {
 public:
  static constexpr double kGain = 1.05;       // of the speed: less than that is no reason for a flow
  static constexpr double kFast = 1e9;        // bytes a second; on a near path, processors set them
  static constexpr size_t kWindows = 5;       // the median of so many measurements counts
  static constexpr int kRampUp = 2;           // windows that pass before, while flows get their pace
  static constexpr int kRoundTrips = 4;       // of a window, and at least
  static constexpr Clock::duration kShortest = std::chrono::milliseconds(100);
  static constexpr Clock::duration kNear = std::chrono::milliseconds(1);  // round trip
  static constexpr Clock::duration kPause = std::chrono::seconds(10);
  static constexpr Clock::duration kLongestPause = std::chrono::minutes(10);

  explicit FlowCount(int most) : most_(most) {}
  int count() const { return count_; }

  // Since the last look so many bytes arrived. `full`: there is more to send than flows take now.
  void look(Clock::time_point now, uint64_t arrived, bool full, Clock::duration round_trip) {
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
    const bool trial = count_ != usual_;
    const bool won = trial && (count_ > usual_ ? rate > kGain * usual_rate_
                                               : kGain * rate >= usual_rate_);
    if (!trial || won) usual_rate_ = rate;
    if (won) {
      usual_ = count_;
      pause_ = kPause;
    }
    const bool end = usual_ == (upward_ ? most_ : 1);
    if (trial && (!won || end)) {
      upward_ = !upward_;
      next_ = now + pause_;
      pause_ = std::min(2 * pause_, kLongestPause);
    }
    upward_ = usual_ == 1 || (upward_ && usual_ < most_);
    const bool tries = now >= next_ && !(upward_ && near && usual_rate_ > kFast);
    go(tries ? usual_ + (upward_ ? 1 : -1) : usual_);
  }
  void go(int count) {
    if (std::exchange(count_, count) != count) windows_ = 0;
  }

  const int most_;
  int count_ = 1, usual_ = 1;  // they differ during a trial
  int windows_ = 0;            // since count_ has changed
  bool upward_ = true, full_ = false;
  double usual_rate_ = 0;
  std::array<double, kWindows> rates_{};
  uint64_t bytes_ = 0;  // of the window, and its time so far
  Clock::duration time_{}, pause_ = kPause;
  Clock::time_point at_, next_;
};

}  // namespace ringcomm
