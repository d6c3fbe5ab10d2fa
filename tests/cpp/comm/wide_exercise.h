// One collective of one size, whose result each rank computes at once, however many ranks there
// are: rank r gives weight(r) * pattern(i), and a sum is a product of the sum of weights.
#pragma once

#include <numeric>

#include "comm/communicator.h"
#include "cpp/harness.h"

namespace ringcomm::testing {

inline uint32_t weight(Rank rank) {
  return static_cast<uint32_t>(mix(static_cast<uint64_t>(rank), 17)) | 1;
}
inline uint32_t pattern(uint64_t index) { return static_cast<uint32_t>(mix(index, 23)); }

class Exercise {
 public:
  // `bytes`: the message, or all shards together; each rank has one element at least.
  Exercise(Collective collective, uint64_t bytes, int size, Rank rank, Rank root)
      : rank_(rank), weights_(0) {
    for (Rank peer = 0; peer < size; ++peer) weights_ += weight(peer);
    what_.collective = collective;
    what_.dtype = DType::kInt32;
    what_.op = ReduceOp::kSum;
    what_.root = root;
    whole_ = std::max<uint64_t>(bytes / 4, 1);
    shard_ = std::max<uint64_t>(whole_ / static_cast<uint64_t>(size), 1);
    const bool counted = collective == Collective::kAllReduce ||
                         collective == Collective::kReduce || collective == Collective::kBroadcast;
    if (!counted) whole_ = shard_ * static_cast<uint64_t>(size);
    const std::vector<uint64_t> parts(static_cast<size_t>(size), 4 * shard_);
    if (counted) {
      what_.bytes = 4 * whole_;
    } else if (collective == Collective::kAllToAll) {
      what_.send = what_.recv = parts;
    } else if (collective != Collective::kBarrier) {
      what_.shards = parts;
    }
    lay_out();
  }
  Exercise(const Exercise&) = delete;
  Exercise& operator=(const Exercise&) = delete;

  // Runs it `calls` times, over and over on fresh input where it works in place.
  void run(Communicator& group, int calls = 1) {
    for (int i = 0; i < calls; ++i) {
      std::fill(output_.begin(), output_.end(), ~0u);
      group.run(what_);
    }
  }
  void check() const {
    for (uint64_t i = 0; i < output_.size(); ++i) {
      require(output_[i] == wanted(i), to_string(what_.collective), " of ", 4 * whole_,
              " bytes, root ", what_.root, ", rank ", rank_, ": element ", i, " is ", output_[i],
              ", not ", wanted(i));
    }
  }
  const Operation& operation() const { return what_; }

 private:
  bool is_root() const { return rank_ == what_.root; }

  void lay_out() {
    uint64_t in = whole_, out = whole_;
    uint64_t first = 0;  // index of this rank's first element in the pattern
    switch (what_.collective) {
      case Collective::kAllReduce:
      case Collective::kAllToAll:
        break;
      case Collective::kBroadcast:
      case Collective::kScatter:
        in = is_root() ? whole_ : 0;
        if (what_.collective == Collective::kScatter) out = shard_;
        break;
      case Collective::kReduce:
        out = is_root() ? whole_ : 0;
        break;
      case Collective::kReduceScatter:
        out = shard_;
        break;
      case Collective::kAllGather:
      case Collective::kGather:
        in = shard_;
        first = shard_ * static_cast<uint64_t>(rank_);
        if (what_.collective == Collective::kGather && !is_root()) out = 0;
        break;
      case Collective::kBarrier:
        in = out = 0;
    }
    for (uint64_t i = 0; i < in; ++i) input_.push_back(weight(rank_) * pattern(first + i));
    output_.resize(out);
    what_.input = {{reinterpret_cast<std::byte*>(input_.data()), 4 * in}};
    what_.output = {{reinterpret_cast<std::byte*>(output_.data()), 4 * out}};
  }

  uint32_t wanted(uint64_t i) const {
    const uint64_t mine = shard_ * static_cast<uint64_t>(rank_);
    switch (what_.collective) {
      case Collective::kAllReduce:
      case Collective::kReduce:
        return weights_ * pattern(i);
      case Collective::kReduceScatter:
        return weights_ * pattern(mine + i);
      case Collective::kBroadcast:
        return weight(what_.root) * pattern(i);
      case Collective::kScatter:
        return weight(what_.root) * pattern(mine + i);
      case Collective::kAllGather:
      case Collective::kGather:
        return weight(static_cast<Rank>(i / shard_)) * pattern(i);
      case Collective::kAllToAll:
        return weight(static_cast<Rank>(i / shard_)) * pattern(mine + i % shard_);
      case Collective::kBarrier:
        break;
    }
    return 0;
  }

  const Rank rank_;
  uint32_t weights_;
  uint64_t whole_ = 0, shard_ = 0;  // elements
  Operation what_;
  std::vector<uint32_t> input_, output_;
};

// A message to the rank `step` further, and one from the rank `step` before.
inline void exchange_messages(Communicator& group, int step, uint64_t bytes) {
  const int size = group.size();
  const Rank to = (group.rank() + step) % size, from = (group.rank() + size - step) % size;
  std::vector<uint32_t> out(bytes / 4), in(bytes / 4);
  for (uint64_t i = 0; i < out.size(); ++i) out[i] = weight(group.rank()) * pattern(i);
  std::vector<MessagePtr> both;
  for (const bool sending : {false, true}) {
    const auto message = std::make_shared<Message>(group.state().timeout());
    message->sending = sending;
    message->peer = sending ? to : from;
    message->tag = static_cast<uint32_t>(step);
    message->data = {reinterpret_cast<std::byte*>(sending ? out.data() : in.data()), bytes};
    group.messages().post(message);
    both.push_back(message);
  }
  for (const auto& message : both) {
    require(group.wait(*message), "a message ends");
    if (message->error) std::rethrow_exception(message->error);
  }
  for (uint64_t i = 0; i < in.size(); ++i) {
    require(in[i] == weight(from) * pattern(i), "message from rank ", from, ": element ", i);
  }
}

}  // namespace ringcomm::testing
