// Kernels for tensors of the simulated device: the host computes, in the order of the stream.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace ringcomm::sim {

// Before anything is computed, the host waits for the current stream by `synchronize`: as with
// CUDA_LAUNCH_BLOCKING=1. Work in other streams goes on beside it.
void use_kernels(std::function<void()> synchronize);
// From now on torch.empty() takes memory that other processes can map, by these functions.
void use_allocator(void* (*allocate)(uint64_t bytes), void (*release)(void* memory));

// A tensor of the device whose memory is that of a tensor of the CPU, which lives as long.
at::Tensor as_cuda(const at::Tensor& host);

// Every tensor of the CPU that comes here stays one; one of the device becomes a view by the CPU.
at::Tensor as_host(const at::Tensor& tensor);

}  // namespace ringcomm::sim
