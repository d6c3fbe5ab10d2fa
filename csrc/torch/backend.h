// The c10d::Backend named "ringcomm": torch.distributed calls it.
//
// collectives.cc and backend_p2p.cc hold the calls, issue.cc runs them, backend.cc is a group's
// life, reconfigure.cc changes its ranks. Names and signatures of the overrides are torch's;
// overriding the old ones serves torch 2.11 to 2.15 alike.
#pragma once

#include <set>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "stream/library.h"
#include "torch/device.h"
#include "torch/options.h"
#include "transport/socket_store.h"

namespace ringcomm {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

// Runs the program's own signal handlers, which may raise, for a thread that waits.
void run_signal_handlers();
// Returns the line of the program that calls, as flight records have it; 0: no Python calls.
uint32_t line_of_caller();
// Calls without Python's lock, if this thread holds it.
void without_gil(const std::function<void()>& call);
// Returns a tensor on the CPU that all processes of this host can read, if no more than `most`
// bytes of such are in use then, and there is memory; else a tensor like any other.
at::Tensor empty_readable(const std::vector<int64_t>& sizes, const at::TensorOptions& options,
                          uint64_t most);
// Returns the core's options for a group with these.
CommunicatorOptions wanted_of(const ringcomm::Options& options, RankAndSize self);

class Backend final : public c10d::Backend {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using OptionsPtr = c10::intrusive_ptr<c10d::Backend::Options>;

  // Meets the group's other ranks through `store`, within the options' timeout. One that `waits`
  // meets nobody, until it is reconfigured.
  static c10::intrusive_ptr<Backend> create(const StorePtr& store, RankAndSize self,
                                            GroupOptionsPtr options, bool waits = false);
  // `self`: as torch knows it; a group that waits for its first reconfiguration has other ranks.
  Backend(std::shared_ptr<Communicator> group, RankAndSize self, GroupOptionsPtr options,
          StorePtr store);
  ~Backend() override;

