// Kernels of the probe, words that streams write and wait for, and clocks.
#pragma once

#include <functional>

#include "probe.h"

namespace probe {

constexpr int kThreads = 512;
constexpr size_t kSpun = 65536;  // where kernels' words begin, behind those of streams

struct Operands {
  float4* of[kMost];
};
struct Flags {
  uint32_t* of[kMost];
};

inline __device__ unsigned long long now() {
  unsigned long long time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

static __global__ void fill(float* data, size_t count, float value) {
  const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < count; i += step)
    data[i] = value + static_cast<float>(i % 7);
}

static __global__ void count_wrong(const float* data, size_t count, float base, float factor,
                                   int* wrong) {
  const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < count; i += step)
    if (data[i] != base + factor * static_cast<float>(i % 7)) atomicAdd(wrong, 1);
}

// Every operand becomes the sum of all: 2 * n * bytes of traffic.
template <int kRanks>
__global__ void __launch_bounds__(kThreads)
    sum_to_all(const __grid_constant__ Operands operands, size_t first, size_t last) {
  const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  const size_t mine = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x;
  for (size_t i = first + mine; i < last; i += step) {
    float4 value[kRanks];
#pragma unroll
    for (int r = 0; r < kRanks; ++r) value[r] = __ldcs(operands.of[r] + i);
    float4 sum = value[0];
#pragma unroll
    for (int r = 1; r < kRanks; ++r) {
      sum.x += value[r].x, sum.y += value[r].y, sum.z += value[r].z, sum.w += value[r].w;
    }
#pragma unroll
    for (int r = 0; r < kRanks; ++r) __stcs(operands.of[r] + i, sum);
  }
}

// A barrier in a kernel: one thread a peer writes its word there and spins until its own has come.
static __global__ void spin_barrier(Flags flags, int rank, int size, uint32_t value) {
  const int peer = threadIdx.x;
  if (peer >= size) return;
  const unsigned long long start = now();
  asm volatile("st.release.sys.global.u32 [%0], %1;"
               :
               : "l"(flags.of[peer] + kSpun + rank), "r"(value)
               : "memory");
  uint32_t seen = 0;
  while (static_cast<int>(seen - value) < 0 && now() - start < 2000000000ull) {
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];"
                 : "=r"(seen)
                 : "l"(flags.of[rank] + kSpun + peer)
                 : "memory");
  }
}

static __global__ void compute(unsigned long long nanoseconds) {
  const unsigned long long start = now();
  while (now() - start < nanoseconds) {
  }
}

inline void launch_sum(const Member& member, size_t first, size_t last, int blocks) {
  Operands operands{};
  for (int r = 0; r < member.size; ++r) {
    operands.of[r] = reinterpret_cast<float4*>(member.memory[r]);
  }
  const auto kernel = member.size == 2   ? sum_to_all<2>
                      : member.size == 4 ? sum_to_all<4>
                      : member.size == 8 ? sum_to_all<8>
                                         : sum_to_all<16>;
  kernel<<<blocks, kThreads, 0, member.stream>>>(operands, first, last);
}

inline void write(const Member& member, uint32_t* word, uint32_t value) {
  static auto* const call = driver<decltype(cuStreamWriteValue32)>("cuStreamWriteValue32");
  check(call(member.stream, reinterpret_cast<CUdeviceptr>(word), value, 0), "cuStreamWriteValue32");
}
inline void wait_until(const Member& member, uint32_t* word, uint32_t value) {
  static auto* const call = driver<decltype(cuStreamWaitValue32)>("cuStreamWaitValue32");
  check(call(member.stream, reinterpret_cast<CUdeviceptr>(word), value, CU_STREAM_WAIT_VALUE_GEQ),
        "cuStreamWaitValue32");
}

// All write a word at each other, and wait for theirs. flags[to] + ...: where `to` is written to.
inline void stream_barrier(const Member& member, uint32_t* const* at, uint32_t value) {
  for (int peer = 0; peer < member.size; ++peer) {
    if (peer != member.rank) write(member, at[peer] + (peer * kMost + member.rank) * 32, value);
  }
  for (int peer = 0; peer < member.size; ++peer) {
    if (peer != member.rank) {
      wait_until(member, at[member.rank] + (member.rank * kMost + peer) * 32, value);
    }
  }
}

// The slowest process's microseconds for each of `count`.
inline double microseconds(Member& member, int count, const std::function<void(int)>& enqueue) {
  member.meet();
  const auto start = Clock::now();
  for (int i = 1; i <= count; ++i) enqueue(i);
  check(cudaStreamSynchronize(member.stream), "cudaStreamSynchronize");
  return member.largest(seconds_since(start) * 1e6 / count);
}

// Seconds of each of `count` by events; others wait meanwhile.
inline double in_stream(const Member& member, int count, const std::function<void(int)>& enqueue) {
  cudaEvent_t begin = nullptr, end = nullptr;
  check(cudaEventCreate(&begin), "cudaEventCreate");
  check(cudaEventCreate(&end), "cudaEventCreate");
  enqueue(0);
  check(cudaEventRecord(begin, member.stream), "cudaEventRecord");
  for (int i = 0; i < count; ++i) enqueue(i);
  check(cudaEventRecord(end, member.stream), "cudaEventRecord");
  check(cudaEventSynchronize(end), "cudaEventSynchronize");
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
  check(cudaEventDestroy(begin), "cudaEventDestroy");
  check(cudaEventDestroy(end), "cudaEventDestroy");
  return milliseconds / 1e3 / count;
}

}  // namespace probe
