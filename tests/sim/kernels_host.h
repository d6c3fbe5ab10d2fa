// The device kernels (csrc/cuda/kernels.inc.h) on threads of the host: the same source, the same
// results bit by bit, and the meetings where ThreadSanitizer sees them.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>

#include "device/kernel_args.h"

namespace ringcomm::sim {

// A kernel's accesses to memory. A test may watch one, end it by an exception, or do it wrong.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual void touch() {}  // data, before it is read or written
  virtual void load(const std::byte* at, void* value, size_t bytes) {
    __builtin_memcpy(value, at, bytes);
  }
  virtual void store(std::byte* at, const void* value, size_t bytes) {
    __builtin_memcpy(at, value, bytes);
  }
  virtual void store_release(uint32_t* flag, uint32_t value) {
    std::atomic_ref(*flag).store(value, std::memory_order_release);
  }
  virtual uint32_t load_acquire(const uint32_t* flag) {
    return std::atomic_ref(*const_cast<uint32_t*>(flag)).load(std::memory_order_acquire);
  }
  // A line of data with a flag: 8 bytes that are whole.
  virtual void store_line(uint64_t* line, uint64_t value) {
    std::atomic_ref(*line).store(value, std::memory_order_relaxed);
  }
  virtual uint64_t load_line(const uint64_t* line) {
    return std::atomic_ref(*const_cast<uint64_t*>(line)).load(std::memory_order_relaxed);
  }
  virtual void pause() { std::this_thread::yield(); }
  virtual uint64_t nanoseconds() {
    return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
  }
  // Whether the threads of a block wait for each other at their `sync`-th sync(), from 1.
  virtual bool in_step([[maybe_unused]] int sync) const { return true; }
};

// All blocks, one after the other, on the calling thread.
void run_leader(const cuda::LeaderArgs& args, Memory& memory);
template <class Args>
void run_blocks(const Args& args, Memory& memory);

// One block, for tests. `members` threads of the host are its threads, all at once; with 1 the
// calling thread is each of them in turn, which finds no fault between threads of one block.
template <class Args>  // of a kernel whose ranks meet
void run_block(const Args& args, int block, Memory& memory, int members = 1);
void run_block(const cuda::LeaderArgs& args, int block, int blocks, Memory& memory, int members);

}  // namespace ringcomm::sim
