// The common part of the files of kernels: the Context of a device, and the launch. It is included
// in an unnamed namespace inside ringcomm::cuda.

#include "cuda/codecs.inc.h"
#include "cuda/convert.inc.h"
#include "cuda/kernels.inc.h"

struct Context {
  __device__ static int block() { return static_cast<int>(blockIdx.x); }
  __device__ static int blocks() { return static_cast<int>(gridDim.x); }
  __device__ static int part() { return static_cast<int>(blockIdx.y); }
  __device__ static int threads() { return static_cast<int>(blockDim.x); }
  __device__ static Operands& operands() {
    __shared__ Operands shared;
    return shared;
  }
  __device__ static void for_each_thread(const auto& f) { f(static_cast<int>(threadIdx.x)); }
  __device__ static bool all(const auto& f) {
    return __syncthreads_and(f(static_cast<int>(threadIdx.x))) != 0;
  }
  __device__ static void sync() { __syncthreads(); }
  __device__ static void pause() {}
  __device__ static uint64_t nanoseconds() {
    uint64_t time;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
    return time;
  }

  template <class T>
  __device__ static T load(const std::byte* at) {
    return *reinterpret_cast<const T*>(at);
  }
  template <class T>
  __device__ static void store(std::byte* at, const T& value) {
    *reinterpret_cast<T*>(at) = value;
  }
  __device__ static void store_release(uint32_t* flag, uint32_t value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
  }
  __device__ static void store_lines(std::byte* at, const Lines& lines) {
    const auto& [a, b, c, d] = lines.line;
    asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(at), "l"(a), "l"(b) : "memory");
    asm volatile("st.volatile.global.v2.u64 [%0], {%1, %2};" ::"l"(at + 16), "l"(c), "l"(d)
                 : "memory");
  }
  __device__ static Lines load_lines(const std::byte* at) {
    uint64_t a, b, c, d;
    asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(a), "=l"(b)
                 : "l"(at)
                 : "memory");
    asm volatile("ld.volatile.global.v2.u64 {%0, %1}, [%2];"
                 : "=l"(c), "=l"(d)
                 : "l"(at + 16)
                 : "memory");
    return {{a, b, c, d}};
  }
  __device__ static uint32_t load_acquire(const uint32_t* flag) {
    uint32_t value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
    return value;
  }
};

// 16 bytes at once, of data that passes through only once. Never ld.global.nc: a peer may have
// written it while this kernel ran.
template <>
__device__ inline Wide Context::load(const std::byte* at) {
  uint32_t a, b, c, d;
  asm volatile("ld.global.cs.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(a), "=r"(b), "=r"(c), "=r"(d)
               : "l"(at)
               : "memory");
  return {a, b, c, d};
}
template <>
__device__ inline void Context::store(std::byte* at, const Wide& value) {
  const auto& [a, b, c, d] = value.words;
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(at), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

inline void check(const char* call, cudaError_t status) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // it is told once
  throw DeviceError(str(call, ": ", cudaGetErrorString(status)));
}

struct Grid {
  int blocks, threads;
  int parts = 1;
};

void launch(Stream stream, auto kernel, Grid grid, const auto& args, const Reduction& what) {
  const uint64_t element_bytes = size_of(what.dtype);
  const void* arguments[] = {&args, &element_bytes};
  check("cudaLaunchKernel",
        cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(grid.blocks, grid.parts),
                         dim3(grid.threads), const_cast<void**>(arguments), 0,
                         static_cast<cudaStream_t>(stream)));
}

void load_kernel(auto kernel) {
  if (kernel == nullptr) return;
  cudaFuncAttributes attributes;
  check("cudaFuncGetAttributes",
        cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)));
}
