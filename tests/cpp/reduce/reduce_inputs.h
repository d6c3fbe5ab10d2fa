// Inputs of reductions, and places for them: for reduce_test and cuda_kernel_test.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "reduce/reduce.h"

namespace ringcomm::model {

using Bytes = std::vector<std::byte>;

// Any bits for half of the numbers; for the others, ones that do not soon become NaN, or special.
class Inputs {
 public:
  explicit Inputs(uint32_t seed = 20240229) : random_(seed) {}

  Bytes make(DType dtype, size_t count) {
    Bytes bytes(count * size_of(dtype));
    for (std::byte& byte : bytes) byte = std::byte(random_());
    if (dtype == DType::kFloat32 || dtype == DType::kComplex64) tame<float>(bytes);
    if (dtype == DType::kFloat64 || dtype == DType::kComplex128) tame<double>(bytes);
    return bytes;
  }

 private:
  template <class T>
  void tame(Bytes& bytes) {
    using Limits = std::numeric_limits<T>;
    const T specials[] = {T{0},
                          -T{0},
                          Limits::infinity(),
                          -Limits::infinity(),
                          Limits::max(),
                          Limits::quiet_NaN(),
                          Limits::denorm_min(),
                          Limits::min()};
    for (size_t at = 0; at < bytes.size(); at += sizeof(T)) {
      const uint64_t dice = random_();
      if (dice % 2) continue;
      const T mild = static_cast<T>(static_cast<int32_t>(random_())) / T{1 << 28};
      const T value = dice % 16 == 0 ? specials[dice / 16 % 8] : mild;
      std::memcpy(&bytes[at], &value, sizeof(T));
    }
  }

  std::mt19937 random_;
};

// A buffer that starts `offset` elements after an aligned address, between guards.
class Placed {
 public:
  Placed(const Bytes& content, size_t offset)
      : bytes_(content.size() + 3 * kGuard, kMark), content_(content.size()) {
    const size_t aligned = kGuard - reinterpret_cast<uintptr_t>(bytes_.data()) % 64;
    start_ = aligned + offset;
    if (content_) std::memcpy(data(), content.data(), content_);
  }
  std::byte* data() { return bytes_.data() + start_; }

  // Nothing around it was written.
  bool intact() const {
    for (size_t i = 0; i < bytes_.size(); ++i) {
      const bool inside = i >= start_ && i < start_ + content_;
      if (!inside && bytes_[i] != kMark) return false;
    }
    return true;
  }
  Bytes content() { return Bytes(data(), data() + content_); }

 private:
  static constexpr size_t kGuard = 192;
  static constexpr std::byte kMark{0xa5};
  Bytes bytes_;
  size_t content_;
  size_t start_ = 0;
};

}  // namespace ringcomm::model
