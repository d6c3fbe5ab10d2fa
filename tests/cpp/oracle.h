// Random collectives on int32, and their right results, computed from the definition.
#pragma once

#include <cstdint>
#include <numeric>
#include <vector>

#include "comm/communicator.h"
#include "harness.h"

namespace ringcomm::testing {

// A call that all ranks make alike: it is derived from a seed alone.
struct Call {
  Collective collective;
  Rank root;
  bool in_place;
  ReduceOp op;
  uint64_t count;                             // all_reduce, broadcast, reduce: elements
  std::vector<uint64_t> shards;               // elements
  std::vector<std::vector<uint64_t>> splits;  // all_to_all: splits[from][to], elements
  uint64_t salt;
};

inline Call random_call(Random& random, int size, uint64_t most) {
  Call call;
  call.collective = static_cast<Collective>(random.below(kCollectives));
  call.root = static_cast<Rank>(random.below(static_cast<uint64_t>(size)));
  call.in_place = random.below(2) == 0;
  const ReduceOp ops[] = {ReduceOp::kSum, ReduceOp::kMax, ReduceOp::kBxor, ReduceOp::kMin};
  call.op = ops[random.below(4)];
  // Small, middle and large counts alike.
  const auto count = [&] { return random.below(random.below(3) == 0 ? 24 : most); };
  call.count = count();
  const uint64_t shard = count() / static_cast<uint64_t>(size);
  const bool uneven = random.below(3) == 0 && (call.collective == Collective::kAllGather ||
                                               call.collective == Collective::kReduceScatter);
  for (Rank rank = 0; rank < size; ++rank) {
    call.shards.push_back(uneven ? random.below(shard + 2) : shard);
    std::vector<uint64_t> row;
    for (Rank to = 0; to < size; ++to) row.push_back(random.below(shard + 2));
    call.splits.push_back(row);
  }
  call.salt = random.next();
  return call;
}

inline int32_t input_value(const Call& call, Rank rank, uint64_t index) {
  return static_cast<int32_t>(
      (call.salt ^ (index * 2654435761u)) * (2 * static_cast<uint64_t>(rank) + 3) >> 20);
}

inline int32_t combine(ReduceOp op, int32_t a, int32_t b) {
  switch (op) {
    case ReduceOp::kMax:
      return std::max(a, b);
    case ReduceOp::kMin:
      return std::min(a, b);
    case ReduceOp::kBxor:
      return a ^ b;
    default:
      return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
  }
}

inline int32_t reduced(const Call& call, int size, uint64_t index) {
  int32_t value = input_value(call, 0, index);
  for (Rank rank = 1; rank < size; ++rank) {
    value = combine(call.op, value, input_value(call, rank, index));
  }
  return value;
}

inline uint64_t offset_of(const std::vector<uint64_t>& counts, Rank rank) {
  return std::accumulate(counts.begin(), counts.begin() + rank, uint64_t{0});
}

inline std::vector<uint64_t> in_bytes(const std::vector<uint64_t>& counts) {
  std::vector<uint64_t> bytes;
  for (const uint64_t count : counts) bytes.push_back(4 * count);
  return bytes;
}

inline std::vector<uint64_t> column(const Call& call, Rank to) {
  std::vector<uint64_t> counts;
  for (const auto& row : call.splits) counts.push_back(row[static_cast<size_t>(to)]);
  return counts;
}

struct Sides {
  std::vector<int32_t> input, output;
};

// This rank's input, and the output that must follow.
inline Sides expected(const Call& call, int size, Rank rank) {
  Sides sides;
  const uint64_t whole = offset_of(call.shards, size),
                 mine = call.shards[static_cast<size_t>(rank)];
  const uint64_t start = offset_of(call.shards, rank);
  const auto fill = [](std::vector<int32_t>& side, uint64_t count, auto value) {
    for (uint64_t i = 0; i < count; ++i) side.push_back(value(i));
  };
  const auto own = [&](uint64_t i) { return input_value(call, rank, i); };
  const auto of_root = [&](uint64_t i) { return input_value(call, call.root, i); };
  const bool root = rank == call.root;
  const auto gathered = [&] {
    for (Rank from = 0; from < size; ++from) {
      fill(sides.output, call.shards[static_cast<size_t>(from)],
           [&](uint64_t i) { return input_value(call, from, i); });
    }
  };
  switch (call.collective) {
    case Collective::kAllReduce:
      fill(sides.input, call.count, own);
      fill(sides.output, call.count, [&](uint64_t i) { return reduced(call, size, i); });
      break;
    case Collective::kReduce:
      fill(sides.input, call.count, own);
      if (root) fill(sides.output, call.count, [&](uint64_t i) { return reduced(call, size, i); });
      break;
    case Collective::kBroadcast:
      if (root) fill(sides.input, call.count, own);
      fill(sides.output, call.count, of_root);
      break;
    case Collective::kReduceScatter:
      fill(sides.input, whole, own);
      fill(sides.output, mine, [&](uint64_t i) { return reduced(call, size, start + i); });
      break;
    case Collective::kAllGather:
      fill(sides.input, mine, own);
      gathered();
      break;
    case Collective::kGather:
      fill(sides.input, mine, own);
      if (root) gathered();
      break;
    case Collective::kScatter:
      if (root) fill(sides.input, whole, own);
      fill(sides.output, mine, [&](uint64_t i) { return of_root(start + i); });
      break;
    case Collective::kAllToAll:
      fill(sides.input, offset_of(call.splits[static_cast<size_t>(rank)], size), own);
      for (Rank from = 0; from < size; ++from) {
        const auto& row = call.splits[static_cast<size_t>(from)];
        const uint64_t at = offset_of(row, rank);
        fill(sides.output, row[static_cast<size_t>(rank)],
             [&](uint64_t i) { return input_value(call, from, at + i); });
      }
      break;
    case Collective::kBarrier:
      break;
  }
  return sides;
}

// A call with its memory: this rank's input, and a check of its output. In place where the
// collective allows it: the other buffer then plays no part.
class Trial {
 public:
  Trial(const Call& call, int size, Rank rank)
      : call_(call), rank_(rank), sides_(expected(call, size, rank)), before_(sides_.input) {
    output_.assign(sides_.output.size(), -1);
    const bool counted = call.collective == Collective::kAllReduce ||
                         call.collective == Collective::kReduce ||
                         call.collective == Collective::kBroadcast;
    in_place_ = call.in_place && counted && sides_.input.size() == sides_.output.size();
    operation.collective = call.collective;
    operation.dtype = DType::kInt32;
    operation.op = call.op;
    operation.root = call.root;
    if (counted) operation.bytes = 4 * call.count;
    if (call.collective == Collective::kAllToAll) {
      operation.send = in_bytes(call.splits[static_cast<size_t>(rank)]);
      operation.recv = in_bytes(column(call, rank));
    } else if (!counted && call.collective != Collective::kBarrier) {
      operation.shards = in_bytes(call.shards);
    }
    operation.input = {span(sides_.input)};
    operation.output = {span(result())};
  }
  Trial(const Trial&) = delete;
  Trial& operator=(const Trial&) = delete;

