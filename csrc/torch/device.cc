#include "torch/device.h"

#include <ATen/ATen.h>
#include <ATen/core/jit_type.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "group/process.h"
#include "stream/library.h"
#include "torch/backend.h"
#include "torch/errors.h"

namespace ringcomm {
namespace {

using Future = c10::ivalue::Future;

// A stream of the library's as torch's: its number is its handle.
c10::Stream torch_stream(cuda::Stream stream, at::Device device) {
  return c10::Stream(c10::Stream::UNSAFE, device, reinterpret_cast<c10::StreamId>(stream));
}

constexpr const char* kNotBegun =
    "this message is one of several that are not yet begun: leave the coalescing manager before "
    "you wait";

// kPremulSum: the inputs, multiplied in the current stream, take the place of the inputs.
void scale_inputs(Call& call) {
  Operation& operation = call.operation;
  if (operation.op != ReduceOp::kPremulSum || !reduces(operation.collective)) return;
  const auto options = call.inputs[0].options();
  for (Span& span : operation.input) span = call.staging.scaled(span, options, operation.factor);
  operation.factor = 1;
}

int index_of(at::Device device) {
  return device.is_cuda() && device.has_index() ? device.index() : device_api().current_device();
}

}  // namespace

void find_device(Call& call) {
  std::optional<at::Device> device = call.device;
  for (const auto tensors : {call.inputs, call.outputs}) {
    for (const at::Tensor& tensor : tensors) {
      if (!device) device = tensor.device();
      if (*device == tensor.device()) continue;
      Refusal{call.name}(str("the tensors of one call are on ", device->str(), " and on ",
                             tensor.device().str(), ": move them to one device"));
    }
  }
  const bool on_cpu = !device || device->is_cpu();
  const bool on_host = call.continuation || call.tag >= kWindowTags;
  const bool simulated = on_cpu && !on_host && device_is_simulated();
  if (simulated) device = at::Device(at::kCPU);
  call.device = on_cpu && !simulated ? std::nullopt : device;
}

bool cuda_is_served() {
  if (!c10::impl::hasDeviceGuardImpl(c10::kCUDA)) return false;
  try {
    device_api();
    return true;
  } catch (const UsageError&) {
    return false;
  }
}

void announce_device(std::optional<int> device) {
  const bool simulated = device_is_simulated();
  if (!simulated && !(device && cuda_is_served())) return;
  cuda::Api& api = device_api();
  const int index = simulated ? api.current_device() : *device;
  static std::atomic<int> told{-1};
  if (told.exchange(index) == index) return;  // asking for its facts takes long
  const cuda::DeviceFacts facts = api.facts(index);
  Process::get().neighbours().use_device(cuda::hash_of(cuda::salted(facts.uuid, api.salt)));
}

cuda::Stream current_stream(at::Device device) {
  if (!device.is_cuda()) return nullptr;
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
}

// ---- work

DeviceWork::DeviceWork(Call& call, const EventEnd& event_end)
    : c10d::Work(call.life->group->rank(), call.type),
      backend_state_(call.life),
      device_(*call.device),
      barrier_(call.type == c10d::OpType::BARRIER),
      sequence_(backend_state_->group->sequence() + (call.peer ? 0 : 1)),
      source_(call.peer.value_or(-1)) {
  recordFunctionEndCallback_ = event_end;
  add(call);
}

DeviceWork::~DeviceWork() {
  if (!end_ || end_->reached()) return;
  struct Kept {  // the end belongs to the group: it goes first
    std::shared_ptr<BackendState> backend_state;
    std::vector<at::Tensor> tensors;
    std::vector<Staging> staging;
    CompletionPtr end;
  };
  const Completion* const end = end_.get();
  const Kept kept{backend_state_, std::move(kept_), std::move(staging_), std::move(end_)};
  Workers::get().release_later(std::make_shared<Kept>(kept), [end] { return end->reached(); });
}

void DeviceWork::follow(CompletionPtr end) {
  end_ = std::move(end);
  tell_end();
  if (recordFunctionEndCallback_) std::exchange(recordFunctionEndCallback_, nullptr)();
}

// Nobody waits for the end of an operation on a device, so the workers look for it.
void DeviceWork::tell_end() const {
  if (backend_state_->hooks->succeeded.empty()) return;
  struct Told {
    std::shared_ptr<BackendState> backend_state;
    CompletionPtr end;
    uint64_t key;
    ~Told() {
      if (end->good()) backend_state->hooks->succeeded.call(key, std::nullopt);
    }
  };
  const Completion* const end = end_.get();
  Workers::get().release_later(std::shared_ptr<Told>(new Told{backend_state_, end_, key_}),
                               [end] { return end->reached(); });
}

void DeviceWork::add(Call& call) {
  kept_.insert(kept_.end(), call.inputs.begin(), call.inputs.end());
  kept_.insert(kept_.end(), call.outputs.begin(), call.outputs.end());
  const bool sends = call.type == c10d::OpType::SEND;  // its future needs a tensor for its device
  const auto& told = sends ? call.inputs : call.outputs;
  outputs_.insert(outputs_.end(), told.begin(), told.end());
  if (!call.staging.empty()) staging_.push_back(std::move(call.staging));
}

DeviceEngine::Finish DeviceWork::finish() const {
  if (staging_.empty() || !device_.is_cuda()) return nullptr;
  return [this](cuda::Stream stream) {
    const c10::StreamGuard guard(torch_stream(stream, device_));
    for (const Staging& staging : staging_) staging.finish();
  };
}

std::exception_ptr DeviceWork::exception() const {
  if (!end_ || end_->good()) return nullptr;
  const auto why = backend_state_->group->state().why_failed();
  if (why) return as_torch(why);
  // A peer has failed, and is about to say so.
  return as_torch(std::make_exception_ptr(
      PeerError(rank_,
                "an operation on a device has failed because a peer has: the next call of "
                "this group names it")));
}

void DeviceWork::forget() {
  const std::lock_guard lock(mutex_);
  kept_.clear();
  staging_.clear();
  end_.reset();
}

bool DeviceWork::wait(std::chrono::milliseconds timeout) {
  TORCH_CHECK(end_, kNotBegun);
  if (const auto error = exception()) std::rethrow_exception(error);
  const bool limited = timeout != kNoTimeout;
  if (limited) timeout = checked_timeout(timeout);
  if (barrier_ || !device_.is_cuda() || limited) wait_on_host(timeout);
  end_->expect();
  if (device_.is_cuda()) end_->block(current_stream(device_));
  std::vector<at::Tensor> kept;  // its next user comes later in the current stream
  std::vector<Staging> staging;
  {
    const std::lock_guard lock(mutex_);
    kept.swap(kept_);
    staging.swap(staging_);
  }
  c10d::Work::synchronize();  // compiled graphs have it in a list
  return true;
}

void DeviceWork::wait_on_host(std::chrono::milliseconds timeout) {
  Communicator& group = *backend_state_->group;
  with_torch_errors([&] {
    const bool over =
        timeout != kNoTimeout ? group.device().wait(*end_, timeout) : group.device().wait(*end_);
    const std::exception_ptr why = over ? nullptr : group.state().error();
    if (why) std::rethrow_exception(why);
    if (!over) throw TimeoutError(str("wait() timed out after ", timeout.count(), " ms"));
  });
  if (const auto error = exception()) std::rethrow_exception(error);
  if (device_.is_cuda()) return;
  for (const Staging& staging : staging_) staging.finish();
}

c10::intrusive_ptr<Future> DeviceWork::getFuture() {
  TORCH_CHECK(end_, kNotBegun);
  const auto type = c10::ListType::create(c10::TensorType::get());
  const bool cuda = device_.is_cuda();
  if (!cuda) wait();
  auto future = c10::make_intrusive<Future>(type, std::vector<at::Device>(cuda ? 1 : 0, device_));
  c10::OptionalStreamGuard guard;
  if (cuda) guard.reset_stream(torch_stream(end_->stream(), device_));
  future->markCompleted(c10::IValue(outputs_));
  return future;
}

// ---- calls

// Returns the algorithm as flight records name it. A first call on a device has its ranks meet
// here.
std::string Backend::algorithm_of(const Call& call) const {
  if (call.peer) return "message";
  validate(call.operation, size(), rank());
  Communicator& group = *call.life->group;
  DeviceEngine* const there =
      call.device ? &group.device().engine(index_of(*call.device)) : nullptr;
  const auto kernel = there ? there->kernel_for(call.operation) : std::nullopt;
  return to_string(kernel ? *kernel : group.host().algorithm_of(call.operation));
}

Backend::WorkPtr Backend::start_on_device(Call& call, const EventEnd& event_end) {
  return with_torch_errors([&]() -> WorkPtr {
    DeviceEngine& there = call.life->group->device().engine(index_of(*call.device));
    if (call.peer) return post_on_device(call, there, event_end);
    const cuda::Stream caller = current_stream(*call.device);
    scale_inputs(call);
    const auto work = c10::make_intrusive<DeviceWork>(call, event_end);
    work->follow(there.enqueue(call.operation, caller, call.async, work->finish()));
    if (call.async) {
      collect(work);
      return work;
    }
    // The caller's next work in its stream follows it anyway.
    if (call.type == c10d::OpType::BARRIER || !call.device->is_cuda()) work->wait();
    if (wants_works()) return work;
    work->forget();
    return nullptr;
  });
}

Backend::WorkPtr Backend::post_on_device(Call& call, DeviceEngine& there,
                                         const EventEnd& event_end) {
  const bool sending = call.type == c10d::OpType::SEND;
  const Operation& operation = call.operation;
  if (*call.peer < 0) Refusal{"recv"}("a CUDA tensor needs the rank that sends it");
  DeviceMessage message;
  message.data = sending ? operation.input[0] : operation.output[0];
  message.kind = {
      sending,  operation.dtype, message.data.bytes / size_of(operation.dtype), *call.peer,
      call.tag, operation.line,  static_cast<uint32_t>(operation.layout)};
  message.timeout = operation.timeout;
  Batch* const batch = own_batch();
  if (batch == nullptr) {
    const auto work = c10::make_intrusive<DeviceWork>(call, event_end);
    work->follow(there.enqueue({message}, current_stream(*call.device), work->finish()));
    return work;
  }
  if (!batch->work) {
    batch->work = c10::make_intrusive<DeviceWork>(call, event_end);
    batch->works.push_back(batch->work);
    batch->life = call.life;
    batch->device = *call.device;
  } else {
    batch->work->add(call);
  }
  batch->messages.push_back(message);
  return batch->work;
}

// The messages of one coalescing make progress side by side: ranks may send to one another.
void Backend::start(Batch& batch) {
  if (!batch.work) return;
  with_torch_errors([&] {
    DeviceEngine& there = batch.life->group->device().engine(index_of(batch.device));
    const auto finish = batch.work->finish();
    batch.work->follow(there.enqueue(batch.messages, current_stream(batch.device), finish));
  });
}

// A barrier of hosts also waits for the work that this rank's device got before.
void Backend::await_device() {
  const auto group = this->group();
  DeviceEngine* const there = group->device().in_use();
  if (there == nullptr || !c10::impl::hasDeviceGuardImpl(c10::kCUDA)) return;
  const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(there->device()));
  with_torch_errors([&] { there->synchronize(current_stream(device)); });
  group->device().wait_for_all();
}

void Backend::register_memory(const std::string& asked, const NamedMemory& memory,
                              std::optional<int> device) {
  with_torch_errors([&] {
    RINGCOMM_CHECK(device.value_or(0) >= 0 || device_is_simulated(), asked,
                   ": tensors of the CPU need no registration, only those of CUDA devices do");
    RegisteredMemory::Named named;
    for (const auto& [name, ranges] : memory) {
      std::vector<Span>& spans = named[name];
      for (const auto& [address, bytes] : ranges) {
        spans.push_back({reinterpret_cast<std::byte*>(address), bytes});
      }
    }
    const int index = device.value_or(-1) >= 0 ? *device : device_api().current_device();
    group()->device().engine(index).register_memory(asked, named);
  });
}

bool Backend::deregister_memory(const std::string& name) {
  const auto group = this->group();
  DeviceEngine* const there = group->device().in_use();
  return there != nullptr && with_torch_errors([&] { return there->deregister_memory(name); });
}

void Backend::eagerConnectSingleDevice(at::Device device) {
  if (!device.is_cuda()) return;
  with_torch_errors([&] { group()->device().engine(device.index()).connect(); });
}

}  // namespace ringcomm
