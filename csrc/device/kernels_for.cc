#include "device/kernels_for.h"

#include <algorithm>

namespace ringcomm::cuda {
namespace {

using enum Collective;

// Seconds until streams have handed over, and of a turn of the ring beside its flag. PCIe bears
// half as much where more than two talk to all at once, and loads across it are slower than stores
// and copy engines. A byte takes so long through the ring's few blocks. All of them are estimates.
constexpr double kHandOverSeconds = 15e-6, kTurn = 1e-6, kRingByte = 1e-11, kCrowd = 2,
                 kLoads = 1.5;
// Flags in the data double its bytes, and lines are loaded 16 bytes at a time, all over again until
// the last one has come. NCCL's own kernel of this kind stops being the fastest near 15 KiB.
constexpr double kLines = 5;

// The part of `from`'s input that `to` gets. all_to_all: `rank` is either of them, and knows its
// own side.
Extent taken(const Shape& shape, Rank from, Rank to, Rank rank) {
  const Extent whole{0, shape.bytes}, nothing{0, 0};
  switch (shape.collective) {
    case kAllReduce:
      return whole;
    case kBroadcast:
      return from == shape.root ? whole : nothing;
    case kReduce:
      return to == shape.root ? whole : nothing;
    case kReduceScatter:
      return {shape.shard_offset(to), shape.shard(to)};
    case kScatter:
      return from == shape.root ? Extent{shape.shard_offset(to), shape.shard(to)} : nothing;
    case kAllGather:
      return {0, shape.shard(from)};
    case kGather:
      return to == shape.root ? Extent{0, shape.shard(from)} : nothing;
    case kAllToAll:
      if (from == rank) return {offset_of(shape.send, to), shape.send[static_cast<size_t>(to)]};
      return {0, shape.recv[static_cast<size_t>(from)]};
    case kBarrier:
      return nothing;
  }
  return nothing;
}

// The most that a rank gets of another.
uint64_t most_taken(const Shape& shape) {
  return sharded(shape.collective) ? shape.largest_shard() : shape.bytes;
}

bool has_room(Algorithm kernel, const Shape& shape, uint64_t window) {
  const auto ranks = static_cast<uint64_t>(shape.size);
  const uint64_t bytes = most_taken(shape);
  if (!kernel_serves(kernel, shape.collective)) return false;
  if (kernel == kByTwoShot) return shape.collective != kBarrier;
  if (kernel != kByOneShot && kernel != kByLowLatency) return true;
  // Operands in several pieces are put together in the window.
  if (2 * ranks * bytes > window) return false;
  if (kernel == kByLowLatency) return bytes <= low_latency_bytes(shape.size);
  const bool split = shape.collective == kReduceScatter || shape.collective == kScatter;
  return (split ? ranks * bytes : bytes) <= kOneShotWindow && shape.collective != kBarrier;
}

}  // namespace

Reduction copy_of(uint64_t element) {
  return {.dtype = unsigned_of(std::min<uint64_t>(element, 8)), .op = ReduceOp::kBor};
}

LeaderArgs parts_of(const Shape& shape, bool alone) {
  LeaderArgs args{};
  const Collective collective = shape.collective;
  const bool scatters = collective == kScatter || collective == kReduceScatter;
  args.n_ranks = shape.size;
  args.root = shape.root;
  args.input_is_split = scatters;
  args.output_is_split = collective == kGather || collective == kAllGather;
  args.from = args.output_is_split                                 ? Who::kPart
              : collective == kBroadcast || collective == kScatter ? Who::kRoot
                                                                   : Who::kAll;
  args.to = scatters                                         ? Who::kPart
            : collective == kGather || collective == kReduce ? Who::kRoot
                                                             : Who::kAll;
  const bool sharded = args.input_is_split || args.output_is_split;
  args.parts = collective == kBarrier ? 0 : sharded || !alone ? shape.size : 1;
  for (Rank part = 0; part < args.parts; ++part) {
    args.first[part] =
        sharded ? shape.shard_offset(part) : shape.cut(shape.bytes, part, args.parts);
    args.length[part] = sharded ? shape.shard(part)
                                : shape.cut(shape.bytes, part + 1, args.parts) - args.first[part];
  }
  if (!sharded) args.input_is_split = args.output_is_split = args.parts > 1;
  return args;
}

bool concerns(const LeaderArgs& args, Rank rank, Rank part) {
  const auto is = [&](Who who) {
    return who == Who::kAll || rank == (who == Who::kRoot ? args.root : part);
  };
  return is(args.from) || is(args.to);
}

Exchange exchange_of(const Shape& shape, Rank rank) {
  Exchange all{};
  const bool root = rank == shape.root;
  const bool gathers = shape.collective == kAllGather || shape.collective == kGather;
  all.sums = shape.collective == kAllReduce || shape.collective == kReduceScatter ||
             (shape.collective == kReduce && root);
  for (Rank peer = 0; peer < shape.size; ++peer) {
    const Extent sent = taken(shape, rank, peer, rank), got = taken(shape, peer, rank, rank);
    all.sent_first[peer] = sent.offset;
    all.sent_bytes[peer] = sent.bytes;
    all.first[peer] = got.offset;
    all.bytes[peer] = got.bytes;
    all.to[peer] = gathers                         ? shape.shard_offset(peer)
                   : shape.collective == kAllToAll ? offset_of(shape.recv, peer)
                                                   : 0;
  }
  return all;
}

// Seconds, but for the launch, which all have. Others' memory takes as long as a flag to answer.
double seconds_of(Algorithm kernel, const Shape& shape, const DeviceLink& link) {
  const double others = shape.size - 1, most = static_cast<double>(most_taken(shape));
  const bool in_parts = !sharded(shape.collective);  // each rank moves a part of all
  const bool chain = shape.collective == kBroadcast || shape.collective == kReduce;
  const double all = others * most * link.byte_time * (link.nvlink || shape.size == 2 ? 1 : kCrowd);
  const double twice = shape.collective == kBroadcast ? 1 : 2;
  const double parts = in_parts ? twice * all / shape.size : all;
  if (kernel == kByLowLatency) return link.flag + kLines * all;
  if (kernel == kByOneShot) return 2 * link.flag + all;
  if (kernel == kByTwoShot) return 3 * link.flag + parts;
  if (kernel == kByCopies) return kHandOverSeconds + all;
  if (kernel == kHandOver) return kHandOverSeconds + parts * (link.nvlink ? 1 : kLoads);
  const double turns = others * (link.flag + kTurn);
  const double moved = most * std::max(link.byte_time, kRingByte);
  if (chain) return turns + moved;
  return in_parts ? 2 * (turns + others * moved / shape.size) : turns + others * moved;
}

DeviceLink link_of(bool nvlink, int capability, int blocks) {
  DeviceLink link;
  link.blocks = blocks;
  link.nvlink = nvlink;
  if (!nvlink) return link;
  link.flag = 1.8e-6;
  // Others' two-shot kernels had 251 to 254 GB/s on eight H100. Other links are scaled alike.
  link.byte_time = 1e-9 / (capability >= 100  ? 500
                           : capability >= 90 ? 250
                           : capability >= 80 ? 170
                                              : 80);
  return link;
}

Algorithm kernel_for(const Shape& shape, const DeviceLink& link, uint64_t window,
                     std::optional<Algorithm> asked) {
  if (asked && has_room(*asked, shape, window)) return *asked;
  if (shape.collective == kAllToAll) return link.nvlink ? kHandOver : kByCopies;
  Algorithm best = kHandOver;
  for (const Algorithm kernel : {kByCopies, kByRing, kByTwoShot, kByOneShot, kByLowLatency}) {
    const bool possible = link.nvlink || kernel != kByTwoShot;
    if (possible && has_room(kernel, shape, window) &&
        seconds_of(kernel, shape, link) < seconds_of(best, shape, link)) {
      best = kernel;
    }
  }
  return best;
}

std::string kernels_text(int size, const DeviceLink& link, uint64_t window) {
  std::ostringstream out;
  for (int i = 0; i < kCollectives; ++i) {
    Shape shape;
    shape.collective = static_cast<Collective>(i);
    shape.size = size;
    shape.shards.assign(sharded(shape.collective) ? static_cast<size_t>(size) : 0, 0);
    Algorithm before = kernel_for(shape, link, window);
    out << to_string(shape.collective) << ": " << to_string(before);
    for (uint64_t bytes = 64; bytes <= 1 << 20 && shape.collective != kBarrier; bytes *= 2) {
      shape.bytes = bytes;
      std::ranges::fill(shape.shards, bytes);
      const Algorithm now = kernel_for(shape, link, window);
      if (now != before) out << " up to " << bytes / 2 << " B, " << to_string(now);
      before = now;
    }
    out << '\n';
  }
  return out.str();
}

// 16 bytes for every thread and source, until links are full: some 32 blocks were enough for others
// (NCCL has 16 to 32 channels on NVLink of the fourth generation).
int blocks_for(const Shape& shape, const DeviceLink& link) {
  constexpr uint64_t kEach = 16 * 512;  // a block's threads
  const auto ranks = static_cast<uint64_t>(shape.size);
  const uint64_t part = sharded(shape.collective) ? shape.largest_shard() : shape.bytes / ranks;
  const auto most = static_cast<uint64_t>(std::min(kMostBlocks, link.blocks));
  return static_cast<int>(std::clamp<uint64_t>((part + kEach - 1) / kEach, 1, most));
}

}  // namespace ringcomm::cuda
