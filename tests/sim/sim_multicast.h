// Memory of several simulated devices that one address reaches at once, as NVLink's switches do it.
#pragma once

#include <memory>
#include <vector>

#include "device/api.h"

namespace ringcomm::sim {

// Kernels that access [all, all + bytes) access all of the replicas.
void add_replicas(const std::byte* all, uint64_t bytes, std::vector<std::byte*> replicas);
void remove_replicas(const std::byte* all);
std::vector<std::byte*> replicas_of(const std::byte* at);

std::unique_ptr<cuda::Multicast> make_multicast(uint64_t bytes, int devices);
std::unique_ptr<cuda::Multicast> join_multicast(const Fd& descriptor, uint64_t bytes);

}  // namespace ringcomm::sim
