// Chooses how large messages pass the byte streams, by measuring. The sender chooses the size of
// the pieces. The receiver chooses whether copies bypass the caches.
#pragma once

#include <bit>
#include <optional>

#include "base/deadline.h"
#include "exec/contest.h"

namespace ringcomm {

class Paces {
 public:
  // The pieces of an announced message, between which other messages get their turn. Between hosts
  // the first size is used, and inside a host the second until another has won.
  static constexpr std::array<uint32_t, 3> kPieceBytes = {64 << 10, 128 << 10, 256 << 10};
  static constexpr uint64_t kLeastBytes = 256 << 10;  // contests are for these
  static constexpr uint64_t kUsuallyPast = 16 << 20;  // the caches, until it is known

  struct Sending {
    uint32_t piece_bytes = kPieceBytes[0];
    int way = 0;
    Contest* contest = nullptr;  // wants to know how long it took
    Clock::time_point began;

    void ended() const {
      if (contest != nullptr) contest->took(way, seconds(Clock::now() - began));
    }
  };
  struct Receiving {
    bool past_caches = false;
    Contest* contest = nullptr;  // wants to know how long the copies took
    Clock::duration taken{};

    // Runs `read`, which returns how many bytes it got.
    size_t read(auto&& read) {
      if (contest == nullptr) return read();
      const auto start = Clock::now();
      const size_t got = read();
      if (got > 0) taken += Clock::now() - start;
      return got;
    }
    void ended() const {
      if (contest != nullptr) contest->took(past_caches ? 1 : 0, seconds(taken));
    }
  };

  Sending send(uint64_t bytes) {
    if (bytes < kLeastBytes) return {};
    Contest& contest = of(bytes).pieces;
    const int way = contest.next([&] { return contest.fastest(); });
    const uint32_t piece = kPieceBytes[static_cast<size_t>(way)];
    if (!contest.tries_now()) return {piece, way, nullptr, {}};
    return {piece, way, &contest, Clock::now()};
  }
  Receiving receive(uint64_t bytes) {
    if (bytes < kLeastBytes) return {};
    Contest& contest = of(bytes).copies;
    const bool past_caches = contest.next([&] { return contest.fastest(); }) == 1;
    return {past_caches, contest.tries_now() ? &contest : nullptr};
  }

 private:
  struct Contests {
    explicit Contests(bool large) : copies(2, large ? 1 : 0) {}
    Contest pieces{static_cast<int>(kPieceBytes.size()), 1}, copies;
  };
  static double seconds(Clock::duration time) {
    return std::chrono::duration<double>(time).count();
  }
  Contests& of(uint64_t bytes) {  // messages of about this size
    const auto size = static_cast<size_t>(std::bit_width(bytes / kLeastBytes) - 1);
    auto& contests = contests_[std::min(size, contests_.size() - 1)];
    if (!contests) contests.emplace(bytes >= kUsuallyPast);
    return *contests;
  }

  std::array<std::optional<Contests>, 10> contests_;
};

}  // namespace ringcomm
