// Tensors in memory that all ranks of the host have mapped. An all_gather or reduce_scatter of them
// copies nothing in: ranks read one another's. FSDP2 takes its buffers from here.
//
// Before such a call the ranks tell one another where their tensors are. If one is elsewhere, the
// call goes through windows. All ranks decide alike whether to ask, by what they must agree on.
#include "base/stream_copy.h"
#include "torch/backend.h"
#include "torch/errors.h"

namespace ringcomm {
namespace {

constexpr uint64_t kLeastBytes = 1 << 20;  // in all shards; to ask costs some microseconds
constexpr uint64_t kBlockBytes = 4 << 10;  // summed at a time: 16 KiB took 1.4 times as long

class PeerReads {
 public:
  PeerReads(Operation&& whole, Communicator& group)
      : whole_(std::move(whole)), group_(group), places_(static_cast<size_t>(group.size())) {
    const bool in_one = whole_.input.size() == 1 && whole_.output.size() == 1;
    if (in_one) mine_ = static_cast<uint64_t>(whole_.input[0].data - buffers(rank_).data());
  }

  Operation first() {
    Operation operation;
    operation.collective = Collective::kAllGather;
    operation.input = {{reinterpret_cast<std::byte*>(&mine_), sizeof mine_}};
    operation.output = {
        {reinterpret_cast<std::byte*>(places_.data()), places_.size() * sizeof mine_}};
    operation.shards.assign(places_.size(), sizeof mine_);
    make_part(operation, whole_, Purpose::kBuffers);
    operation.timeout = whole_.timeout;
    return operation;
  }

  bool next(Operation& operation) {
    if (std::exchange(asked_, true)) return false;
    std::vector<const std::byte*> theirs;
    for (Rank rank = 0; rank < group_.size(); ++rank) theirs.push_back(input_of(rank));
    if (std::ranges::count(theirs, nullptr) > 0) {
      operation = std::move(whole_);
      return true;
    }
    gathers_ ? gather(theirs) : reduce(theirs);
    operation = {};  // a barrier: until then nobody may write what others read
    return true;
  }

 private:
  std::span<std::byte> buffers(Rank rank) const { return group_.state().transport().buffers(rank); }
  uint64_t shard(Rank rank) const { return whole_.shards[static_cast<size_t>(rank)]; }

  // Returns null if it is elsewhere.
  const std::byte* input_of(Rank rank) const {
    const uint64_t at = places_[static_cast<size_t>(rank)];
    const std::span<std::byte> all = buffers(rank);
    const uint64_t bytes = gathers_ ? shard(rank) : offset_of(whole_.shards, group_.size());
    const bool inside = bytes <= all.size() && at <= all.size() - bytes;
    return inside && at % size_of(whole_.dtype) == 0 ? all.data() + at : nullptr;
  }

  void gather(const std::vector<const std::byte*>& theirs) const {
    std::byte* to = whole_.output[0].data;
    for (Rank rank = 0; rank < group_.size(); to += shard(rank++)) {
      const std::byte* const from = theirs[static_cast<size_t>(rank)];
      if (to != from) stream_copy(to, from, shard(rank));
    }
  }

  // In rank order, as the direct algorithm does. The sums go past the caches.
  void reduce(std::vector<const std::byte*>& theirs) const {
    const Reduction how = make_reduction(whole_, group_.size());
    alignas(64) std::array<std::byte, kBlockBytes> sum;
    std::byte* const to = sum.data();
    uint64_t step = offset_of(whole_.shards, rank_);
    for (uint64_t done = 0; done < shard(rank_); done += step) {
      for (const std::byte*& data : theirs) data += step;
      step = std::min(kBlockBytes, shard(rank_) - done);
      ringcomm::reduce(how, true, {&to, 1}, theirs, step / size_of(how.dtype));
      stream_copy(whole_.output[0].data + done, to, step);
    }
  }

  Operation whole_;
  Communicator& group_;
  const Rank rank_ = group_.rank();
  const bool gathers_ = whole_.collective == Collective::kAllGather;
  uint64_t mine_ = UINT64_MAX;  // where the input lies in the rank's buffers
  std::vector<uint64_t> places_;
  bool asked_ = false;
};

}  // namespace

void Backend::read_peers(Call& call) {
  const Operation& operation = call.operation;
  Communicator& group = *call.life->group;
  const bool served = operation.collective == Collective::kAllGather ||
                      operation.collective == Collective::kReduceScatter;
  if (!served || !supportsTensorAlloc(-1) || call.device || call.continuation || size() == 1 ||
      operation.op == ReduceOp::kPremulSum || offset_of(operation.shards, size()) < kLeastBytes ||
      with_torch_errors([&] { return group.host().algorithm_of(operation); }) !=
          Algorithm::kDirect) {
    return;
  }
  const auto reads = std::make_shared<PeerReads>(std::move(call.operation), group);
  call.operation = reads->first();
  call.continuation = [reads](Operation& next) { return reads->next(next); };
}

// Takes it from torch's allocator, which knows streams. Others map what is new at their next calls.
at::Tensor Backend::allocate_on_device(int64_t size, const at::TensorOptions& options) const {
  at::Tensor tensor = at::empty({size}, options);
  const auto group = this->group();
  DeviceEngine* const there = group->device().in_use();
  if (there != nullptr && there->device() == tensor.device().index() && tensor.nbytes() > 0) {
    with_torch_errors([&] { there->offer(span_of(tensor)); });
  }
  return tensor;
}

at::Tensor Backend::allocateTensor(long size, at::TensorOptions options) {
  if (!options.device().is_cpu()) return allocate_on_device(size, options);
  const auto owner = life();
  const std::span<std::byte> all = owner->group->state().transport().buffers(rank());
  const uint64_t bytes =
      SegmentLayout::page_up(static_cast<uint64_t>(size) * options.dtype().itemsize());
  const Lock lock(owner->pieces_mutex);
  uint64_t at = 0;
  for (const auto& [begin, end] : owner->pieces) {
    if (begin - at >= bytes) break;
    at = end;
  }
  if (bytes == 0 || all.size() - at < bytes) return at::empty({size}, options);
  owner->pieces[at] = at + bytes;
  // The tensor may outlive the group, and holds its memory.
  const auto give_back = [owner, at](void*) {
    const Lock lock(owner->pieces_mutex);
    owner->pieces.erase(at);
  };
  return at::from_blob(all.data() + at, {size}, give_back, options);
}

}  // namespace ringcomm