  void check(uint64_t number) {
    const std::vector<int32_t>& want = sides_.output;
    for (size_t i = 0; i < want.size(); ++i) {
      require(result()[i] == want[i], "call ", number, ", ", to_string(call_.collective), " of ",
              call_.count, " root ", call_.root, ", rank ", rank_, ": element ", i, " is ",
              result()[i], ", not ", want[i]);
    }
    if (!in_place_) require(sides_.input == before_, "the input was changed");
  }
  // The memory is the caller's again: a late reader would read this.
  void poison() {
    std::fill(sides_.input.begin(), sides_.input.end(), -77777);
    std::fill(output_.begin(), output_.end(), -77777);
  }

  Operation operation;

 private:
  static Span span(std::vector<int32_t>& side) {
    return {reinterpret_cast<std::byte*>(side.data()), 4 * side.size()};
  }
  std::vector<int32_t>& result() { return in_place_ ? sides_.input : output_; }

  const Call call_;
  const Rank rank_;
  Sides sides_;
  const std::vector<int32_t> before_;
  std::vector<int32_t> output_;
  bool in_place_;
};

inline void perform(Communicator& group, const Call& call, uint64_t number) {
  Trial trial(call, group.size(), group.rank());
  group.run(trial.operation);
  trial.check(number);
}

}  // namespace ringcomm::testing