  const std::string getBackendName() const override { return kBackendName; }
  OptionsPtr getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override {
    group()->state().set_timeout(checked_timeout(timeout));
  }
  // Gives the next call this much more time than it would have.
  void addEphemeralTimeout(const std::chrono::milliseconds& more) {  // overrides from 2.14 on
    extension_ms_ += checked_timeout(more).count();
  }
  // Sequence numbers need no agreement: every rank counts the same calls.
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return group()->sequence(); }
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override { close(true); }
  // `drains`: as Communicator::shutdown().
  void close(bool drains);
  void enableCollectivesTiming() override {}  // durations are always known
  // Has the hook called with each Work that has ended, on the thread that ended it: maybe on
  // several at once.
  void registerOnCompletionHook(
      std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override { life()->wait_for_all(); }

  // Has hooks called: see Hooks.
#ifdef C10D_BACKEND_HAS_HOOKS
  void registerAbortHook(int64_t id, c10d::AbortHook hook) override {
    hooks_->failed.add(id, std::move(hook));
  }
  void unregisterAbortHook(int64_t id) override { hooks_->failed.remove(id); }
#endif
#if TORCH_VERSION_MINOR >= 15
  bool supportsAbortHooks() const override { return true; }
  bool supportsCompletionHooks() const override { return true; }
  void registerCompletionHook(int64_t id, c10d::CompletionHook hook) override {
    hooks_->succeeded.add(
        id, [hook = std::move(hook)](uint64_t key, std::optional<float> ms) { hook({key, ms}); });
  }
  void unregisterCompletionHook(int64_t id) override { hooks_->succeeded.remove(id); }
#endif

  // Meets on the device at once, for init_process_group(device_id=...).
  void eagerConnectSingleDevice(at::Device device) override;

  // Gives this group other ranks, in place, also when it has failed or was aborted. Every rank that
  // is to be in it calls with the same handles, in the order of their ranks, and the same `uuid`,
  // which is new to each. A process has a handle in each group, and any will do. No store is used.
  std::string reconfigure_handle() const;
  using Check = std::function<void()>;  // called while ranks meet; throws where they never will
  void reconfigure_to(int64_t uuid, const std::vector<std::string>& handles,
                      std::optional<std::chrono::milliseconds> timeout,
                      const Check& check = nullptr);
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  bool supportsReconfigure() const override { return true; }
  c10d::ReconfigureHandle get_reconfigure_handle() const override { return reconfigure_handle(); }
  WorkPtr reconfigure(const c10d::ReconfigureOptions& options) override;
#endif
  // Makes a group of the others; those that are left out take no part. It has no store, either.
  bool supportsShrinking() const override { return true; }
  BackendPtr shrink(const std::vector<int64_t>& ranks_to_exclude, int shrink_flags,
                    const OptionsPtr& opts) override;

  // Tensors on the CPU lie where all ranks of the host can read them (transport/arena.h), while
  // there is room. Those on a device are torch's own memory, which others may map before its first
  // use.
  bool supportsTensorAlloc(c10::DeviceIndex index) override {
    const auto& most = options_->config.shared_buffers;
    return index >= 0 ? options_->cuda && most.value_or(0) > 0 : most.value_or(1) > 0;
  }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;

  // Has all ranks map memory at once: see DeviceEngine::register_memory(). It is given as addresses
  // and bytes. `device`: -1 for the CPU, whose tensors may stand in for those of a device; none:
  // the current one.
  using NamedMemory = std::map<std::string, std::vector<std::pair<uint64_t, uint64_t>>>;
  void register_memory(const std::string& asked, const NamedMemory& memory,
                       std::optional<int> device);
  bool deregister_memory(const std::string& name);

  bool supportsSplitting() const override { return true; }
  BackendPtr split(const StorePtr& store, const std::vector<int>& ranks,
                   const OptionsPtr& opts) override;
  uint64_t splits() const { return splits_; }
  // Has ranks compare this with each collective from now on: a hash of what is in the bytes.
  void set_codes(uint64_t codes) { codes_ = codes; }
  // Tells torch whether messages may come as a batch. Devices need one; on the CPU each message is
  // a request of its own, as Gloo's are. A batch belongs to the thread that begins it.
  bool supportsCoalescing() const override { return options_->cuda || device_is_simulated(); }
  void startCoalescing() override;
  WorkPtr endCoalescing() override;
  void forget_batch() { take_batch(); }  // the block that made it has raised

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions&) override;
  WorkPtr allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return allreduce(tensors, opts);
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions&) override;
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions&) override;
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions&) override;
  WorkPtr allgather(TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override;
  WorkPtr _allgather_base(at::Tensor& output, at::Tensor& input,
                          const c10d::AllgatherOptions&) override;
  WorkPtr allgather_coalesced(TensorLists& outputs, Tensors& inputs,
                              const c10d::AllgatherOptions&) override;
  WorkPtr allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::AllgatherOptions&) override;
  WorkPtr gather(TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions&) override;
  WorkPtr gather_single(at::Tensor& output, at::Tensor& input,
                        const c10d::GatherOptions&);  // overrides from torch 2.14 on
  WorkPtr scatter(Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions&) override;
  WorkPtr reduce_scatter(Tensors& outputs, TensorLists& inputs,
                         const c10d::ReduceScatterOptions&) override;
  WorkPtr _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                               const c10d::ReduceScatterOptions&) override;
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                          const c10d::ReduceScatterOptions&) override;
  WorkPtr alltoall_base(at::Tensor& output, at::Tensor& input,
                        std::vector<int64_t>& outputSplitSizes,
                        std::vector<int64_t>& inputSplitSizes,
                        const c10d::AllToAllOptions&) override;
  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions&) override;
  WorkPtr barrier(const c10d::BarrierOptions& opts) override;
  // Names on rank 0 the ranks that do not come, and tells the others.
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool waitAllRanks) override;

#ifdef C10D_BACKEND_HAS_WINDOW
  bool supportsWindow() const override { return true; }
  c10::intrusive_ptr<c10d::Window> new_window(const std::optional<at::Tensor>& tensor) override;
