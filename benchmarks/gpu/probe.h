// Processes that share one GPU, and a way to compare notes: memory of the host that all of
// them see, a barrier with a deadline, and rows of a table, one a line with tabs between:
//   verdict, what, figure, unit, target, note
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

namespace probe {

using Clock = std::chrono::steady_clock;

constexpr int kMost = 16;                 // processes
constexpr size_t kWords = 16 * 1024;      // that streams write and wait for
constexpr uint32_t kBeyond = 0x3fffffff;  // more than any stream waits for
constexpr double kPatience = 20;          // seconds, for another process
constexpr double kNone = std::numeric_limits<double>::quiet_NaN();  // of a row without a figure

inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

struct Shared {
  alignas(4096) uint32_t words[kWords];  // registered with the device
  std::atomic<int> arrived, generation, failed, answered;
  std::atomic<const char*> step;      // what rank 0 is at; processes are forked, so literals agree
  std::atomic<int> finished[64], go;  // after each test
  cudaIpcMemHandle_t memory[kMost], flags[kMost], spare[kMost];
  cudaIpcEventHandle_t event[kMost];
  double figure[kMost];
};

// A memfd, as ringcomm's processes share.
inline Shared* make_shared() {
  const int file = memfd_create("gpu_probe", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, sizeof(Shared)) != 0) return nullptr;
  void* const memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  return memory == MAP_FAILED ? nullptr : new (memory) Shared{};
}

inline void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  cudaGetLastError();
  throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(error));
}
inline void check(CUresult error, const char* call) {
  if (error == CUDA_SUCCESS) return;
  throw std::runtime_error(std::string(call) + ": driver error " + std::to_string(error));
}

template <typename Function>
Function* driver(const char* name) {
  void* entry_point = nullptr;
  cudaDriverEntryPointQueryResult status{};
  check(cudaGetDriverEntryPointByVersion(name, &entry_point, 12000, cudaEnableDefault, &status),
        name);
  if (entry_point == nullptr) throw std::runtime_error(std::string("this driver has no ") + name);
  return reinterpret_cast<Function*>(entry_point);
}

template <typename T>
T* open(const cudaIpcMemHandle_t& handle) {
  void* memory = nullptr;
  check(cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess),
        "cudaIpcOpenMemHandle");
  return static_cast<T*>(memory);
}

// One process of `size`.
class Member {
 public:
  Member(Shared& shared, int rank, int size) : rank(rank), size(size), shared(shared) {}

  const int rank, size;
  Shared& shared;
  cudaStream_t stream = nullptr;
  float* memory[kMost] = {};    // of each process, as seen here
  uint32_t* flags[kMost] = {};  // of each process: words of the device
  uint32_t* words = nullptr;    // shared.words, as the device sees them; null: not registered
  double ceiling = 0;           // bytes a second that a copy reads and writes; rank 0 has it

  bool leads() const { return rank == 0; }

  // Waits for all. Throws when one of them has failed, or does not come.
  void meet() {
    const int generation = shared.generation.load();
    if (shared.arrived.fetch_add(1) == size - 1) {
      shared.arrived.store(0);
      shared.generation.store(generation + 1);
    }
    const auto start = Clock::now();
    while (shared.generation.load() == generation) {
      if (shared.failed.load() != 0) throw std::runtime_error("another process has failed");
      if (seconds_since(start) > kPatience) throw std::runtime_error("another process is late");
      seconds_since(start) < 0.05 ? sched_yield() : usleep(20);
    }
  }

  // The largest of all processes' figures.
  double largest(double figure) {
    shared.figure[rank] = figure;
    meet();
    const double most = *std::max_element(shared.figure, shared.figure + size);
    meet();
    return most;
  }

  // An earlier test has found it.
  static void need(const void* function, const char* what) {
    if (function == nullptr) throw std::runtime_error(std::string("this needs ") + what);
  }

  // Ends the waits of all streams.
  void release() { std::fill_n(shared.words, kWords, kBeyond); }

  // Runs a test on all processes. A failure here is a row, and the next test begins with all.
  template <typename Test>
  void run(int number, const char* name, Test test) {
    if (leads()) shared.step.store(name);
    try {
      meet();
      test(*this);
      check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    } catch (const std::exception& error) {
      if (shared.failed.exchange(1) == 0) row("fail", name, kNone, "", "", error.what(), true);
      release();
    }
    shared.finished[number].fetch_add(1);
    const auto start = Clock::now();
    while (shared.finished[number].load() < size || (!leads() && shared.go.load() <= number)) {
      if (seconds_since(start) > 2 * kPatience) _exit(4);
      usleep(20);
    }
    if (!leads()) return;
    std::fill_n(shared.words, kWords, 0u);
    shared.arrived.store(0);
    shared.failed.store(0);
    shared.go.store(number + 1);
  }

  // A row, of rank 0's: others' are dropped unless `any`.
  void row(const char* verdict, const std::string& what, double figure, const char* unit,
           const std::string& target = "", const std::string& note = "", bool any = false) {
    if (!leads() && !any) return;
    std::string line = std::string(verdict) + "\t" + std::to_string(size) + " processes: " + what;
    char number[32] = "";
    if (!std::isnan(figure)) std::snprintf(number, sizeof number, "%.4g", figure);
    line += std::string("\t") + number + "\t" + unit + "\t" + target + "\t" + note + "\n";
    std::fputs(line.c_str(), stdout);
    std::fflush(stdout);
  }
  void info(const std::string& what, double figure, const char* unit,
            const std::string& note = "") {
    row("info", what, figure, unit, "", note);
  }
  void at_most(double bound, const std::string& what, double figure, const char* unit) {
    row(figure <= bound ? "pass" : "fail", what, figure, unit, "≤ " + whole(bound));
  }
  void at_least(double bound, const std::string& what, double figure, const char* unit,
                const std::string& note) {
    row(figure >= bound ? "pass" : "fail", what, figure, unit, "≥ " + whole(bound), note);
  }

 private:
  static std::string whole(double number) { return std::to_string(static_cast<int>(number)); }
};

}  // namespace probe
