// Joins the fuzz targets (fuzz_*.cc) with the makers of their inputs: our own driver, which makes
// them from seeds and needs no special compiler (fuzz_driver.cc), or libFuzzer (`make soak`).
// A target throws Failure where a property does not hold, and is the same for the same input.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "cpp/harness.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes);

namespace ringcomm::testing {

using Bytes = std::vector<uint8_t>;

// ---- defined by each target
std::vector<Bytes> corpus();       // inputs that make sense; the driver makes others of them
std::vector<std::string> rules();  // that --without may switch off; the properties then fail

inline std::string switched_off;
inline bool without(std::string_view rule) { return switched_off == rule; }

// Reads an input as values, one after the other; beyond the end there are zeros.
class Input {
 public:
  Input(const uint8_t* data, size_t bytes) : left_(data, bytes) {}
  bool empty() const { return left_.empty(); }
  size_t size() const { return left_.size(); }

  template <typename T = uint8_t>
  T take() {
    static_assert(std::is_trivially_copyable_v<T>);
    T value{};
    const auto bytes = take_bytes(sizeof value);
    std::ranges::copy(bytes, reinterpret_cast<uint8_t*>(&value));
    return value;
  }
  uint64_t below(uint64_t bound) { return bound > 256 ? take<uint32_t>() % bound : take() % bound; }
  // One of these, or any number at all.
  uint64_t one_of(std::initializer_list<uint64_t> known) {
    const uint64_t choice = below(known.size() + 1);
    return choice < known.size() ? known.begin()[choice] : take<uint64_t>();
  }
  std::span<const uint8_t> take_bytes(size_t most) {
    const auto bytes = left_.first(std::min(most, left_.size()));
    left_ = left_.subspan(bytes.size());
    return bytes;
  }

 private:
  std::span<const uint8_t> left_;
};

// Makes a corpus, which Input will read again.
class Output {
 public:
  template <typename T>
  Output& add(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    const auto* data = reinterpret_cast<const uint8_t*>(&value);
    bytes_.insert(bytes_.end(), data, data + sizeof value);
    return *this;
  }
  template <typename... Values>
  Output& add_each(Values... values) {
    (add(static_cast<uint8_t>(values)), ...);
    return *this;
  }
  Bytes take() { return std::move(bytes_); }

 private:
  Bytes bytes_;
};

}  // namespace ringcomm::testing
