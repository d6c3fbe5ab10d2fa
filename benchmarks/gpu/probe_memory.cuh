// Memory that one process frees, or dies with, while another has it mapped.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <cstdlib>

#include "probe_bytes.cuh"

extern char** environ;

namespace probe {

constexpr size_t kLent = 1024 * kMiB;  // that rank 1 exports in these tests
constexpr size_t kHeld = 64 * kMiB;    // of other ones

inline cudaError_t try_to_open(const cudaIpcMemHandle_t& handle, void** memory) {
  const auto error = cudaIpcOpenMemHandle(memory, handle, cudaIpcMemLazyEnablePeerAccess);
  cudaGetLastError();
  return error;
}

// Rank 1 allocates `bytes`, and tells all how to map them.
inline float* lend(Member& member, size_t bytes) {
  float* memory = nullptr;
  if (member.rank == 1) {
    check(cudaMalloc(&memory, bytes), "cudaMalloc");
    check(cudaIpcGetMemHandle(&member.shared.spare[1], memory), "cudaIpcGetMemHandle");
  }
  member.meet();
  return memory;
}

inline double free_mib() {
  size_t free = 0, total = 0;
  check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
  return static_cast<double>(free) / kMiB;
}

// When is memory free again that its owner frees and a peer has mapped?
inline void returned_memory(Member& member) {
  float* const memory = lend(member, kLent);
  void* mapped = nullptr;
  if (member.leads()) check(try_to_open(member.shared.spare[1], &mapped), "cudaIpcOpenMemHandle");
  const double before = free_mib();
  member.meet();
  if (member.rank == 1) check(cudaFree(memory), "cudaFree");
  member.meet();
  const double freed = free_mib() - before;
  member.meet();
  if (member.leads()) check(cudaIpcCloseMemHandle(mapped), "cudaIpcCloseMemHandle");
  const double closed = free_mib() - before;
  member.info("of 1024 MiB that are mapped, free once the owner frees", freed, "MiB");
  member.info("the same once the peer closes its mapping, too", closed, "MiB");
  member.meet();
}

// Freed, and allocated anew at the same address: does a second mapping open beside the first?
inline void reopened_memory(Member& member) {
  float* memory = lend(member, kLent);
  void *first = nullptr, *second = nullptr;
  if (member.leads()) check(try_to_open(member.shared.spare[1], &first), "cudaIpcOpenMemHandle");
  member.meet();
  const float* const before = memory;
  if (member.rank == 1) check(cudaFree(memory), "cudaFree");
  memory = lend(member, kLent);
  if (member.rank == 1) member.shared.answered.store(memory == before ? 1 : 0);
  member.meet();
  if (member.leads()) {
    const std::string where = member.shared.answered.load() != 0 ? "the same address" : "elsewhere";
    auto error = try_to_open(member.shared.spare[1], &second);
    member.info("memory allocated anew opens while the freed one is mapped", error == cudaSuccess,
                "", where + ": " + cudaGetErrorString(error));
    check(cudaIpcCloseMemHandle(first), "cudaIpcCloseMemHandle");
    if (error != cudaSuccess) error = try_to_open(member.shared.spare[1], &second);
    const bool good = error == cudaSuccess;
    member.row(good ? "pass" : "fail", "it opens once the freed one is closed", good, "", "",
               cudaGetErrorString(error));
    if (good) check(cudaIpcCloseMemHandle(second), "cudaIpcCloseMemHandle");
  }
  member.meet();
  if (member.rank == 1) check(cudaFree(memory), "cudaFree");
}

// ---- ids: by these ringcomm knows that memory at an address is not what it was

inline unsigned long long id_of(CUdeviceptr at) {
  static const auto attribute = driver<decltype(cuPointerGetAttribute)>("cuPointerGetAttribute");
  unsigned long long id = 0;
  check(attribute(&id, CU_POINTER_ATTRIBUTE_BUFFER_ID, at), "cuPointerGetAttribute");
  return id;
}

// Everything that cudaMalloc gives must have an id of its own.
inline void ids_of_memory(Member& member) {
  if (!member.leads()) return;
  const auto allocate = [] {
    void* memory = nullptr;
    check(cudaMalloc(&memory, kHeld), "cudaMalloc");
    return memory;
  };
  void* const first = allocate();
  const auto before = id_of(reinterpret_cast<CUdeviceptr>(first));
  check(cudaFree(first), "cudaFree");
  void* const second = allocate();
  const auto after = id_of(reinterpret_cast<CUdeviceptr>(second));
  check(cudaFree(second), "cudaFree");
  member.row(before != after ? "pass" : "fail", "memory that is allocated anew has another id",
             before != after, "", "", first == second ? "at the same address" : "elsewhere");
}

// CUDA does not say which id chunks have that are mapped one after the other at an address.
// Where they have one id, ringcomm copies from such memory.
inline void ids_of_mapped_memory(Member& member) {
  if (!member.leads()) return;
  CUmemAllocationProp kind{};
  kind.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  kind.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  const auto reserve = driver<decltype(cuMemAddressReserve)>("cuMemAddressReserve");
  const auto create = driver<decltype(cuMemCreate)>("cuMemCreate");
  const auto map = driver<decltype(cuMemMap)>("cuMemMap");
  const auto unmap = driver<decltype(cuMemUnmap)>("cuMemUnmap");
  const auto release = driver<decltype(cuMemRelease)>("cuMemRelease");
  const auto give_back = driver<decltype(cuMemAddressFree)>("cuMemAddressFree");
  CUdeviceptr base = 0;
  check(reserve(&base, kHeld, 0, 0, 0), "cuMemAddressReserve");
  const auto id_of_another = [&] {
    CUmemGenericAllocationHandle chunk = 0;
    check(create(&chunk, kHeld, &kind, 0), "cuMemCreate");
    check(map(base, kHeld, 0, chunk, 0), "cuMemMap");
    const auto id = id_of(base);
    check(unmap(base, kHeld), "cuMemUnmap");
    check(release(chunk), "cuMemRelease");
    return id;
  };
  const auto before = id_of_another(), after = id_of_another();
  check(give_back(base, kHeld), "cuMemAddressFree");
  member.info("memory that is mapped anew at an address has another id", before != after, "");
}

// ---- a death: both sides are processes of their own, so that no context of ours is lost

constexpr unsigned kLifetime = 15;  // seconds, of these processes

static __global__ void read_on(const float* data, size_t count, unsigned long long nanoseconds,
                               float* sink) {
  const unsigned long long start = now();
  float sum = 0;
  for (size_t i = threadIdx.x; now() - start < nanoseconds; i = (i + blockDim.x) % count) {
    sum += __ldcg(data + i);
  }
  if (sum < 0) *sink = sum;
}

// `gpu_probe --exporter`: exports memory by its standard output, and waits for its end.
inline int export_until_killed() {
  float* memory = nullptr;
  cudaIpcMemHandle_t handle;
  check(cudaMalloc(&memory, kHeld), "cudaMalloc");
  fill<<<264, kThreads>>>(memory, kHeld / 4, 5);
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  check(cudaIpcGetMemHandle(&handle, memory), "cudaIpcGetMemHandle");
  if (::write(STDOUT_FILENO, &handle, sizeof handle) != sizeof handle) return 1;
  pause();
  return 0;
}

// `gpu_probe --reader`: maps what its standard input names, says "r" while a kernel reads it, and
// then what became of it.
inline int read_what_is_exported() {
  cudaIpcMemHandle_t handle;
  if (::read(STDIN_FILENO, &handle, sizeof handle) != sizeof handle) return 1;
  void* memory = nullptr;
  check(try_to_open(handle, &memory), "cudaIpcOpenMemHandle");
  auto* const data = static_cast<float*>(memory);
  read_on<<<132, 1024>>>(data, kHeld / 4, 500000000, data);
  usleep(100000);
  if (::write(STDOUT_FILENO, "r", 1) != 1) return 1;
  check(cudaDeviceSynchronize(), "the kernel");
  float value = 0;
  check(cudaMemcpy(&value, memory, sizeof value, cudaMemcpyDefault), "a copy afterwards");
  check(cudaIpcCloseMemHandle(memory), "cudaIpcCloseMemHandle");
  float* more = nullptr;
  check(cudaMalloc(&more, kMiB), "cudaMalloc afterwards");
  std::printf(value == 5 ? "it is still there" : "something else is there");
  return 0;
}

// Runs either of them, by the program's argument. Standard output tells failures.
inline int serve_a_death(const std::string& role) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  alarm(kLifetime);
  try {
    return role == "--exporter" ? export_until_killed() : read_what_is_exported();
  } catch (const std::exception& error) {
    std::printf("%s", error.what());
    return 1;
  }
}

