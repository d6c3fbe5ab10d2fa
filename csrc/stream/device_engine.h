// A group's operations on tensors of a device: work that its streams do, in the order of the calls.
// The host enqueues and goes on; it waits for other ranks once, when they first meet here.
#pragma once

#include "device/kernel_launch.h"
#include "stream/completion.h"
#include "stream/registered_memory.h"

namespace ringcomm {

class DeviceEngine final : public Engine {
 public:
  DeviceEngine(GroupState& state, Progress& progress, cuda::Api& api, int device);
  ~DeviceEngine();

  int device() const { return device_; }
  // Returns how many operations ranks have done without the host's way, which counts its own.
  uint64_t sequence() const { return announcements_.sequence(); }
  // Enqueues an operation after what is in `caller` so far: in that stream itself, or beside it
  // where `on_own_stream`. `finish` may enqueue something more that belongs to it.
  using Finish = std::function<void(cuda::Stream)>;
  CompletionPtr enqueue(const Operation& operation, cuda::Stream caller, bool on_own_stream,
                        const Finish& finish);
  // Enqueues messages that make progress side by side, beside `caller`.
  CompletionPtr enqueue(const std::vector<DeviceMessage>& messages, cuda::Stream caller,
                        const Finish& finish);
  // Waits, on the host, for what is in that stream.
  void synchronize(cuda::Stream stream) const;
  // Meets the others, if that has not been done. Every rank of the group must call it. Returns true
  // if kernels run collectives; else they go through the host's memory.
  bool connect();
  // Connects, and returns the kernel that would run the operation; nothing if the host does.
  std::optional<Algorithm> kernel_for(const Operation& operation);

  // Has all ranks map that memory, and keeps it mapped, under its names, in place of memory that
  // these had before. Every rank of the group must call it: they meet. `asked` is its name in
  // texts. It does nothing where collectives go through memory of the host.
  void register_memory(const std::string& asked, const RegisteredMemory::Named& memory);
  // Ends the registration, without waiting for other ranks. Returns false if there was none.
  bool deregister_memory(const std::string& name);
  // Lets others map it at their next call. Does nothing before the ranks have met.
  void offer(const Span& memory);

  // Gives the ends of what was enqueued.
  Verdicts& verdicts() { return verdicts_; }
  // Tells whether something is pending that was enqueued until then.
  bool pending(uint64_t until_batch) { return verdicts_.pending(until_batch) || staging_.gated(); }
  void fail(const std::exception_ptr& error) override { verdicts_.fail(error); }
  // Lets go of peers' memory within `grace`, waits until they have let go of ours, gives it back.
  // Returns false if streams may still use mapped memory.
  bool close(Clock::duration grace);
  std::string flight_ring() const { return group_.recorder.bytes(); }

 private:
  struct Device {
    Device(cuda::ExportContext context, cuda::Peers::Place place)
        : peers(std::move(context), std::move(place)) {}
    cuda::Peers peers;
    cuda::StreamWords words{peers};
    cuda::KernelLaunch kernels{peers, words};
  };

  bool pending() override { return pending(UINT64_MAX); }
  bool watched() const override { return verdicts_.watched(); }
  // Posts messages whose data a stream has brought to the host.
  bool progress(Driver& driver) override;
  void check() override { verdicts_.check(); }
  void note_progress() override { verdicts_.note_progress(); }
  Clock::duration poll_interval() override;

  CompletionPtr guarded(const std::string& asked, auto&& enqueue);
  void guard(const std::string& asked, const std::function<void()>& call);  // enqueues nothing
  void meet(const std::vector<Rank>& peers, const std::string& asked)
      RINGCOMM_REQUIRES(enqueue_mutex_);
  void make_room() RINGCOMM_REQUIRES(enqueue_mutex_);
  void refresh_imports() RINGCOMM_REQUIRES(enqueue_mutex_);
  Shape shape_of(const Operation& operation) const {
    return make_shape(operation, {.size = state_.size()});
  }
  std::optional<Algorithm> by_hand(const Operation& operation) const;
  std::optional<Algorithm> kernel_of(const Operation& operation) const
      RINGCOMM_REQUIRES(enqueue_mutex_);
  void run(Algorithm kernel, const Operation& operation, cuda::Stream stream, bool captured)
      RINGCOMM_REQUIRES(enqueue_mutex_);
  void finish_in(cuda::Stream stream, const Finish& finish) RINGCOMM_REQUIRES(enqueue_mutex_);
  CompletionPtr capture(const Operation& operation, uint64_t capture, cuda::Stream caller,
                        const std::string& asked, const Finish& finish)
      RINGCOMM_REQUIRES(enqueue_mutex_);
  CompletionPtr end(const std::vector<int>& timelines, cuda::Stream stream,
                    std::vector<Pending> pending) RINGCOMM_REQUIRES(enqueue_mutex_);
  bool has_peer_let_go(Rank peer) const;
  void give_back() RINGCOMM_REQUIRES(enqueue_mutex_);

  GroupState& state_;
  Progress& progress_;
  cuda::Api& api_;
  const int device_;
  const int connections_;
  DeviceGroup group_;
  Verdicts verdicts_;
  EventPool events_;
  HostStaging staging_;
  Announcements announcements_;

  Mutex enqueue_mutex_;  // CUDA may block its holder
  // Used under that lock, and so is all that needs it.
  std::unique_ptr<Device> on_device_;
  Timelines timelines_ RINGCOMM_GUARDED_BY(enqueue_mutex_);
  DeviceRendezvous rendezvous_ RINGCOMM_GUARDED_BY(enqueue_mutex_);
  RegisteredMemory registered_ RINGCOMM_GUARDED_BY(enqueue_mutex_);
  uint64_t busy_looks_ RINGCOMM_GUARDED_BY(enqueue_mutex_) = 0;
  bool kept_ = false;  // streams or peers may still use the memory: until the process ends
};

}  // namespace ringcomm
