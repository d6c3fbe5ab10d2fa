// For verify_turned.cc: sums over ranks as expressions, seen from any rank.
#pragma once

#include <algorithm>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

namespace ringcomm {

// Sums of contributions, each written down once. The first part of a sum stands at 0; a value says
// how far its sum is turned. Sum 0 is a rank's own input.
class Sums {
 public:
  struct Part {
    uint32_t sum;
    int turn;
    auto operator<=>(const Part&) const = default;
  };

  uint32_t of(const std::vector<Part>& parts) {
    const auto [entry, made] = known_.emplace(parts, static_cast<uint32_t>(sums_.size()));
    if (made) sums_.push_back(parts);
    return entry->second;
  }

  // Is every rank in it, and once? `size` is their number.
  bool has_all_once(uint32_t sum, int size) {
    const auto [entry, made] = complete_.emplace(sum, false);
    if (!made) return entry->second;
    std::vector<int> seen(static_cast<size_t>(size), 0);
    std::vector<Part> left = {{sum, 0}};
    int leaves = 0;
    while (!left.empty() && leaves <= size) {
      const Part part = left.back();
      left.pop_back();
      if (part.sum == 0) {
        ++leaves;
        ++seen[static_cast<size_t>(part.turn)];
        continue;
      }
      for (const Part& inner : sums_[part.sum]) {
        left.push_back({inner.sum, (inner.turn + part.turn) % size});
      }
    }
    entry->second = left.empty() && std::ranges::count(seen, 1) == size;
    return entry->second;
  }

 private:
  std::vector<std::vector<Part>> sums_ = {{}};
  std::map<std::vector<Part>, uint32_t> known_;
  std::map<uint32_t, bool> complete_;
};

// The content of a granule of memory. Ranks and shards are counted from the owner of the memory.
struct Content {
  size_t operation = 0;  // from 1 on; 0: nothing was written here
  uint32_t sum = 0;
  int turn = 0;
  int shard = 0;
  uint64_t within = 0;  // the shard
  bool final = false;
  bool operator==(const Content&) const = default;
};

}  // namespace ringcomm