#endif

  WorkPtr send(Tensors& tensors, int dstRank, int tag) override;
  WorkPtr recv(Tensors& tensors, int srcRank, int tag) override;
  WorkPtr recvAnysource(Tensors& tensors, int tag) override;

  // Returns the group as it is now. A caller of several functions keeps it, because reconfigure()
  // may come between.
  std::shared_ptr<Communicator> group() const { return life()->group; }
  // Return the same as torch's, which cannot change before torch 2.14.
  Rank rank() const { return place_.load().rank; }
  int size() const { return place_.load().size; }

 private:
  friend class Window;  // whose puts and signals are calls
  // The calls between startCoalescing() and endCoalescing().
  struct Batch {
    std::vector<WorkPtr> works;
    c10::intrusive_ptr<DeviceWork> work;  // of the messages on a device
    std::vector<DeviceMessage> messages;
    std::shared_ptr<BackendState> life;
    at::Device device = at::kCPU;
  };

  RankAndSize rank_and_size() const { return place_; }
  std::shared_ptr<BackendState> life() const { return life_.load(); }
  Network& network() const;
  GroupOptionsPtr options_of(const std::vector<int>& ranks, const OptionsPtr& opts) const;
  void begin_life(std::shared_ptr<Communicator> group);
  std::vector<Way> ways_to(const std::vector<std::string>& handles, Rank self) const;
  std::shared_ptr<Communicator> gather(CommunicatorOptions wanted, const std::vector<Way>& ways,
                                       const std::vector<std::string>& meeting, int aborts,
                                       const Check& check = nullptr) const;
  std::chrono::milliseconds timeout_of(std::chrono::milliseconds asked, const GroupState& state);
  // Tells whether torch needs a Work of each call. Else a finished one has none.
  bool wants_works() const { return !hooks_->succeeded.empty(); }
  // Runs the call here, or starts it. Returns null for a finished call, as torch expects.
  WorkPtr issue(Call&& call);
  WorkPtr run(Call& call);
  WorkPtr start(Call& call, const EventEnd& event_end = nullptr);
  WorkPtr start_in_profile(Call& call);
  std::string algorithm_of(const Call& call) const;
  WorkPtr start_on_device(Call& call, const EventEnd& event_end);
  WorkPtr post_on_device(Call& call, DeviceEngine& there, const EventEnd& event_end);
  static void start(Batch& batch);
  Batch* own_batch();
  Batch take_batch();
  void await_device();
  void submit(const c10::intrusive_ptr<Work>& work, Call& call);
  void post(const c10::intrusive_ptr<Work>& work, Call& call);
  void leave(bool drains = true);
  void collect(const WorkPtr& work);

  // A call keeps the life it began in, which reconfigure() ends. Partner: begin_life().
  std::atomic<std::shared_ptr<BackendState>> life_;
  std::atomic<RankAndSize> place_;  // in that life; partner: begin_life()
  const GroupOptionsPtr options_;   // but for the timeout, which the group has
  const std::shared_ptr<Hooks> hooks_ = std::make_shared<Hooks>();
  std::atomic<int64_t> extension_ms_{0};

  Mutex split_mutex_;
  StorePtr split_store_ RINGCOMM_GUARDED_BY(split_mutex_);
  c10::weak_intrusive_ptr<c10d::Backend> split_child_ RINGCOMM_GUARDED_BY(split_mutex_);
  std::atomic<uint64_t> splits_{0}, codes_{0};

  Mutex reconfigure_mutex_;
  std::set<int64_t> uuids_ RINGCOMM_GUARDED_BY(reconfigure_mutex_);  // that were used
  const Card card_;                                                  // in the handle
  const StorePtr store_;                                             // for its host's name
  std::atomic<int> aborts_{0}, shrinks_{0};
  std::atomic<bool> revoked_{false};  // by abort(), to be reconfigured: that is no failure

  Mutex batches_mutex_;
  std::map<std::thread::id, Batch> batches_ RINGCOMM_GUARDED_BY(batches_mutex_);
};

}  // namespace ringcomm