inline pid_t start_role(const char* role, int input, int output) {
  char program[] = "gpu_probe";
  std::string name = role;
  char* const arguments[] = {program, name.data(), nullptr};
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, input, STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, output, STDOUT_FILENO);
  pid_t child = -1;
  const int error = posix_spawn(&child, "/proc/self/exe", &actions, nullptr, arguments, environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) throw std::runtime_error("posix_spawn");
  return child;
}

// A process is killed while a kernel of another one reads its memory. Does that one live on?
inline void dead_exporter(Member& member) {
  if (!member.leads() || member.size > 2) return;  // once is enough
  int handle[2], answer[2];
  if (pipe2(handle, O_CLOEXEC) != 0 || pipe2(answer, O_CLOEXEC) != 0) {
    throw std::runtime_error("pipe2");
  }
  const pid_t exporter = start_role("--exporter", STDIN_FILENO, handle[1]);
  const pid_t reader = start_role("--reader", handle[0], answer[1]);
  for (const int end : {handle[0], handle[1], answer[1]}) close(end);
  std::string said;
  char buffer[256];
  bool killed = false;
  for (ssize_t count; (count = ::read(answer[0], buffer, sizeof buffer)) > 0;) {
    said.append(buffer, static_cast<size_t>(count));
    if (!killed) kill(exporter, SIGKILL);
    killed = true;
  }
  close(answer[0]);
  kill(exporter, SIGKILL);  // still ours: it is not reaped
  int status = 0;
  waitpid(exporter, nullptr, 0);
  waitpid(reader, &status, 0);
  const bool lives = WIFEXITED(status) && WEXITSTATUS(status) == 0;
  if (said.rfind('r', 0) == 0 && said.size() > 1) said.erase(0, 1);
  member.info("a process whose kernel reads the memory of one that is killed lives on",
              lives ? 1 : 0, "", said.empty() ? "it says nothing" : said);
}

// The last test, because it may end the context.
inline void free_what_is_mapped(Member& member) {
  float* const memory = lend(member, kHeld);
  if (member.rank == 1) {
    fill<<<264, kThreads, 0, member.stream>>>(memory, kHeld / 4, 5);
    check(cudaStreamSynchronize(member.stream), "cudaStreamSynchronize");
  }
  member.meet();
  void* seen = nullptr;
  if (member.leads()) check(try_to_open(member.shared.spare[1], &seen), "cudaIpcOpenMemHandle");
  member.meet();
  if (member.rank == 1) check(cudaFree(memory), "cudaFree");
  member.meet();
  if (!member.leads()) return;
  float value[4] = {};
  const auto error = cudaMemcpy(value, seen, sizeof value, cudaMemcpyDefault);
  std::string note = "it is still there";
  if (error != cudaSuccess) note = cudaGetErrorString(error);
  if (error == cudaSuccess && value[0] != 5) note = "something else is there";
  cudaGetLastError();
  member.info("memory that its owner has freed while another has it mapped", kNone, "", note);
}

}  // namespace probe
