#include "sim/torch_kernels.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <algorithm>
#include <exception>
#include <optional>
#include <vector>

namespace ringcomm::sim {
namespace {

const c10::Device kDevice(c10::kCUDA, 0);

std::function<void()>& synchronizer() {
  static std::function<void()> function = [] {};
  return function;
}

// The content of a storage of the device: memory of the host.
struct Owner {
  c10::Storage host;
  bool waits;  // for the stream, before the memory is freed: torch's allocator does as much
};

void release(void* context) {
  auto* const owner = static_cast<Owner*>(context);
  try {
    if (owner->waits) synchronizer()();
  } catch (const std::exception&) {  // the device has failed: nothing is under way
  }
  delete owner;
}

c10::DataPtr pointer_to(const c10::Storage& host, bool waits) {
  return {host.data_ptr().get(), new Owner{host, waits}, &release, kDevice};
}

at::Tensor tensor_in(const c10::Storage& storage, c10::DispatchKey key, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage),
                                                       c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(),
                                                    like.storage_offset());
  return made;
}

at::Tensor made_cuda(const at::Tensor& host, bool waits) {
  const c10::Storage storage(c10::Storage::use_byte_size_t(), host.storage().nbytes(),
                             pointer_to(host.storage(), waits));
  return tensor_in(storage, c10::DispatchKey::CUDA, host);
}

// The arguments of one call, as the host has them.
class Loan {
 public:
  c10::IValue lend_all(const c10::IValue& value) {
    if (value.isTensor()) return lend(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(lend(tensor));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
        list.push_back(tensor ? std::optional(lend(*tensor)) : std::nullopt);
      }
      return list;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) {
      makes_ = true;
      return c10::Device(c10::kCPU);
    }
    if (value.isDevice()) stays_ = true;
    return value;
  }

  c10::IValue give_all_back(const c10::IValue& value) {
    if (value.isTensor()) return give_back(value.toTensor());
    if (!value.isTensorList()) return value;
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(give_back(tensor));
    return list;
  }

  // An operation may have given an argument other sizes, and so other memory.
  void update() const {
    for (const auto& [ours, host] : lent_) {
      auto* const storage = ours.storage().unsafeGetStorageImpl();
      if (storage->data_ptr().get() != host.storage().data_ptr().get()) {
        storage->set_data_ptr_noswap(pointer_to(host.storage(), true));
      }
      storage->set_nbytes(host.storage().nbytes());
      if (ours.sizes() == host.sizes() && ours.strides() == host.strides()) continue;
      ours.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(),
                                                        host.storage_offset());
    }
  }

 private:
  at::Tensor lend(const at::Tensor& ours) {
    if (!ours.defined() || !ours.is_cuda()) {
      kept_.push_back(ours);
      return ours;
    }
    lent_.emplace_back(ours, as_host(ours));
    return lent_.back().second;
  }

  at::Tensor give_back(const at::Tensor& result) const {
    if (!result.defined()) return result;
    for (const auto& [ours, host] : lent_) {
      if (host.is_same(result)) return ours;
    }
    for (const at::Tensor& kept : kept_) {
      if (kept.is_same(result)) return kept;
    }
    for (const auto& [ours, host] : lent_) {
      if (!host.is_alias_of(result)) continue;
      return tensor_in(ours.storage(), c10::DispatchKey::CUDA, result);
    }
    const bool on_host = stays_ && !makes_;
    return on_host ? result : made_cuda(result, true);
  }

  std::vector<std::pair<at::Tensor, at::Tensor>> lent_;  // of the device, of the host
  std::vector<at::Tensor> kept_;
  bool makes_ = false, stays_ = false;  // the call names a device: this one, or another
};

void compute_on_host(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  synchronizer()();
  Loan loan;
  const auto arguments = static_cast<std::ptrdiff_t>(operation.schema().arguments().size());
  std::transform(stack->end() - arguments, stack->end(), stack->end() - arguments,
                 [&](const c10::IValue& value) { return loan.lend_all(value); });
  operation.callBoxed(stack);
  loan.update();
  const auto returns = static_cast<std::ptrdiff_t>(operation.schema().returns().size());
  std::transform(stack->end() - returns, stack->end(), stack->end() - returns,
                 [&](const c10::IValue& value) { return loan.give_all_back(value); });
}

void record_nothing(at::Tensor&, c10::Stream) {}

struct Allocator {
  void* (*allocate)(uint64_t bytes);
  void (*release)(void* memory);
};
std::optional<Allocator>& allocator() {
  static std::optional<Allocator> functions;
  return functions;
}

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> layout, std::optional<at::Device> /*this one*/,
                 std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  synchronizer()();
  const auto options =
      at::TensorOptions().dtype(dtype).layout(layout).pinned_memory(pinned).device(at::kCPU);
  if (!allocator()) return made_cuda(at::empty(sizes, options, format), true);
  const auto bytes =
      static_cast<uint64_t>(c10::multiply_integers(sizes)) * options.dtype().itemsize();
  void* const memory = allocator()->allocate(bytes);
  TORCH_CHECK(memory != nullptr, "the simulated device has no memory left");
  return made_cuda(at::from_blob(memory, sizes, allocator()->release, options), true);
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());
}

// torch's own ones look for kernels of CUDA by themselves.
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&compute_on_host>());
  library.impl("record_stream", &record_nothing);
  library.impl("empty.memory_format", &empty);
}

}  // namespace

void use_kernels(std::function<void()> synchronize) { synchronizer() = std::move(synchronize); }

void use_allocator(void* (*allocate)(uint64_t bytes), void (*release)(void* memory)) {
  allocator() = {allocate, release};
}

at::Tensor as_cuda(const at::Tensor& host) { return made_cuda(host, false); }

at::Tensor as_host(const at::Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor;
  const c10::DataPtr& pointer = tensor.storage().data_ptr();
  TORCH_CHECK(pointer.get_deleter() == &release, "this memory is not the simulated device's");
  const auto* const owner = static_cast<const Owner*>(pointer.get_context());
  return tensor_in(owner->host, c10::DispatchKey::CPU, tensor);
}

}  // namespace ringcomm::sim
