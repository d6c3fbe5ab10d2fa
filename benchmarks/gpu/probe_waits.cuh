// Finds out who else waits while a stream waits for a word: calls, other streams, or the host.
#pragma once

#include <thread>
#include <vector>

#include "probe_words.cuh"

namespace probe {

inline cudaStream_t make_stream() {
  int least = 0, greatest = 0;
  check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest), "cudaStreamCreate");
  return stream;
}

static __global__ void first_launched() {}  // and nowhere else
static __global__ void empty() {}

inline void launch_empty(const Member& member) {
  empty<<<1, 1, 0, member.stream>>>();
  check(cudaGetLastError(), "a launch");
}

// Calls on rank 1 while its stream waits for a word, which rank 0 writes after two seconds.
inline void calls_behind_a_blocked_stream(Member& member) {
  member.need(member.words, "memory of the host");
  uint32_t* const word = member.words + kWords - 64;
  uint32_t* const word_here = member.shared.words + kWords - 64;
  float *spare = nullptr, *memory = nullptr;
  check(cudaMalloc(&spare, 4 * kMiB), "cudaMalloc");
  check(cudaIpcGetMemHandle(&member.shared.spare[member.rank], spare), "cudaIpcGetMemHandle");
  float* opened = nullptr;
  void* pinned = nullptr;
  cudaStream_t stream = nullptr, beside = make_stream();
  const std::pair<const char*, std::function<void()>> kinds[] = {
      {"cudaIpcOpenMemHandle", [&] { opened = open<float>(member.shared.spare[0]); }},
      {"cudaIpcCloseMemHandle", [&] { check(cudaIpcCloseMemHandle(opened), "close"); }},
      {"cudaMalloc", [&] { check(cudaMalloc(&memory, 64 * kMiB), "cudaMalloc"); }},
      {"cudaFree", [&] { check(cudaFree(memory), "cudaFree"); }},
      {"cudaStreamCreate", [&] { stream = make_stream(); }},
      {"cudaStreamDestroy", [&] { check(cudaStreamDestroy(stream), "cudaStreamDestroy"); }},
      {"cudaHostAlloc", [&] { check(cudaHostAlloc(&pinned, kMiB, 0), "cudaHostAlloc"); }},
      {"cudaFreeHost", [&] { check(cudaFreeHost(pinned), "cudaFreeHost"); }},
      {"the first launch of a kernel", [&] { first_launched<<<1, 1, 0, beside>>>(); }},
  };
  int turn = 0;
  for (const auto& [name, call] : kinds) {
    ++turn;
    member.meet();
    double took = 0;
    if (member.rank == 1) wait_until(member, word, static_cast<uint32_t>(turn));
    member.meet();
    if (member.rank == 1) {
      const auto start = Clock::now();
      call();
      took = seconds_since(start) * 1e6;
      member.shared.answered.store(turn);
    }
    const auto start = Clock::now();
    while (member.leads() && member.shared.answered.load() != turn && seconds_since(start) < 2) {
      usleep(100);
    }
    if (member.leads()) __atomic_store_n(word_here, static_cast<uint32_t>(turn), __ATOMIC_RELEASE);
    took = member.largest(took);
    const char* const note = took > 1.5e6 ? "waits for the stream" : "does not wait for it";
    member.info(std::string(name) + " while a stream is blocked", took, "µs", note);
    check(cudaStreamSynchronize(member.stream), "cudaStreamSynchronize");
  }
  member.meet();
  check(cudaFree(spare), "cudaFree");
  check(cudaStreamDestroy(beside), "cudaStreamDestroy");
}

// How much is enqueued behind a wait until the host waits as well; and another thread, meanwhile?
inline void room_behind_a_wait(Member& member) {
  member.need(member.words, "memory of the host");
  if (!member.leads()) return;
  constexpr int kMany = 8192;
  cudaStream_t beside = make_stream();
  launch_empty(member);  // so that it is loaded
  check(cudaStreamSynchronize(member.stream), "cudaStreamSynchronize");
  for (const bool kernels : {true, false}) {
    uint32_t* const word = member.words + kScratch + (kernels ? 0 : 32);
    uint32_t* const word_here = member.shared.words + kScratch + (kernels ? 0 : 32);
    std::atomic<int> enqueued{0};
    std::atomic<double> launch{-1};
    int room = kMany;
    wait_until(member, word, 1);
    // Makes no CUDA call itself, so that it can end the wait even if all else is stuck.
    std::thread observer([&] {
      int seen = -1;
      while (enqueued.load() < kMany && enqueued.load() != seen) {
        seen = enqueued.load();
        usleep(300000);
      }
      room = enqueued.load();
      std::thread other([&] {
        cudaSetDevice(0);
        const auto start = Clock::now();
        empty<<<1, 1, 0, beside>>>();
        launch.store(seconds_since(start) * 1e6);
      });
      usleep(300000);
      __atomic_store_n(word_here, 1u, __ATOMIC_RELEASE);
      other.join();
    });
    std::string failed;
    for (int i = 0; i < kMany && failed.empty(); ++i) {
      try {
        kernels ? launch_empty(member) : write(member, word + 1, static_cast<uint32_t>(i));
      } catch (const std::exception& error) {
        failed = error.what();
      }
      enqueued.fetch_add(1);
    }
    observer.join();
    if (!failed.empty()) throw std::runtime_error(failed);
    check(cudaStreamSynchronize(member.stream), "cudaStreamSynchronize");
    char note[96];
    std::snprintf(note, sizeof note, "%s another thread's launch took %.0f µs",
                  room == kMany ? "no end of it;" : "then the host waits;", launch.load());
    const char* const what = kernels ? "kernels" : "words";
    member.info(std::string(what) + " that are enqueued behind a wait", room, "", note);
  }
  check(cudaStreamDestroy(beside), "cudaStreamDestroy");
}

// Streams share connections to the device: which go on while another one waits for a word?
inline void streams_behind_a_blocked_one(Member& member) {
  member.need(member.words, "memory of the host");
  if (!member.leads()) return;
  constexpr int kStreams = 33;
  constexpr size_t kFirst = kWords - 256;
  cudaStream_t streams[kStreams];
  for (cudaStream_t& stream : streams) stream = make_stream();
  for (int i = 0; i < kStreams; ++i) {
    const Within stream(member, streams[i]);
    uint32_t* const word = member.words + kFirst + i;
    i == 0 ? wait_until(member, word, 1) : write(member, word, 1);
  }
  const auto go_on = [&] {
    int count = 0;
    for (int i = 1; i < kStreams; ++i) {
      count +=
          static_cast<int>(__atomic_load_n(member.shared.words + kFirst + i, __ATOMIC_ACQUIRE));
    }
    return count;
  };
  const auto start = Clock::now();
  while (go_on() < kStreams - 1 && seconds_since(start) < 2) usleep(100);
  const int count = go_on();
  __atomic_store_n(member.shared.words + kFirst, 1u, __ATOMIC_RELEASE);
  for (cudaStream_t& stream : streams) {
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    check(cudaStreamDestroy(stream), "cudaStreamDestroy");
  }
  const char* const note = "32 of 32, or CUDA_DEVICE_MAX_CONNECTIONS=32 is needed";
  member.info("streams that go on while another waits", count, "", note);
}

}  // namespace probe
