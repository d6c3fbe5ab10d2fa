// Operations for the kernels of ranks that have a device each, with their results: for
// meetings_test, and gpu_kernels.
#pragma once

#include "device/kernels_for.h"
#include "kernel_harness.h"

namespace ringcomm::testing {

using namespace cuda;
using enum Collective;

inline constexpr std::array kKernels{kByTwoShot, kByOneShot, kByLowLatency, kByRing};

// An operation of all ranks, which each of them makes from the same seed.
struct Step {
  Algorithm kernel;
  Shape shape;  // but all_to_all's lengths
  Reduction what;
  int blocks;
  uint64_t unit;                               // of two-shot's rounds
  std::vector<std::vector<uint64_t>> lengths;  // all_to_all: from, to
  std::vector<Bytes> inputs, outputs;          // wanted
};

inline uint64_t below(Random& random, uint64_t limit) { return random.below(limit); }

inline std::vector<uint64_t> some_lengths(Random& random, int size, uint64_t element) {
  std::vector<uint64_t> lengths;
  for (Rank rank = 0; rank < size; ++rank) lengths.push_back(below(random, 40) * element);
  return lengths;
}

inline Bytes slice(const Bytes& bytes, uint64_t first, uint64_t count) {
  const auto begin = bytes.begin() + static_cast<ptrdiff_t>(first);
  return {begin, begin + static_cast<ptrdiff_t>(count)};
}

inline void append(Bytes& bytes, const Bytes& more) {
  bytes.insert(bytes.end(), more.begin(), more.end());
}

// As the ring adds up: from rank `first` on, rounding to the type at each.
inline Bytes reduced_from(Rank first, const Step& step, uint64_t at, uint64_t count) {
  const auto size = step.inputs.size();
  Bytes sum;
  for (size_t i = 0; i < size; ++i) {
    const Bytes next = slice(step.inputs[(static_cast<size_t>(first) + i) % size], at, count);
    const std::array<const std::byte*, 2> both{sum.data(), next.data()};
    Bytes out = next;
    std::byte* const dst = out.data();
    if (i > 0 || size == 1) {
      reduce(step.what, i + 1 == size, {&dst, 1}, std::span(both).subspan(i > 0 ? 0 : 1),
             count / size_of(step.what.dtype));
    }
    sum = out;
  }
  return sum;
}

inline Bytes sum_of(const Step& step) {
  if (step.kernel != kByRing) return reduced(step.what, step.inputs);
  const bool chain = step.shape.collective == kReduce;
  const LeaderArgs parts = parts_of(step.shape, chain);
  Bytes sum;
  for (Rank part = 0; part < parts.parts; ++part) {
    const Rank first = step.shape.after(chain ? step.shape.root : part);
    append(sum, reduced_from(first, step, parts.first[part], parts.length[part]));
  }
  return sum;
}

// Each rank's output.
inline void set_wanted(Step& step) {
  const Shape& shape = step.shape;
  const auto& in = step.inputs;
  const auto root = static_cast<size_t>(shape.root);
  step.outputs.assign(in.size(), {});
  for (size_t at = 0; at < in.size(); ++at) {
    Bytes& out = step.outputs[at];
    const auto rank = static_cast<Rank>(at);
    switch (shape.collective) {
      case kAllReduce:
        out = sum_of(step);
        break;
      case kReduce:
        out = at == root ? sum_of(step) : Bytes();
        break;
      case kReduceScatter:
        out = slice(sum_of(step), shape.shard_offset(rank), shape.shard(rank));
        break;
      case kBroadcast:
        out = in[root];
        break;
      case kScatter:
        out = slice(in[root], shape.shard_offset(rank), shape.shard(rank));
        break;
      case kAllGather:
      case kGather:
        for (const Bytes& input : in) {
          if (shape.collective == kAllGather || at == root) append(out, input);
        }
        break;
      case kAllToAll:
        for (size_t from = 0; from < in.size(); ++from) {
          const auto& sent = step.lengths[from];
          append(out, slice(in[from], offset_of(sent, rank), sent[at]));
        }
        break;
      case kBarrier:
        break;
    }
  }
}

inline uint64_t input_bytes(const Step& step, Rank rank) {
  const Shape& shape = step.shape;
  switch (shape.collective) {
    case kAllReduce:
    case kReduce:
      return shape.bytes;
    case kBroadcast:
      return rank == shape.root ? shape.bytes : 0;
    case kReduceScatter:
      return offset_of(shape.shards, shape.size);
    case kScatter:
      return rank == shape.root ? offset_of(shape.shards, shape.size) : 0;
    case kAllGather:
    case kGather:
      return shape.shard(rank);
    case kAllToAll:
      return offset_of(step.lengths[static_cast<size_t>(rank)], shape.size);
    case kBarrier:
      return 0;
  }
  return 0;
}

// Tells whether the kernel serves the collective when all ranks know the lengths.
inline bool has(Algorithm kernel, Collective collective) {
  if (kernel == kByLowLatency) return true;
  return collective != kAllToAll && collective != kBarrier && kernel_serves(kernel, collective);
}

inline int blocks_of(Algorithm kernel, int two_shots) {
  return kernel == kByTwoShot   ? two_shots
         : kernel == kByOneShot ? kMostOneShot
         : kernel == kByRing    ? kRingBlocks
                                : kLowLatencyBlocks;
}

// Bytes that the kernel takes of a rank.
inline uint64_t room_of(Algorithm kernel, int size, uint64_t longest) {
  if (kernel == kByLowLatency) return std::min(low_latency_bytes(size), longest);
  return kernel == kByOneShot ? std::min(kOneShotWindow, longest) : longest;
}

// Operands of up to so many bytes: of all magnitudes.
inline void lengthen(Random& random, Step& step, uint64_t longest) {
  Shape& shape = step.shape;
  const uint64_t room = room_of(step.kernel, shape.size, longest);
  const auto size = static_cast<uint64_t>(shape.size);
  const uint64_t per_rank =
      step.kernel == kByLowLatency ? std::min(room, longest / size) : room / size;
  const auto some = [&](uint64_t most) {
    const uint64_t elements = most / shape.element >> below(random, 12);
    return below(random, elements + 1) * shape.element;
  };
  for (uint64_t& shard : shape.shards) shard = some(per_rank);
  if (!sharded(shape.collective)) shape.bytes = some(room);
  for (auto& sent : step.lengths) {
    for (uint64_t& length : sent) length = some(per_rank);
  }
  step.blocks = blocks_of(step.kernel, 1 + static_cast<int>(below(random, 16)));
  step.unit = below(random, 2) == 0 ? 1 << 20 : 64 << 10;
}

// The operations have a few elements each, or up to `longest` bytes.
inline Step make_step(Random& random, int size, Algorithm kernel, uint64_t longest = 0) {
  static const std::vector<Pair> pairs = possible_pairs();
  const Pair pair = pairs[below(random, pairs.size())];
  Step step{kernel, {}, {pair.dtype, pair.op, size, 1}, 1, 0, {}, {}, {}};
  Shape& shape = step.shape;
  shape.size = size;
  shape.element = size_of(pair.dtype);
  shape.root = static_cast<Rank>(below(random, static_cast<uint64_t>(size)));
  do {
    shape.collective = static_cast<Collective>(below(random, kCollectives));
  } while (!has(kernel, shape.collective));
  const uint64_t room = low_latency_bytes(size) / shape.element;
  const uint64_t most = std::min<uint64_t>(below(random, 3) == 0 ? 3000 : 50, room);
  if (sharded(shape.collective)) {
    shape.shards = some_lengths(random, size, shape.element);
  } else {
    shape.bytes = below(random, most + 1) * shape.element;
  }
  for (Rank rank = 0; rank < size; ++rank) {
    step.lengths.push_back(some_lengths(random, size, shape.element));
  }
  const bool any = kernel == kByTwoShot;
  step.blocks = blocks_of(kernel, any ? 1 + static_cast<int>(below(random, 4)) : 0);
  step.unit = below(random, 2) == 0 ? 1 << 20 : 64 * shape.element;
  if (longest > 0) lengthen(random, step, longest);
  Inputs inputs(static_cast<uint32_t>(random.next()));
  for (Rank rank = 0; rank < size; ++rank) {
    step.inputs.push_back(inputs.make(pair.dtype, input_bytes(step, rank) / shape.element));
  }
  set_wanted(step);
  return step;
}

// A rank's operands, and how it does one step.
template <class Group>
class Member {
 public:
  Member(Group& group, const Step& step, Rank rank, std::byte* input, std::byte* output)
      : group_(group), step_(step), rank_(rank), input_(input), output_(output) {}

