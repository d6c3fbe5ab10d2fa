// The c10d::Backend named "ringcomm": torch.distributed calls it.
//
// collectives.cc and backend_p2p.cc hold the calls, issue.cc runs them, backend.cc is a group's
// life. Names and signatures of the overrides are torch's; overriding the old ones serves
// torch 2.11 to 2.15 alike.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "base/mutex.h"
#include "comm/communicator.h"
#include "torch/call.h"
#include "torch/declined.h"
#include "torch/device.h"
#include "torch/options.h"
#include "torch/work.h"

namespace ringcomm {

// For a thread that waits: the program's own handlers, which may raise.
void run_signal_handlers();

class Backend final : public Declined {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using OptionsPtr = c10::intrusive_ptr<c10d::Backend::Options>;

  // Meets the group's other ranks through `store`, within the options' timeout.
  static c10::intrusive_ptr<Backend> create(const c10::intrusive_ptr<c10d::Store>& store,
                                            RankAndSize self,
                                            c10::intrusive_ptr<ringcomm::Options> options);
  Backend(std::shared_ptr<Communicator> group, c10::intrusive_ptr<ringcomm::Options> options);
  ~Backend() override;

  const std::string getBackendName() const override { return kBackendName; }
  OptionsPtr getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  // The next call gets this much more time than it would have.
  void extend_next_timeout(std::chrono::milliseconds more) { extension_ms_ += more.count(); }
  void addEphemeralTimeout(const std::chrono::milliseconds& more) {  // overrides from 2.14 on
    extend_next_timeout(more);
  }
  // Sequence numbers need no agreement: every rank counts the same calls.
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return group().sequence(); }
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;
  void enableCollectivesTiming() override {}  // durations are always known
  // The hook is called with each Work that has ended, on the thread that ended it.
  void registerOnCompletionHook(
      std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override { backend_state_->pending.wait(); }

  // init_process_group(device_id=...): meets there at once.
  void eagerConnectSingleDevice(at::Device device) override;

  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                          const std::vector<int>& ranks,
                                          const OptionsPtr& opts) override;
  uint64_t splits() const { return splits_; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  WorkPtr allreduce_coalesced(Tensors& tensors,
                              const c10d::AllreduceCoalescedOptions& opts) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs,
                    const c10d::AllgatherOptions& opts) override;
  WorkPtr _allgather_base(at::Tensor& outputBuffer, at::Tensor& inputBuffer,
                          const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions& opts) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions& opts) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  WorkPtr gather_single(at::Tensor& outputBuffer, at::Tensor& inputBuffer,
                        const c10d::GatherOptions& opts);  // overrides from torch 2.14 on
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& opts) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions& opts) override;
  WorkPtr _reduce_scatter_base(at::Tensor& outputBuffer, at::Tensor& inputBuffer,
                               const c10d::ReduceScatterOptions& opts) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions& opts) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<int64_t>& outputSplitSizes,
                        std::vector<int64_t>& inputSplitSizes,
                        const c10d::AllToAllOptions& opts) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  // Rank 0 names the ranks that do not come; the others are told.
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool waitAllRanks) override;

  WorkPtr send(Tensors& tensors, int dstRank, int tag) override;
  WorkPtr recv(Tensors& tensors, int srcRank, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  Communicator& group() const { return *backend_state_->group; }

 private:
  RankAndSize rank_and_size() const { return {rank_, size_}; }
  std::chrono::milliseconds timeout_of(std::chrono::milliseconds asked);
  // Runs the call here, or starts it. Returns null for a finished call, as torch expects.
  WorkPtr issue(Call&& call);
  WorkPtr run(Call& call);
  WorkPtr start(Call& call, bool profiled);
  WorkPtr start_in_profile(Call& call);
  WorkPtr start_on_device(Call& call, bool profiled);
  WorkPtr post_on_device(Call& call, DeviceEngine& there, bool profiled);
  void start_batch() RINGCOMM_REQUIRES(coalesced_mutex_);
  void await_device();
  void submit(const c10::intrusive_ptr<Work>& work, Call& call);
  void post(const c10::intrusive_ptr<Work>& work, Call& call);
  void leave();
  void collect(const WorkPtr& work);
  void lead_barrier(std::chrono::milliseconds timeout, bool every_rank);
  void follow_barrier(std::chrono::milliseconds timeout);
  void await(Message& message, Clock::duration at_most);

  std::shared_ptr<BackendState> backend_state_ = std::make_shared<BackendState>();
  const c10::intrusive_ptr<ringcomm::Options> options_;  // but for the timeout, which the group has
  std::atomic<int64_t> extension_ms_{0};

  Mutex split_mutex_;
  c10::intrusive_ptr<c10d::Store> split_store_ RINGCOMM_GUARDED_BY(split_mutex_);
  c10::weak_intrusive_ptr<c10d::Backend> split_child_ RINGCOMM_GUARDED_BY(split_mutex_);
  std::atomic<uint64_t> splits_{0};

  std::atomic<bool> coalescing_{false};
  Mutex coalesced_mutex_;
  std::vector<WorkPtr> coalesced_ RINGCOMM_GUARDED_BY(coalesced_mutex_);
  // The batch of messages on a device.
  c10::intrusive_ptr<DeviceWork> batch_ RINGCOMM_GUARDED_BY(coalesced_mutex_);
  std::vector<DeviceMessage> messages_ RINGCOMM_GUARDED_BY(coalesced_mutex_);
  at::Device batch_device_ RINGCOMM_GUARDED_BY(coalesced_mutex_) = at::kCPU;
};

}  // namespace ringcomm
