// The helper threads of a process, which carry out a long step of an operation together with the
// thread that drives it. They claim chunks of it one by one, so that a thread whose core is wanted
// elsewhere holds up one chunk only. Each chunk is computed as it would be alone: the bits of a
// result depend on no number of threads.
//
// One driving thread has the pool at a time. Another one works alone meanwhile.
#pragma once

#include <atomic>
#include <climits>
#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

#include "base/doorbell.h"
#include "base/mutex.h"

namespace ringcomm {

// How many threads work on a step, the driving one included.
struct Threads {
  int all = 1;         // where the driving one has nothing else to do
  int beside = 1;      // where it works beside the program's computation
  bool spins = false;  // there are cores for all: helpers wait for the next step awake
  int now() const;     // on this thread
};

class ThreadPool {
 public:
  // Shorter steps are faster alone.
  static constexpr uint64_t kLeastBytes = 128 << 10;

  // Calls work(begin, end) for parts of `bytes` that begin at multiples of 64, on this thread and
  // helpers, which share cores with it. What they wrote is seen when it returns. Throws what one of
  // them threw.
  template <typename Work>
  void run(const Threads& threads, uint64_t bytes, const Work& work) {
    run(threads, bytes,
        Call{[](const void* it, uint64_t begin, uint64_t end) {
               (*static_cast<const Work*>(it))(begin, end);
             },
             &work});
  }

  // Says that this thread works beside the program's computation, from now on.
  static void stay_beside() { beside() = true; }
  static bool is_beside() { return beside(); }
  int helpers() const { return hired_.load(std::memory_order_relaxed); }  // there are

  // Do nothing: a child has none of these threads, and makes a pool of its own.
  void before_fork() {}
  void after_fork() {}
  void forked() {}

 private:
  struct Call {
    void (*function)(const void* context, uint64_t begin, uint64_t end);
    const void* context;
  };
  // A word for each helper: those that are not needed sleep on.
  struct alignas(64) Helper {
    std::atomic<uint32_t> called{0};  // the round; partner: ThreadPool::await_call()
  };

  static bool& beside() {
    static thread_local bool it = false;
    return it;
  }
  void run(const Threads& threads, uint64_t bytes, const Call& call);
  int hire(int count);
  void open(const Call& call, uint64_t bytes, int threads);
  void work();
  void await_others();
  void help(Helper& self, uint32_t seen);
  void await_call(Helper& self, uint32_t seen, Patience& patience);

  std::atomic<bool> taken_{false};  // a thread has the pool; partner: run() of another
  std::vector<std::unique_ptr<Helper>> helpers_;  // the thread that has it adds to it
  std::atomic<int> hired_{0};
  int most_ = INT_MAX;  // no more threads can be made
  Patience patience_{kPolicy};

  // The step. A helper may read it late, when the next one is being written. Then its claim fails,
  // because the cursor has gone on before: a thread that reads new words has seen that, too.
  std::atomic<void (*)(const void*, uint64_t, uint64_t)> function_{nullptr};  // partner: work()
  std::atomic<const void*> context_{nullptr};                                 // partner: work()
  std::atomic<uint64_t> bytes_{0}, grain_{64};                                // partner: work()
  std::atomic<uint32_t> share_{0};   // of the chunks, for each thread
  std::atomic<uint32_t> chunks_{0};  // partner: work()
  std::atomic<bool> spins_{false};
  uint32_t round_ = 0;
  alignas(64) std::atomic<uint64_t> cursor_{0};  // round, next chunk; partner: work()
  alignas(64) std::atomic<uint32_t> left_{0};    // chunks not done; partner: await_others()

  Mutex mutex_;
  std::exception_ptr error_ RINGCOMM_GUARDED_BY(mutex_);

  static constexpr SpinPolicy kPolicy{std::chrono::microseconds(50), 0, 64};
};

inline int Threads::now() const { return ThreadPool::is_beside() ? beside : all; }

}  // namespace ringcomm
