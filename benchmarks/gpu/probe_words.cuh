// Words that streams write and wait for: in the default stream, in graphs, of 64 bits, and how long
// a kernel takes to read them.
#pragma once

#include <thread>

#include "probe_bytes.cuh"

namespace probe {

// While it lives, a member's work goes into another stream.
class Within {
 public:
  Within(Member& member, cudaStream_t stream) : member_(member), before_(member.stream) {
    member.stream = stream;
  }
  ~Within() { member_.stream = before_; }
  Within(const Within&) = delete;
  Within& operator=(const Within&) = delete;

 private:
  Member& member_;
  cudaStream_t before_;
};

constexpr size_t kScratch = kWords - 512;  // words for one test: they are 0 when it begins

// Most programs never leave the default stream.
inline void words_in_the_default_stream(Member& member) {
  member.need(member.words, "memory of the host");
  if (!member.leads()) return;
  const Within default_stream(member, nullptr);
  write(member, member.words + kScratch, 7);
  wait_until(member, member.words + kScratch, 7);
  write(member, member.words + kScratch + 1, 8);
  check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
  const uint32_t seen = __atomic_load_n(member.shared.words + kScratch + 1, __ATOMIC_ACQUIRE);
  member.row(seen == 8 ? "pass" : "fail", "words in the default stream", seen == 8, "");
}

// A graph runs again and again, so its words hold constants: set, awaited, and cleared.
inline void words_in_a_graph(Member& member) {
  member.need(member.words, "memory of the host");
  if (!member.leads()) return;
  const auto batch = driver<decltype(cuStreamBatchMemOp)>("cuStreamBatchMemOp");
  CUstreamBatchMemOpParams operations[3] = {};
  const uint32_t values[] = {1, 1, 0};
  for (int i = 0; i < 3; ++i) {
    auto& write = operations[i].writeValue;
    write.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
    write.address = reinterpret_cast<CUdeviceptr>(member.words + kScratch);
    write.value = values[i];
  }
  operations[1].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
  operations[1].waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  check(cudaStreamBeginCapture(member.stream, cudaStreamCaptureModeGlobal), "BeginCapture");
  const CUresult taken = batch(member.stream, 3, operations, 0);
  compute<<<1, 32, 0, member.stream>>>(0);
  check(cudaStreamEndCapture(member.stream, &graph), "cudaStreamEndCapture");
  check(taken, "cuStreamBatchMemOp in a capture");
  check(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
  const auto replay = [&](int) {
    check(cudaGraphLaunch(executable, member.stream), "cudaGraphLaunch");
  };
  const double seconds = in_stream(member, 200, replay);
  member.row("pass", "a graph of three words and a kernel, a replay", seconds * 1e6, "µs");
  check(cudaGraphExecDestroy(executable), "cudaGraphExecDestroy");
  check(cudaGraphDestroy(graph), "cudaGraphDestroy");
}

// Libraries ask whether a stream is being captured. While another thread captures, may they?
inline void asking_beside_a_capture(Member& member) {
  if (!member.leads()) return;
  cudaStream_t beside = nullptr;
  cudaGraph_t graph = nullptr;
  check(cudaStreamCreateWithFlags(&beside, cudaStreamNonBlocking), "cudaStreamCreate");
  check(cudaStreamBeginCapture(member.stream, cudaStreamCaptureModeGlobal), "BeginCapture");
  cudaError_t of_default = cudaSuccess, of_other = cudaSuccess;
  std::thread([&] {
    auto status = cudaStreamCaptureStatusNone;
    of_default = cudaStreamIsCapturing(nullptr, &status);
    of_other = cudaStreamIsCapturing(beside, &status);
    cudaGetLastError();
  }).join();
  const cudaError_t ended = cudaStreamEndCapture(member.stream, &graph);
  cudaGetLastError();
  const auto said = [&](const char* what, cudaError_t error) {
    member.info(what, error == cudaSuccess ? 1 : 0, "", cudaGetErrorString(error));
  };
  said("beside a capture: is the default stream captured?", of_default);
  said("beside a capture: is another stream captured?", of_other);
  said("and the capture itself", ended);
  if (graph != nullptr) check(cudaGraphDestroy(graph), "cudaGraphDestroy");
  check(cudaStreamDestroy(beside), "cudaStreamDestroy");
}

constexpr unsigned long long kWide = 0xfedcba9876543210ull;  // as an address has

inline CUresult write_wide(const Member& member, const void* at) {
  const auto write64 = driver<decltype(cuStreamWriteValue64)>("cuStreamWriteValue64");
  return write64(member.stream, reinterpret_cast<CUdeviceptr>(at), kWide, 0);
}

inline bool is_wide(const void* at) {
  unsigned long long seen = 0;
  check(cudaMemcpy(&seen, at, sizeof seen, cudaMemcpyDefault), "cudaMemcpy");
  return seen == kWide;
}

// Into a process's own memory of the device, where slots lie: others' kernels read them there.
inline void words_of_64_bits(Member& member) {
  member.need(member.flags[0], "others' memory");
  uint32_t* const word = member.flags[1] + 2 * kSpun;
  if (member.rank == 1) {
    check(write_wide(member, word), "cuStreamWriteValue64");
    check(cudaStreamSynchronize(member.stream), "cudaStreamSynchronize");
  }
  member.meet();
  if (!member.leads()) return;
  const bool same = is_wide(word);
  member.row(same ? "pass" : "fail", "64 bits that another process reads", same, "");
}

// Nothing rests on these: since CUDA 13.1 a stream may not write to another device.
inline void words_of_another_device(Member& member) {
  member.need(member.flags[0], "others' memory");
  if (!member.leads()) return;
  const auto tell = [&](const char* what, void* at) {
    const CUresult error = write_wide(member, at);
    check(cudaStreamSynchronize(member.stream), "cudaStreamSynchronize");
    const bool good = error == CUDA_SUCCESS && is_wide(at);
    member.info(what, good, "", good ? "" : "driver error " + std::to_string(error));
  };
  tell("a stream writes to another process's memory", member.flags[1] + 2 * kSpun + 2);
  int devices = 0;
  check(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
  int reaches = 0;
  if (devices > 1) check(cudaDeviceCanAccessPeer(&reaches, 0, 1), "cudaDeviceCanAccessPeer");
  if (reaches == 0) return member.info("a stream writes to another device", kNone, "", "none here");
  void* there = nullptr;
  check(cudaDeviceEnablePeerAccess(1, 0), "cudaDeviceEnablePeerAccess");
  check(cudaSetDevice(1), "cudaSetDevice");
  check(cudaMalloc(&there, kMiB), "cudaMalloc");
  check(cudaSetDevice(0), "cudaSetDevice");
  tell("a stream writes to another device", there);
  check(cudaFree(there), "cudaFree");
}

// The first step of a leader's kernel: each block loads three numbers of every rank's slot.
static __global__ void load_slots(const unsigned long long* slots, int ranks,
                                  unsigned long long* sink) {
  constexpr int kApart = 32;  // numbers from one rank's slot to the next
  unsigned long long sum = 0;
  if (threadIdx.x < ranks) {
    const unsigned long long* const mine = slots + threadIdx.x * kApart;
    sum = mine[0] + mine[1] + mine[2];
  } else if (threadIdx.x == 32) {
    unsigned int abort;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(abort) : "l"(slots + 3) : "memory");
    sum = abort;
  }
  if (__syncthreads_or(sum == ~0ull) != 0) *sink = sum;  // so that the loads are needed
}

inline void slots_of_a_kernel(Member& member) {
  member.need(member.words, "memory of the host");
  member.need(member.flags[0], "others' memory");
  if (!member.leads()) return;
  auto* const sink = reinterpret_cast<unsigned long long*>(member.flags[0] + 3 * kSpun);
  const auto microseconds_of = [&](const uint32_t* words) {
    const auto* const slots = reinterpret_cast<const unsigned long long*>(words);
    return 1e6 * in_stream(member, 300, [&](int) {
             load_slots<<<396, 256, 0, member.stream>>>(slots, member.size, sink);
           });
  };
  member.info("396 blocks load slots of the host's memory", microseconds_of(member.words), "µs");
  member.info("the same of the device's memory", microseconds_of(member.flags[0] + 2 * kSpun),
              "µs");
}

}  // namespace probe
