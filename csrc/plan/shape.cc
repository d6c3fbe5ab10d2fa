#include "plan/shape.h"

#include <bit>
#include <numeric>

namespace ringcomm {

constexpr uint64_t kCacheLine = 64;
constexpr uint64_t kKiB = 1024;

Geometry Geometry::for_ranks(int size) {
  Geometry geometry;
  geometry.size = size;
  geometry.segment_bytes = 256 * kKiB;
  geometry.room_bytes = 4 * 2048 * kKiB;
  const uint64_t share = 4096 * kKiB / static_cast<uint64_t>(std::max(size, 1));
  geometry.inbox_bytes = std::clamp(share, 16 * kKiB, 256 * kKiB) / kCacheLine * kCacheLine;
  return geometry;
}

Geometry Geometry::across_hosts(int size, int distance, int local) {
  Geometry geometry = for_ranks(size);
  const uint64_t share = std::bit_floor((uint64_t{2} << 30) / static_cast<uint64_t>(local));
  const uint64_t wanted = uint64_t{1024} * kKiB << (3 * distance);  // touched where plans send
  geometry.inbox_bytes = std::max(1024 * kKiB, std::min(wanted, share));
  geometry.slots = std::clamp<uint64_t>(geometry.inbox_bytes / (256 * kKiB), 8, 64);
  geometry.room_bytes = 0;
  return geometry;
}

Rank Shape::after(Rank rank, int steps) const {
  const int sum = (rank + steps) % size;
  return sum < 0 ? sum + size : sum;
}

uint64_t offset_of(const std::vector<uint64_t>& parts, Rank rank) {
  return std::accumulate(parts.begin(), parts.begin() + rank, uint64_t{0});
}

Sides CallShape::sides(Rank rank) const {
  const bool at_root = rank == root, shared = sharded(collective);
  const uint64_t whole = shared ? total_of(shards) : bytes;
  const uint64_t mine = shared ? shards[static_cast<size_t>(rank)] : bytes;
  switch (collective) {
    case Collective::kAllGather:
      return {mine, whole};
    case Collective::kAllReduce:
    case Collective::kReduceScatter:
      return {whole, mine};
    case Collective::kBroadcast:
    case Collective::kScatter:
      return {at_root ? whole : 0, mine};
    case Collective::kReduce:
    case Collective::kGather:
      return {mine, at_root ? whole : 0};
    case Collective::kAllToAll:
      return {total_of(send), total_of(recv)};
    case Collective::kBarrier:
      break;
  }
  return {};
}

uint64_t Shape::largest_shard() const {
  return shards.empty() ? 0 : *std::ranges::max_element(shards);
}

std::vector<Extent> Shape::chunks() const {
  std::vector<Extent> chunks;
  for (Rank r = 0; r < size; ++r) {
    const uint64_t at = r == 0 ? 0 : chunks.back().offset + chunks.back().bytes;
    chunks.push_back({at, shards.empty() ? cut(bytes, r + 1, size) - at : shard(r)});
  }
  return chunks;
}

// A message has half the shards, and two messages fit into an inbox.
uint64_t Shape::bruck_bytes() const {
  return align(geometry.inbox_bytes / 2 / std::bit_ceil(static_cast<uint64_t>(size / 2)));
}

uint64_t Shape::align(uint64_t wanted) const {
  const uint64_t unit = wanted >= kCacheLine ? kCacheLine : element;
  return wanted / unit * unit;
}

// Whole units are dealt out, the last one may be partial: so no part exceeds ceil(units / parts)
// units, and a message of parts * slot bytes fits into slots.
uint64_t Shape::cut(uint64_t total, int part, int parts) const {
  const uint64_t count = static_cast<uint64_t>(parts);
  const uint64_t unit = total >= kCacheLine * count ? kCacheLine : element;
  const uint64_t units = (total + unit - 1) / unit;
  return std::min(total, units * static_cast<uint64_t>(part) / count * unit);
}

uint64_t Shape::longest_cut(uint64_t total, int parts) const {
  const uint64_t count = static_cast<uint64_t>(parts);
  const uint64_t unit = total >= kCacheLine * count ? kCacheLine : element;
  const uint64_t units = (total + unit - 1) / unit;
  return (units + count - 1) / count * unit;
}

}  // namespace ringcomm
