// Tensors that a group allocates. On the CPU all ranks of the host can read them, so collectives of
// such tensors copy nothing in and out: DDP, FSDP2 and ringcomm.empty() take theirs from here.
#include "torch/backend.h"
#include "torch/errors.h"

namespace ringcomm {

at::Tensor empty_readable(const std::vector<int64_t>& sizes, const at::TensorOptions& options,
                          uint64_t most) {
  const int64_t count = c10::multiply_integers(sizes);
  Arena& arena = Process::get().neighbours().arena();
  std::byte* const data =
      arena.allocate(static_cast<uint64_t>(count) * options.dtype().itemsize(), most);
  if (data == nullptr) return at::empty(sizes, options);
  const auto give_back = [&arena](void* at) { arena.free(static_cast<std::byte*>(at)); };
  return at::from_blob(data, sizes, give_back, options);
}

at::Tensor Backend::allocateTensor(long size, at::TensorOptions options) {
  const auto& most = options_->config.shared_buffers;
  if (options.device().is_cpu()) return empty_readable({size}, options, most.value_or(UINT64_MAX));
  // torch's allocator knows streams. Others map what is new at their next calls.
  at::Tensor tensor = at::empty({size}, options);
  const auto group = this->group();
  DeviceEngine* const there = group->device().in_use();
  if (there != nullptr && there->device() == tensor.device().index() && tensor.nbytes() > 0) {
    with_torch_errors([&] { there->offer(span_of(tensor)); });
  }
  return tensor;
}

}  // namespace ringcomm