  void run(const auto& run_all) const {
    const bool reduces = ringcomm::reduces(step_.shape.collective);
    const Reduction what = reduces ? step_.what : copy_of(step_.shape.element);
    if (step_.kernel == kByRing) return by_ring(what, run_all);
    if (step_.kernel != kByTwoShot) {
      Shape shape = step_.shape;
      shape.send = step_.lengths[static_cast<size_t>(rank_)];
      for (const auto& sent : step_.lengths) shape.recv.push_back(sent[static_cast<size_t>(rank_)]);
      Exchange exchange = exchange_of(shape, rank_);
      exchange.reduction = what;
      exchange.input = input_;
      exchange.output = output_;
      if (step_.kernel == kByOneShot) return one_step(OneShotArgs(), exchange, run_all);
      return one_step(LowLatencyArgs(), exchange, run_all);
    }
    TwoShotArgs args{.members = group_.members(rank_, step_.blocks),
                     .part = parts_of(step_.shape, false),
                     .given = {}};
    LeaderArgs& part = args.part;
    part.reduction = what;
    part.call = 7;
    part.rank = part.begin = rank_;
    part.abort = args.members.abort;
    part.unit = step_.unit;
    part.parts = 1;
    part.own = {reinterpret_cast<uint64_t>(input_), reinterpret_cast<uint64_t>(output_), 0, 7};
    std::ranges::fill(args.given, part.own);
    const uint64_t longest = *std::max_element(part.length, part.length + group_.size());
    const uint64_t rounds = Segments{longest, step_.unit}.count();
    for (uint64_t round = 0; round < rounds; ++round) {
      part.round = round * step_.unit;
      run_all(args);
    }
  }

