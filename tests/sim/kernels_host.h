// The device kernels (csrc/cuda/kernels.inc.h) on threads of the host: the same source, the same
// results bit by bit, and the meetings where ThreadSanitizer sees them.
#pragma once

#include <atomic>
#include <thread>

#include "device/kernel_args.h"

namespace ringcomm::sim {

// What a kernel does to memory. A test may watch it, end it by an exception, or do it wrong.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual void touch() {}  // data, before it is read or written
  virtual void store_release(uint32_t* flag, uint32_t value) {
    std::atomic_ref(*flag).store(value, std::memory_order_release);
  }
  virtual uint32_t load_acquire(const uint32_t* flag) {
    return std::atomic_ref(*const_cast<uint32_t*>(flag)).load(std::memory_order_acquire);
  }
  virtual void pause() { std::this_thread::yield(); }
  // Whether the threads of a block wait for each other at their `sync`-th sync(), from 1.
  virtual bool in_step([[maybe_unused]] int sync) const { return true; }
};

// All blocks, one after the other, on the calling thread.
void run_leader(const cuda::LeaderArgs& args);
void run_two_shot(const cuda::TwoShotArgs& args);

// One block, for tests. `members` threads of the host are its threads, all at once; with 1 the
// calling thread is each of them in turn, which finds no fault between threads of one block.
void run_block(const cuda::TwoShotArgs& args, int block, Memory& memory, int members = 1);
void run_block(const cuda::LeaderArgs& args, int block, int blocks, Memory& memory, int members);

}  // namespace ringcomm::sim
