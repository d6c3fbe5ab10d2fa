#include "exec/thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <algorithm>
#include <climits>
#include <system_error>
#include <thread>

#include "base/error.h"

namespace ringcomm {
namespace {

constexpr uint64_t kLeastChunk = 16 << 10, kMostChunk = 128 << 10;
constexpr uint64_t kChunksEach = 4;       // or else the slowest thread decides
constexpr uint32_t kClosed = UINT32_MAX;  // in the place of the next chunk: there is none

constexpr uint64_t cursor_at(uint32_t round, uint32_t chunk) {
  return uint64_t{round} << 32 | chunk;
}

}  // namespace

void ThreadPool::run(const Threads& threads, uint64_t bytes, const Call& call) {
  const int wanted = threads.now();
  const bool alone = wanted <= 1 || bytes < kLeastBytes;
  if (alone || taken_.load(std::memory_order_relaxed) ||
      taken_.exchange(true, std::memory_order_acquire)) {
    return call.function(call.context, 0, bytes);
  }
  const Finally free{[&] { taken_.store(false, std::memory_order_release); }};
  const int helpers = hire(wanted - 1);
  spins_.store(threads.spins, std::memory_order_relaxed);
  open(call, bytes, helpers + 1);
  for (int i = 0; i < helpers; ++i) {
    std::atomic<uint32_t>& called = helpers_[static_cast<size_t>(i)]->called;
    called.store(round_, std::memory_order_seq_cst);
    called.notify_one();
  }
  work();
  await_others();
  const Lock lock(mutex_);
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
}

// Makes helpers until there are so many. Returns how many of them there are.
int ThreadPool::hire(int count) {
  if (std::ssize(helpers_) >= count) return count;
  sigset_t all, before;
  ::sigfillset(&all);  // the program's handlers run on threads that it knows
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  const Finally restore{[&] { ::pthread_sigmask(SIG_SETMASK, &before, nullptr); }};
  while (std::ssize(helpers_) < std::min(count, most_)) {
    auto helper = std::make_unique<Helper>();
    helper->called = round_;
    try {
      std::thread(&ThreadPool::help, this, std::ref(*helper), round_).detach();
    } catch (const std::system_error&) {  // so many will do
      most_ = static_cast<int>(helpers_.size());
      break;
    }
    helpers_.push_back(std::move(helper));
    hired_.fetch_add(1, std::memory_order_relaxed);
  }
  return std::min(count, static_cast<int>(helpers_.size()));
}

void ThreadPool::open(const Call& call, uint64_t bytes, int threads) {
  const uint64_t wanted = bytes / (kChunksEach * static_cast<uint64_t>(threads));
  uint64_t grain = std::clamp(wanted, kLeastChunk, kMostChunk);
  grain = std::max(grain, bytes / (1u << 30)) / 64 * 64 + 64;
  const auto chunks = static_cast<uint32_t>((bytes + grain - 1) / grain);
  cursor_.store(cursor_at(++round_, kClosed), std::memory_order_release);
  function_.store(call.function, std::memory_order_release);
  context_.store(call.context, std::memory_order_release);
  bytes_.store(bytes, std::memory_order_release);
  grain_.store(grain, std::memory_order_release);
  chunks_.store(chunks, std::memory_order_release);
  share_.store(chunks / static_cast<uint32_t>(threads), std::memory_order_relaxed);
  left_.store(chunks, std::memory_order_relaxed);
  cursor_.store(cursor_at(round_, 0), std::memory_order_release);  // partner: work()
}

// Claims chunks of the step until none is left. A thread that has done its share lets others go
// first: one of them may be waiting for this very core.
void ThreadPool::work() {
  uint64_t at = cursor_.load(std::memory_order_acquire);
  uint32_t done = 0;
  while (true) {
    const auto chunk = static_cast<uint32_t>(at);
    if (chunk >= chunks_.load(std::memory_order_acquire)) return;
    const auto function = function_.load(std::memory_order_acquire);
    const void* const context = context_.load(std::memory_order_acquire);
    const uint64_t bytes = bytes_.load(std::memory_order_acquire);
    const uint64_t grain = grain_.load(std::memory_order_acquire);
    if (!cursor_.compare_exchange_weak(at, at + 1, std::memory_order_acq_rel,
                                       std::memory_order_acquire)) {
      continue;
    }
    try {
      function(context, chunk * grain, std::min(bytes, (chunk + 1) * grain));
    } catch (...) {
      const Lock lock(mutex_);
      if (!error_) error_ = std::current_exception();
    }
    // Partner: await_others(). What this thread has written comes before.
    if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) left_.notify_one();
    at = cursor_.load(std::memory_order_acquire);
    if (++done < share_.load(std::memory_order_relaxed)) continue;
    if (static_cast<uint32_t>(at) >= chunks_.load(std::memory_order_acquire)) return;
    ::sched_yield();
    at = cursor_.load(std::memory_order_acquire);
  }
}

// Waits for chunks that helpers have claimed.
void ThreadPool::await_others() {
  const bool spins = spins_.load(std::memory_order_relaxed);
  while (const uint32_t left = left_.load(std::memory_order_acquire)) {
    if (!spins || !patience_.again()) left_.wait(left, std::memory_order_acquire);
  }
  patience_.reset();
}

void ThreadPool::await_call(Helper& self, uint32_t seen, Patience& patience) {
  while (self.called.load(std::memory_order_acquire) == seen) {
    if (spins_.load(std::memory_order_relaxed) && patience.again()) continue;
    self.called.wait(seen, std::memory_order_acquire);
  }
  patience.reset();
}

void ThreadPool::help(Helper& self, uint32_t seen) {
  ::pthread_setname_np(::pthread_self(), "ringcomm-pool");
  Patience patience(kPolicy);
  while (true) {
    await_call(self, seen, patience);
    seen = self.called.load(std::memory_order_relaxed);
    work();
  }
}

}  // namespace ringcomm
