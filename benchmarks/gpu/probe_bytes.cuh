// Bandwidth: copies, and sums over all processes' memory by one kernel or by one a process.
#pragma once

#include "probe_kernels.cuh"

namespace probe {

constexpr size_t kMiB = 1 << 20;
constexpr size_t kBytes = 256 * kMiB;                  // of memory that each process exports
constexpr double kKernelShare = 85, kWholeShare = 80;  // percent of a copy, at least
constexpr size_t kJudged = 64 * kMiB;                  // from here on

inline void copy_ceiling(Member& member) {
  member.need(member.memory[0], "others' memory");
  if (member.leads()) {
    float* other = nullptr;
    check(cudaMalloc(&other, kBytes), "cudaMalloc");
    for (int attempt = 0; attempt < 3; ++attempt) {
      const double seconds = in_stream(member, 20, [&](int i) {
        float* const to = i % 2 == 0 ? other : member.memory[0];
        float* const from = i % 2 == 0 ? member.memory[0] : other;
        check(cudaMemcpyAsync(to, from, kBytes, cudaMemcpyDefault, member.stream), "copy");
      });
      member.ceiling = std::max(member.ceiling, 2.0 * kBytes / seconds);
    }
    check(cudaFree(other), "cudaFree");
    member.info("copy ceiling", member.ceiling / 1e9, "GB/s", "read and written");
  }
  member.meet();
  // Copies of what another process exported, while nobody and while rank 0 computes.
  const auto pull = [&](int) {
    check(cudaMemcpyAsync(member.memory[member.rank], member.memory[0], 64 * kMiB,
                          cudaMemcpyDefault, member.stream),
          "cudaMemcpyAsync");
  };
  for (const bool busy : {false, true}) {
    if (busy && member.leads()) compute<<<132 * 16, 128, 0, member.stream>>>(20000000);
    member.meet();
    const double seconds = member.rank == 1 ? in_stream(member, 5, pull) : 0;
    const double took = member.largest(seconds * 1e6);
    check(cudaStreamSynchronize(member.stream), "cudaStreamSynchronize");
    member.info(busy ? "the same while another process computes" : "copy of 64 MiB by IPC", took,
                "µs");
  }
}

inline void fill_mine(Member& member, size_t bytes) {
  member.meet();  // earlier measurements are over
  fill<<<264, kThreads, 0, member.stream>>>(member.memory[member.rank], bytes / 4,
                                            static_cast<float>(member.rank + 1));
  check(cudaStreamSynchronize(member.stream), "cudaStreamSynchronize");
  member.meet();
}

// Are all elements the sum over all processes?
inline void check_mine(Member& member, size_t bytes) {
  int* wrong = nullptr;
  int wrong_count = -1;
  check(cudaMallocAsync(&wrong, sizeof(int), member.stream), "cudaMallocAsync");
  check(cudaMemsetAsync(wrong, 0, sizeof(int), member.stream), "cudaMemsetAsync");
  const auto n = static_cast<float>(member.size);
  count_wrong<<<264, kThreads, 0, member.stream>>>(member.memory[member.rank], bytes / 4,
                                                   n * (n + 1) / 2, n, wrong);
  check(cudaMemcpyAsync(&wrong_count, wrong, sizeof(int), cudaMemcpyDefault, member.stream),
        "copy");
  check(cudaFreeAsync(wrong, member.stream), "cudaFreeAsync");
  check(cudaStreamSynchronize(member.stream), "cudaStreamSynchronize");
  if (wrong_count != 0)
    throw std::runtime_error(std::to_string(wrong_count) + " elements of a sum are wrong");
}

inline void judge_share(Member& member, const std::string& what, size_t bytes, double seconds,
                        double target) {
  if (!member.leads()) return;
  const double rate = 2.0 * member.size * static_cast<double>(bytes) / seconds;
  const double percent = 100 * rate / member.ceiling;
  char note[96];
  std::snprintf(note, sizeof note, "%.1f µs, %.0f GB/s", seconds * 1e6, rate / 1e9);
  if (target == kKernelShare && bytes >= kJudged && member.size <= 8) {
    member.at_least(target, what, percent, "% of copy", note);
  } else if (target > 0 && bytes >= kJudged) {  // hand-overs between processes may take longer
    member.row("info", what, percent, "% of copy", "≥ 80", note);
  } else {
    member.info(what, percent, "% of copy", note);
  }
}

// One kernel for all, alone; then as an operation, with the waiting; then each process its slice.
inline void sums(Member& member) {
  member.need(member.words, "memory of the host");
  member.need(member.memory[0], "others' memory");
  uint32_t* host[kMost];
  std::fill_n(host, kMost, member.words);
  uint32_t sequence = 0;
  for (const size_t bytes : {1 * kMiB, 16 * kMiB, kJudged, kBytes}) {
    if (member.size > 8 && bytes > kJudged) continue;
    const std::string size = std::to_string(bytes / kMiB) + " MiB";
    const size_t units = bytes / sizeof(float4);
    const int count = bytes >= kJudged ? 10 : 30;
    for (const int blocks : {132, 264, 528}) {
      fill_mine(member, bytes);
      if (!member.leads()) continue;
      const auto kernel = [&](int) { launch_sum(member, 0, units, blocks); };
      judge_share(member, "kernel alone, " + size + ", " + std::to_string(blocks) + " blocks",
                  bytes, in_stream(member, count, kernel), blocks == 264 ? kKernelShare : 0);
    }
    const auto lead = [&](int) {
      ++sequence;
      const auto word = [&](int to, int from) { return member.words + (to * kMost + from) * 32; };
      if (!member.leads()) {
        write(member, word(0, member.rank), sequence);
        return wait_until(member, word(member.rank, 0), sequence);
      }
      for (int r = 1; r < member.size; ++r) wait_until(member, word(0, r), sequence);
      launch_sum(member, 0, units, 264);
      for (int r = 1; r < member.size; ++r) write(member, word(r, 0), sequence);
    };
    const auto slice = [&](int) {
      const auto cut = [&](int r) { return units / static_cast<size_t>(member.size) * r; };
      stream_barrier(member, host, ++sequence);
      launch_sum(member, cut(member.rank), cut(member.rank + 1), 264);
      stream_barrier(member, host, ++sequence);
    };
    for (const bool by_leader : {true, false}) {
      const std::function<void(int)> operation = by_leader ? std::function<void(int)>(lead) : slice;
      fill_mine(member, bytes);
      operation(0);
      check_mine(member, bytes);
      const double took = microseconds(member, count, operation);
      const std::string what = by_leader ? "all_reduce by a leader, " : "all_reduce by slices, ";
      judge_share(member, what + size, bytes, took / 1e6, by_leader ? kWholeShare : 0);
    }
  }
}

}  // namespace probe