 private:
  void by_ring(const Reduction& what, const auto& run_all) const {
    const Collective collective = step_.shape.collective;
    const bool chain = collective == kBroadcast || collective == kReduce;
    Chunks chunks{.reduction = what,
                  .sums = reduces(collective),
                  .gathers = collective != kReduceScatter,
                  .input = {},
                  .output = {},
                  .bytes = {}};
    const LeaderArgs parts = parts_of(step_.shape, chain);
    for (Rank part = 0; part < parts.parts; ++part) {
      chunks.input[part] = input_ + (parts.input_is_split ? parts.first[part] : 0);
      chunks.output[part] = output_ + (parts.output_is_split ? parts.first[part] : 0);
      chunks.bytes[part] = parts.length[part];
    }
    RingArgs args{.members = group_.members(rank_, step_.blocks), .chunks = chunks, .chain = chain};
    args.root = step_.shape.root;
    group_.set_memory(args);
    run_all(args);
  }

  template <class Args>
  void one_step(Args args, const Exchange& exchange, const auto& run_all) const {
    args.members = group_.members(rank_, step_.blocks);
    args.exchange = exchange;
    group_.set_memory(args);
    run_all(args);
  }

  Group& group_;
  const Step& step_;
  const Rank rank_;
  std::byte *input_, *output_;
};

}  // namespace ringcomm::testing
