// Calls on tensors of a device, with the semantics of ProcessGroupNCCL: a call enqueues and
// returns. Synchronous ones run in the caller's current stream, asynchronous ones in a stream of
// the group's, for which wait() makes the current stream wait, and not the host. Only torch's
// device-generic interface is used, so none of this needs a CUDA build of torch.
#pragma once

#include "stream/device_engine.h"
#include "torch/work.h"

namespace ringcomm {

// Decides where a call's tensors are, and says so in `call.device`: CUDA, or nullopt for the CPU.
// In simulation, tensors of the CPU count as those of a device. Refuses tensors on several.
void find_device(Call& call);
// Tells whether torch has a CUDA device, and this build a library for it that finds one.
bool cuda_is_served();
// Tells the other processes of this host that this one uses that device, before it does so. Without
// a device it does that in simulation alone.
void announce_device(std::optional<int> device);
// Returns torch's current stream of that device, for the library.
cuda::Stream current_stream(at::Device device);

class DeviceWork final : public c10d::Work {
 public:
  // `event_end` is called when the call has been enqueued.
  // Keeps the call's tensors until the operation is over, also where nobody waits for it.
  DeviceWork(Call& call, const EventEnd& event_end);
  ~DeviceWork() override;

  // Adds another message of a batch.
  void add(Call& call);
  // Call it when the operation has been enqueued.
  void follow(CompletionPtr end);
  // Lets the tensors go if it was enqueued in the caller's own stream, where later work follows it
  // anyway.
  void forget();
  // Returns a function that copies results, in a stream, to where they belong; null: they are
  // there.
  DeviceEngine::Finish finish() const;

  bool isCompleted() override { return end_ && end_->reached(); }
  bool isSuccess() const override { return end_ && end_->reached() && end_->good(); }
  std::exception_ptr exception() const override;
  // Has the current stream wait. The host waits, too, for a barrier, in simulation, or if there is
  // a timeout.
  bool wait(std::chrono::milliseconds timeout = kNoTimeout) override;
  void synchronize() override { wait(); }
  void blockCurrentStream() override { wait(); }
  std::vector<at::Tensor> result() override { return outputs_; }
  int sourceRank() const override { return source_; }
  // Returns a future that is complete from the start. A user of its value waits in a stream.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  uint64_t getSequencenumber() const override { return sequence_; }
  uint64_t getCompletionKey() const { return key_; }  // overrides from torch 2.15 on

 private:
  void tell_end() const;
  void wait_on_host(std::chrono::milliseconds timeout);

  const std::shared_ptr<BackendState> backend_state_;
  const at::Device device_;
  const bool barrier_;
  const uint64_t sequence_, key_ = new_key();
  const int source_;
  std::vector<at::Tensor> kept_, outputs_;
  std::vector<Staging> staging_;
  CompletionPtr end_;
};

}  // namespace ringcomm
