// A process's side of its simulated devices, and the begin and end of a call of the driver.
#pragma once

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <string>

#include "sim/sim_graphs.h"
#include "sim/sim_memory.h"
#include "sim/sim_streams.h"

namespace ringcomm::sim {

// Never destroyed: threads of streams outlive main().
struct Process {
  static Process& get() {
    static auto* process = new Process;
    return *process;
  }

  // As CUDA: unusable in a forked child, and after work that failed.
  void check_owner(const char* call) const {
    if (owner != ::getpid()) throw DeviceError(str(call, ": initialization error"));
  }
  void check(const char* call) {
    check_owner(call);
    const std::lock_guard lock(mutex);
    if (!failure.empty()) throw DeviceError(str(call, ": ", failure));
  }
  void fail(const std::string& what) {
    const std::lock_guard lock(mutex);
    if (failure.empty()) failure = what;
  }

  bool failed() {
    const std::lock_guard lock(mutex);
    return !failure.empty();
  }

  const pid_t owner = ::getpid();
  std::recursive_mutex driver;  // of each call, also while it waits; not of synchronize()
  SimMemory memory;
  SimStreams streams;
  SimGraphs graphs;
  std::atomic<uint64_t> copies{0}, copied{0}, asked{0};
  std::mutex mutex;
  std::string failure;
};

inline thread_local int device_of_thread = 0;

// A call of the driver: while one is stuck, so are all others of the process.
class Entered {
 public:
  explicit Entered(Process& process) : process_(process), lock_(process.driver) {}
  Process* operator->() const { return &process_; }
  // For calls that wait for streams that wait for a word: the driver cannot do it while one does.
  const Entered& pass() const {
    process_.streams.pass(device_of_thread);
    return *this;
  }

 private:
  Process& process_;
  std::unique_lock<std::recursive_mutex> lock_;
};

// Faults of operations in streams.
class Faults {
 public:
  explicit Faults(const SimOptions& options) : options_(options) {}

  void before(uint64_t stream, uint64_t number) {
    if (options_.dies_at != 0 && ++operations_ == options_.dies_at) ::kill(::getpid(), SIGKILL);
    const uint64_t more = mix(mix(options_.seed, stream), number) % (options_.random_us + 1);
    const uint64_t delay = options_.slow_us + more;
    if (delay > 0) ::usleep(static_cast<useconds_t>(delay));
  }

 private:
  // splitmix64: the delay depends on the operation alone, not on which threads run when.
  static uint64_t mix(uint64_t seed, uint64_t value) {
    uint64_t x = seed + (value + 1) * 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  }

  const SimOptions options_;
  std::atomic<uint64_t> operations_{0};  // alone: it orders nothing
};

}  // namespace ringcomm::sim
