// The ranks of a large group in one thread and in virtual time: communicators as they are shipped,
// with their executor, their sessions and their words of failure, over the network of wide_net.h.
// A pair of ranks exists where a plan or a word of failure needs it.
#pragma once

#include <sys/mman.h>

#include <set>

#include "comm/communicator.h"
#include "wide_heap.h"
#include "wide_net.h"

namespace ringcomm::testing {

struct WideSetup {
  int ranks = 64;
  int local = 1;                // of each host
  Costs costs{.gamma = 1e-18};  // adding up takes no time here
  uint64_t seed = 1;
  Clock::duration skew{};  // ranks begin within such a time
  std::optional<Algorithm> algorithm{};
};

// A collective on all ranks, with their inputs and the right results.
class WideCall {
 public:
  // `bytes`: of the whole message, all shards together. They are rounded up to whole elements.
  WideCall(Collective collective, uint64_t bytes, const WideSetup& setup) : size_(setup.ranks) {
    call_.collective = collective;
    call_.root = 1;
    call_.op = ReduceOp::kSum;
    call_.salt = setup.seed;
    const auto ranks = static_cast<uint64_t>(size_);
    const uint64_t count = std::max<uint64_t>(bytes / 4, 1);
    const uint64_t shard = sharded(collective) ? (count + ranks - 1) / ranks : 0;
    call_.shards.assign(ranks, shard);
    call_.count = sharded(collective) ? shard * ranks : count;
    if (collective == Collective::kBarrier) call_.count = 0;
    if (collective == Collective::kAllGather) {
      for (Rank rank = 0; rank < size_; ++rank) add(input(rank));
    } else if (collective == Collective::kBroadcast) {
      add(input(call_.root));
    } else {
      for (uint64_t i = 0; i < call_.count; ++i) result_.push_back(reduced(call_, size_, i));
    }
  }

  uint64_t bytes() const { return 4 * call_.count; }
  Collective collective() const { return call_.collective; }

  std::vector<int32_t> input(Rank rank) const {
    const bool none = call_.collective == Collective::kBroadcast && rank != call_.root;
    const uint64_t count = call_.collective == Collective::kAllGather ? call_.shards[0]
                           : none                                     ? 0
                                                                      : call_.count;
    std::vector<int32_t> values(count);
    for (uint64_t i = 0; i < count; ++i) values[i] = input_value(call_, rank, i);
    return values;
  }
  std::span<const int32_t> expected(Rank rank) const {
    if (call_.collective != Collective::kReduceScatter) return result_;
    const uint64_t shard = call_.shards[0];
    return std::span(result_).subspan(static_cast<uint64_t>(rank) * shard, shard);
  }
  Operation operation(std::vector<int32_t>& input, std::vector<int32_t>& output) const {
    const auto span = [](std::vector<int32_t>& side) {
      return Span{reinterpret_cast<std::byte*>(side.data()), 4 * side.size()};
    };
    Operation operation;
    operation.collective = call_.collective;
    operation.dtype = DType::kInt32;
    operation.op = call_.op;
    operation.root = call_.root;
    if (sharded(call_.collective)) {
      operation.shards = in_bytes(call_.shards);
    } else {
      operation.bytes = bytes();
    }
    operation.input = {span(input)};
    operation.output = {span(output)};
    return operation;
  }

 private:
  void add(const std::vector<int32_t>& values) {
    result_.insert(result_.end(), values.begin(), values.end());
  }

  Call call_;
  const int size_;
  std::vector<int32_t> result_;
};

// The plans of a group talk to so many ranks each that their sessions take too much memory here.
struct TooManyPeers : Failure {
  explicit TooManyPeers(uint64_t peers)
      : Failure(str("the plans talk to ", peers, " ranks each")), peers(peers) {}
  const uint64_t peers;
};

// Memory of this process only, zero until it is touched.
struct WidePages {
  explicit WidePages(uint64_t bytes) : mapping(bytes), bytes(bytes) {}
  Mapping mapping;
  const uint64_t bytes;
};

// Bytes of pages that were touched.
inline uint64_t touched(const std::byte* data, uint64_t bytes) {
  std::vector<unsigned char> pages(bytes / SegmentLayout::kPage);
  if (::mincore(const_cast<std::byte*>(data), bytes, pages.data()) != 0)
    throw SystemError("mincore");
  return SegmentLayout::kPage * static_cast<uint64_t>(std::ranges::count(pages, 1));
}

class WideWorld {
 public:
  // With the pairs that these calls need.
  WideWorld(const WideSetup& setup, const std::vector<WideCall>& calls);
  ~WideWorld();
  WideWorld(const WideWorld&) = delete;

  // Every rank calls it, and it ends well on all. Returns how long it took.
  double run(const WideCall& call);
  // So often a connection that carries something is cut during the next calls.
  void cut_every(Clock::duration pause) { cut_every_ = pause; }
  void connect_all();

  Timeline& timeline() { return fabric_.timeline; }
  std::vector<std::unique_ptr<WidePair>>& pairs() { return pairs_; }
  Algorithm algorithm(const WideCall& call) const { return algorithm_of(shape_of(call)); }

  struct Member {
    std::shared_ptr<Communicator> group;
    std::vector<RemotePeer*> remotes;
    std::vector<WidePair*> pairs;
    std::vector<int32_t> input, output;
    TaskPtr task;
    Clock::time_point ended{};
    bool awake = false, dead = false;
  };
  Member& member(Rank rank) { return members_[at(rank)]; }
  int size() const { return setup_.ranks; }
  uint64_t memory(Rank rank);  // bytes of heap and touched pages
  // Its side of a pair.
  static int side(const WidePair& pair, Rank rank) { return pair.ranks[0] == rank ? 0 : 1; }
  End& end(WidePair& pair, Rank rank) { return pair.ends[at(side(pair, rank))]; }

  void begin(const WideCall& call);
  bool over() const { return pending_ == 0; }
  // Something has come for that rank: soon it looks.
  void wake(Rank rank);
  std::function<void(Rank)> after_drive;  // a rank has: its group may have failed
  bool deaf = false;                      // no rank reads its messages
  // The process of that rank ends.
  void stop(Rank rank);
  // That rank looks at its peers, as a waiting one does now and then.
  void check_peers(Rank rank);

 private:
  void find_pairs(const WideCall& call);
  Shape shape_of(const WideCall& call) const;
  Algorithm algorithm_of(const Shape& shape) const;
  void make_pairs();
  void make_member(Rank rank);
  void start(Rank rank, const WideCall& call);
  void drive(Rank rank);
  void check(const WideCall& call);
  void cut_one();
  bool share_host(Rank a, Rank b) const { return a / setup_.local == b / setup_.local; }

  const WideSetup setup_;
  Random random_;
  Fabric fabric_;
  Geometry geometry_;
  SegmentLayout layout_, pair_layout_;
  std::vector<int> host_of_;
  Reach reach_;
  DoorbellPage bell_{};
  std::vector<Adapter> adapters_;
  std::vector<WidePages> segments_;
  std::vector<std::set<Rank>> needed_;
  std::vector<std::unique_ptr<WidePair>> pairs_;
  std::vector<Member> members_;
  int pending_ = 0;  // ranks whose call has not ended
  Clock::duration cut_every_{};
  uint64_t shared_bytes_ = 0;  // of both ends of a pair
};

}  // namespace ringcomm::testing
