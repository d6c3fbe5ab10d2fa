// Properties and faults of a simulated device: variables whose names are RINGCOMM_SIM_ and
//
// clang-format off
// DEVICES       1      how many devices there are
// NVLINK        1      0: PCIe is between them
// MULTIPROCESSORS 132   of each
// NODE          -1     NUMA node beside it
// ROTATE        0      device i is card (i + this) mod n, as CUDA_VISIBLE_DEVICES does
// MEMORY_BYTES  8 GiB  of each device
// DRIVER        13000  CUDA version of the driver; none: there is no driver
// CHUNK_BYTES   0      tensors' allocations are expandable, made of chunks of so many bytes
// SEGMENT_BYTES 2 MiB  tensors' allocations have so many bytes, or more where a tensor has
// SAME_IDS      0      1: a chunk that takes another's place also takes its id
// COMMANDS      1000   a connection takes so many that have not begun, then enqueuing blocks; how
//                      many connections streams share says CUDA_DEVICE_MAX_CONNECTIONS
// SLICES               a folder for locks: kernels of one process at a time use a card, by time
//                      slices; without it, they run side by side, as under MPS
// STAND_INS     1      tensors of the CPU count as those of a device; 0: they stay on the host, and
//                      torch has tensors of this device (torch_cuda.cc)
// RANK                 what stands below concerns only the process whose RANK is this
// IPC           works  fails: no handle can be opened; lies: other memory is mapped than was
//                      exported
// IPC_OPENS     -1     so many handles can be opened, then no more; -1: any number
// CHUNK_EXPORTS 1      0: chunks cannot be exported, though they were made for it
// MEMOPS        1      0: streams cannot write words, nor wait for them
// CAPTURE_FAILS 0      so many questions whether a stream is captured fail
// REGISTER      1      0: memory of the host cannot be registered
// SLOW_US       0      each operation of a stream, or node of a replay, begins so much later
// RANDOM_US     0      and by up to so much more, at random
// SEED          1      of that chance
// DIES_AT       0      the process kills itself at its k-th operation of a stream, or node of a
//                      replay
// clang-format on
#pragma once

#include <cstdint>
#include <string>

namespace ringcomm::sim {

enum class Ipc { kWorks, kFails, kLies };

struct SimOptions {
  int devices = 1;
  bool nvlink = true;
  int multiprocessors = 132;
  int node = -1;
  int rotate = 0;
  uint64_t memory_bytes = uint64_t{8} << 30;
  int driver = 13000;  // 0: none
  uint64_t chunk_bytes = 0;
  uint64_t segment_bytes = uint64_t{2} << 20;
  bool same_ids = false;
  uint64_t commands = 1000;
  uint64_t connections = 8;
  std::string slices;
  bool stand_ins = true;

  Ipc ipc = Ipc::kWorks;
  int64_t ipc_opens = -1;
  bool chunk_exports = true;
  bool memory_operations = true;
  int64_t capture_fails = 0;
  bool register_host = true;
  uint64_t slow_us = 0;
  uint64_t random_us = 0;
  uint64_t seed = 1;
  uint64_t dies_at = 0;

  // Throws UsageError for an unknown RINGCOMM_SIM_ variable or a value that cannot be understood.
  static SimOptions from_environment();
};

}  // namespace ringcomm::sim
