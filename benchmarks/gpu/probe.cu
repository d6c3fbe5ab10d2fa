// Tries out what several processes can do with one GPU, and how fast. Ringcomm rests on that where
// ranks share a device. No torch:
//
//   nvcc -O3 -std=c++17 -arch=sm_90 probe.cu -o gpu_probe
//   ./gpu_probe 2,4,8,16 160        numbers of processes; seconds after which all of it has ended
//
// gpu_check.py runs it. Every wait has a deadline, in kernels too.
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include <cstdlib>
#include <vector>

#include "probe_bytes.cuh"
#include "probe_memory.cuh"
#include "probe_waits.cuh"
#include "probe_words.cuh"

namespace probe {
namespace {

constexpr double kBarrierMicroseconds = 200;  // at most, among 4 processes

// ---- devices

void facts(Member& member) {
  if (!member.leads()) return;
  cudaDeviceProp properties{};
  check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  int version = 0;
  check(cudaDriverGetVersion(&version), "cudaDriverGetVersion");
  auto* const attribute = driver<decltype(cuDeviceGetAttribute)>("cuDeviceGetAttribute");
  const auto of = [&](CUdevice_attribute which) {
    int value = -1;
    attribute(&value, which, 0);
    return std::to_string(value);
  };
  member.info("the device", properties.multiProcessorCount, "SMs",
              std::string(properties.name) + ", driver for CUDA " + std::to_string(version) +
                  ", L2 " + std::to_string(properties.l2CacheSize / kMiB) + " MiB, MPS " +
                  of(CU_DEVICE_ATTRIBUTE_MPS_ENABLED) + ", IPC of events " +
                  of(CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED) + ", descriptors of memory " +
                  of(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED));
}

void register_host(Member& member) {
  const auto start = Clock::now();
  check(cudaHostRegister(member.shared.words, sizeof member.shared.words,
                         cudaHostRegisterMapped | cudaHostRegisterPortable),
        "cudaHostRegister");
  const double took = seconds_since(start) * 1e6;
  void* there = nullptr;
  check(cudaHostGetDevicePointer(&there, member.shared.words, 0), "cudaHostGetDevicePointer");
  member.words = static_cast<uint32_t*>(there);
  member.row("pass", "registers memory of a memfd", member.largest(took), "µs");
}

// Everybody maps everybody's memory. That it is the right one, the sums show later.
void reach(Member& member) {
  float* memory = nullptr;
  uint32_t* flags = nullptr;
  check(cudaMalloc(&memory, kBytes), "cudaMalloc");
  check(cudaMalloc(&flags, 2 * kMiB), "cudaMalloc");
  check(cudaMemset(flags, 0, 2 * kMiB), "cudaMemset");
  check(cudaIpcGetMemHandle(&member.shared.memory[member.rank], memory), "cudaIpcGetMemHandle");
  check(cudaIpcGetMemHandle(&member.shared.flags[member.rank], flags), "cudaIpcGetMemHandle");
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  member.meet();
  double took = 0;
  for (int r = 0; r < member.size; ++r) {
    const auto start = Clock::now();
    member.memory[r] = r == member.rank ? memory : open<float>(member.shared.memory[r]);
    took = std::max(took, r == member.rank ? 0 : seconds_since(start) * 1e6);
    member.flags[r] = r == member.rank ? flags : open<uint32_t>(member.shared.flags[r]);
  }
  member.row("pass", "map one another's memory; 256 MiB", member.largest(took), "µs");
}

// ---- meeting

void barriers(Member& member) {
  member.need(member.words, "memory of the host");
  uint32_t* host[kMost];
  std::fill_n(host, kMost, member.words);
  const auto meet = [&](int i) { stream_barrier(member, host, static_cast<uint32_t>(i)); };
  microseconds(member, 20, meet);
  const double took = microseconds(member, 300, [&](int i) { meet(20 + i); });
  const char* const what = "barrier of memory operations, words of the host";
  member.size == 4 ? member.at_most(kBarrierMicroseconds, what, took, "µs")
                   : member.info(what, took, "µs");
  const double busy = microseconds(member, 20, [&](int i) {
    compute<<<132, 64, 0, member.stream>>>(1000000);  // 1 ms of every process
    meet(320 + i);
  });
  member.info("the same, each after 1 ms of computing", busy, "µs", "≥ 1000 a process in turn");
}

void barriers_of_the_device(Member& member) {
  member.need(member.flags[0], "others' memory");
  const double took = microseconds(
      member, 300, [&](int i) { stream_barrier(member, member.flags, static_cast<uint32_t>(i)); });
  member.info("barrier of memory operations, words of the device", took, "µs");
}

void barriers_of_the_host(Member& member) {
  const double took = microseconds(member, 100, [&](int) {
    compute<<<1, 32, 0, member.stream>>>(0);
    check(cudaStreamSynchronize(member.stream), "cudaStreamSynchronize");
    member.meet();
  });
  member.info("barrier of the host, after a small kernel", took, "µs");
}

void barriers_by_spinning(Member& member) {
  member.need(member.flags[0], "others' memory");
  Flags flags{};
  std::copy_n(member.flags, kMost, flags.of);
  const double took = microseconds(member, 20, [&](int i) {
    spin_barrier<<<1, 32, 0, member.stream>>>(flags, member.rank, member.size,
                                              static_cast<uint32_t>(i));
  });
  member.info("barrier of kernels that spin", took, "µs", "time slices decide");
}

void barriers_of_events(Member& member) {
  cudaEvent_t mine = nullptr, of[kMost] = {};
  check(cudaEventCreateWithFlags(&mine, cudaEventDisableTiming | cudaEventInterprocess),
        "cudaEventCreateWithFlags");
  check(cudaIpcGetEventHandle(&member.shared.event[member.rank], mine), "cudaIpcGetEventHandle");
  member.meet();
  for (int r = 0; r < member.size; ++r) {
    if (r == member.rank) continue;
    check(cudaIpcOpenEventHandle(&of[r], member.shared.event[r]), "cudaIpcOpenEventHandle");
  }
  const double took = microseconds(member, 100, [&](int) {
    check(cudaEventRecord(mine, member.stream), "cudaEventRecord");
    member.meet();
    for (int r = 0; r < member.size; ++r) {
      if (r != member.rank) check(cudaStreamWaitEvent(member.stream, of[r]), "cudaStreamWaitEvent");
    }
    member.meet();
  });
  member.info("barrier of interprocess events", took, "µs", "the hosts meet too");
}

// ---- costs of calls to the host

void calls(Member& member) {
  member.need(member.words, "memory of the host");
  member.need(member.memory[0], "others' memory");
  if (!member.leads()) return;
  uint32_t* const word = member.words + kWords - 32;
  float* const memory = member.memory[0];
  const auto at = reinterpret_cast<CUdeviceptr>(memory);
  const auto range = driver<decltype(cuMemGetAddressRange)>("cuMemGetAddressRange");
  const auto batch = driver<decltype(cuStreamBatchMemOp)>("cuStreamBatchMemOp");
  const std::vector<std::pair<const char*, std::function<void(int)>>> kinds = {
      {"write", [&](int i) { write(member, word, static_cast<uint32_t>(i)); }},
      {"wait", [&](int) { wait_until(member, word, 0); }},
      {"launch", [&](int) { compute<<<1, 32, 0, member.stream>>>(0); }},
      {"copy",
       [&](int) {
         check(cudaMemcpyAsync(memory, memory + kMiB, 4096, cudaMemcpyDefault, member.stream),
               "cudaMemcpyAsync");
       }},
      {"batch of 8 words",
       [&](int i) {
         CUstreamBatchMemOpParams words[8] = {};
         for (int w = 0; w < 8; ++w) {
           words[w].operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
           words[w].writeValue.address = reinterpret_cast<CUdeviceptr>(word + w);
           words[w].writeValue.value = static_cast<uint32_t>(i);
         }
         check(batch(member.stream, 8, words, 0), "cuStreamBatchMemOp");
       }},
      {"question for an allocation's range (cuMemGetAddressRange)",
       [&](int) {
         CUdeviceptr base = 0;
         size_t bytes = 0;
         check(range(&base, &bytes, at), "cuMemGetAddressRange");
       }},
      {"question for its id (cuPointerGetAttribute)", [&](int) { id_of(at); }}};
  for (const auto& [name, call] : kinds) {
    for (int i = 0; i < 20; ++i) call(i);
    check(cudaStreamSynchronize(member.stream), "cudaStreamSynchronize");
    const auto start = Clock::now();
    for (int i = 0; i < 200; ++i) call(i);
    const double took = seconds_since(start) * 1e6 / 200;
    check(cudaStreamSynchronize(member.stream), "cudaStreamSynchronize");
    member.info(std::string("takes the host: a ") + name, took, "µs");
  }
}

// ---- processes

int serve(Shared& shared, int rank, int size, double seconds) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  alarm(static_cast<unsigned>(seconds) + 1);
  Member member(shared, rank, size);
  try {
    check(cudaSetDevice(0), "cudaSetDevice");
    check(cudaStreamCreateWithFlags(&member.stream, cudaStreamNonBlocking), "cudaStreamCreate");
  } catch (const std::exception& error) {
    member.row("fail", "a context", kNone, "", "", error.what(), true);
    return 3;
  }
  const std::pair<const char*, void (*)(Member&)> tests[] = {
      {"facts", facts},
      {"host memory", register_host},
      {"IPC", reach},
      {"words in the default stream", words_in_the_default_stream},
      {"words in a graph", words_in_a_graph},
      {"asking beside a capture", asking_beside_a_capture},
      {"words of 64 bits", words_of_64_bits},
      {"words of another device", words_of_another_device},
      {"ids of memory", ids_of_memory},
      {"ids of mapped memory", ids_of_mapped_memory},
      {"slots of a kernel", slots_of_a_kernel},
      {"room behind a wait", room_behind_a_wait},
      {"returned memory", returned_memory},
      {"reopened memory", reopened_memory},
      {"a dead exporter", dead_exporter},
      {"calls beside a blocked stream", calls_behind_a_blocked_stream},
      {"streams beside a blocked one", streams_behind_a_blocked_one},
      {"barriers", barriers},
      {"barriers of the device", barriers_of_the_device},
      {"barriers of the host", barriers_of_the_host},
      {"calls", calls},
      {"copies", copy_ceiling},
      {"sums", sums},
      {"spinning", barriers_by_spinning},
      {"interprocess events", barriers_of_events},
      {"freed memory", free_what_is_mapped},
  };
  int number = 0;
  for (const auto& [name, test] : tests) member.run(number++, name, test);
  return 0;
}

// Ends all processes that are still there at the deadline. True when there were none.
bool run(int size, double seconds) {
  Shared* const shared = make_shared();
  if (shared == nullptr) return false;
  std::vector<pid_t> children;
  for (int rank = 0; rank < size; ++rank) {
    const pid_t child = fork();
    if (child == 0) _exit(serve(*shared, rank, size, seconds));
    children.push_back(child);
  }
  const auto start = Clock::now();
  bool good = true;
  while (!children.empty()) {
    const bool late = seconds_since(start) > seconds;
    for (size_t i = 0; i < children.size();) {
      int status = 0;
      if (late || !good) kill(children[i], SIGKILL);  // without one the others only wait
      if (waitpid(children[i], &status, WNOHANG) == 0) {
        ++i;
        continue;
      }
      good = good && status == 0;
      children.erase(children.begin() + static_cast<std::ptrdiff_t>(i));
    }
    usleep(2000);
  }
  if (!good) {
    const char* const step = shared->step.load();
    std::printf("fail\t%d processes\t\t\t\tended in \"%s\" after %.0f s\n", size,
                step == nullptr ? "the beginning" : step, seconds_since(start));
  }
  munmap(shared, sizeof(Shared));
  return good;
}

}  // namespace
}  // namespace probe

int main(int argc, char** argv) {
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  const std::string numbers = argc > 1 ? argv[1] : "2,4,8,16";
  if (numbers.rfind("--", 0) == 0) return probe::serve_a_death(numbers);
  const double seconds = argc > 2 ? std::atof(argv[2]) : 160;
  const auto start = probe::Clock::now();
  std::vector<int> sizes;
  for (size_t at = 0; at < numbers.size(); at = numbers.find_first_of(',', at) + 1) {
    sizes.push_back(std::atoi(numbers.c_str() + at));
    if (numbers.find(',', at) == std::string::npos) break;
  }
  bool good = true;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const bool known = sizes[i] == 2 || sizes[i] == 4 || sizes[i] == 8 || sizes[i] == 16;
    const double left = seconds - probe::seconds_since(start);
    const double share = left / static_cast<double>(sizes.size() - i);
    good = known && probe::run(sizes[i], share) && good;
  }
  return good ? 0 : 1;
}
