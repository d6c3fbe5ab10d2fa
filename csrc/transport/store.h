// The key-value store through which ranks find one another: c10d's Store in production
// (torch/store_adapter.h), a map in tests.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace ringcomm {

class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  virtual bool has(const std::string& key) = 0;
  virtual bool has_all(const std::vector<std::string>& keys) {
    return std::ranges::all_of(keys, [&](const auto& key) { return has(key); });
  }
  virtual std::string get(const std::string& key) = 0;  // `key` exists
  // Adds to an integer that starts at 0; returns the sum.
  virtual int64_t add(const std::string& key, int64_t amount) = 0;
  // The host that serves the store, if there is one.
  virtual std::string host() { return {}; }
};

}  // namespace ringcomm
