// Ranks with a device each in one process, an operation for them, and faults between
// them: for meetings_test.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <memory>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "cpp/harness.h"
#include "cpp/reduce/reduce_inputs.h"
#include "sim/kernels_host.h"

namespace ringcomm::testing {

using model::Bytes;

// Two halves of memory; one and the same, if they are to be.
class Halves {
 public:
  Halves(uint64_t half, bool same) : bytes_(2 * half) {
    const Fd file(::memfd_create("halves", MFD_CLOEXEC));
    require(::ftruncate(file.get(), static_cast<off_t>(bytes_)) == 0, "no memory");
    void* const at = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
    require(at != MAP_FAILED, "no memory");
    data_ = static_cast<std::byte*>(at);
    if (!same) return;
    void* const again =
        ::mmap(data_ + half, half, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file.get(), 0);
    require(again == data_ + half, "the second half cannot be the first");
  }
  ~Halves() { ::munmap(data_, bytes_); }
  Halves(const Halves&) = delete;
  std::byte* data() const { return data_; }

 private:
  const uint64_t bytes_;
  std::byte* data_;
};

// The memory that the ranks of a group have for their kernels.
class MeetingGroup {
 public:
  explicit MeetingGroup(int size, bool same_windows = false, bool same_lines = false)
      : size_(size), aborts_(static_cast<size_t>(size)) {
    const uint64_t lines = static_cast<uint64_t>(size) * cuda::low_latency_bytes(size) * 2;
    for (Rank rank = 0; rank < size; ++rank) {
      windows_.push_back(std::make_unique<Halves>(cuda::kOneShotWindow, same_windows));
      lines_.push_back(std::make_unique<Halves>((lines + 4095) / 4096 * 4096, same_lines));
      flags_.push_back(std::make_unique<cuda::Flags>());
      slots_.emplace_back(cuda::kRingBlocks * cuda::kRingSlots * kSlot);
    }
  }
  MeetingGroup(const MeetingGroup&) = delete;
  int size() const { return size_; }
  cuda::Flags& flags(Rank rank) { return *flags_[static_cast<size_t>(rank)]; }

  cuda::Members members(Rank rank, int blocks) {
    cuda::Members members{.rank = rank, .n_ranks = size_, .blocks = blocks, .flags = {}};
    for (Rank peer = 0; peer < size_; ++peer) members.flags[peer] = &flags(peer);
    members.abort = &aborts_[static_cast<size_t>(rank)];
    return members;
  }
  void set_memory(cuda::OneShotArgs& args) {
    for (size_t rank = 0; rank < windows_.size(); ++rank)
      args.window[rank] = windows_[rank]->data();
  }
  void set_memory(cuda::LowLatencyArgs& args) {
    for (size_t rank = 0; rank < lines_.size(); ++rank) args.lines[rank] = lines_[rank]->data();
    args.pieces = cuda::low_latency_bytes(size_) / cuda::kPiece;
  }
  void set_memory(cuda::RingArgs& args) {
    const auto rank = static_cast<size_t>(args.members.rank);
    args.slots = slots_[rank].data();
    args.next_slots = slots_[(rank + 1) % slots_.size()].data();
    args.slot = kSlot;
  }
  // Kernels that wait end.
  void abort() {
    for (uint32_t& word : aborts_) std::atomic_ref(word).store(1, std::memory_order_release);
  }

 private:
  const int size_;
  std::vector<std::unique_ptr<Halves>> windows_, lines_;
  std::vector<std::unique_ptr<cuda::Flags>> flags_;
  static constexpr uint64_t kSlot = 64;  // of the ring: many passes
  std::deque<std::vector<std::byte>> slots_;
  std::vector<uint32_t> aborts_;
};

// Yields now and then where it matters; ends a wait that lasts too long.
class Jittery : public sim::Memory {
 public:
  explicit Jittery(uint64_t seed, std::chrono::seconds patience = std::chrono::seconds(60))
      : seed_(seed), patience_(patience) {}
  void store_release(uint32_t* flag, uint32_t value) override {
    jitter();
    sim::Memory::store_release(flag, value);
  }
  uint32_t load_acquire(const uint32_t* flag) override {
    jitter();
    return sim::Memory::load_acquire(flag);
  }
  void store_line(uint64_t* line, uint64_t value) override {
    jitter(200);  // there are thousands
    sim::Memory::store_line(line, value);
  }
  void pause() override {
    require(!patience_.passed(), "somebody is missing at a meeting");
    std::this_thread::yield();
  }

 protected:
  void jitter(uint64_t one_of = 8) {
    Random random(seed_++);
    if (random.below(one_of) != 0) return;
    for (uint64_t yields = random.below(20); yields > 0; --yields) std::this_thread::yield();
  }

 private:
  std::atomic<uint64_t> seed_;  // threads of a block share this
  const Deadline patience_;
};

// Flags that order nothing. Right on x86; ThreadSanitizer sees it.
class Relaxed : public Jittery {
 public:
  using Jittery::Jittery;
  void store_release(uint32_t* flag, uint32_t value) override {
    std::atomic_ref(*flag).store(value, std::memory_order_relaxed);
  }
  uint32_t load_acquire(const uint32_t* flag) override {
    return std::atomic_ref(*const_cast<uint32_t*>(flag)).load(std::memory_order_relaxed);
  }
};

// All meetings use the flags of the even ones.
class OneParity : public Jittery {
 public:
  explicit OneParity(uint64_t seed) : Jittery(seed, std::chrono::seconds(3)) {}
  std::vector<cuda::Flags*> all;  // of the group
  void store_release(uint32_t* flag, uint32_t value) override {
    Jittery::store_release(even(flag), value);
  }
  uint32_t load_acquire(const uint32_t* flag) override {
    return Jittery::load_acquire(even(const_cast<uint32_t*>(flag)));
  }

 private:
  uint32_t* even(uint32_t* flag) const {
    for (cuda::Flags* flags : all) {
      for (cuda::BarrierFlags& barrier : flags->two_shot) {
        uint32_t* const odd = barrier.flag[1];
        if (flag >= odd && flag < odd + cuda::kMostRanks) return flag - cuda::kMostRanks;
      }
    }
    return flag;
  }
};

// Does not wait at odd meetings (the first of an operation), or at even ones.
class Skipping : public Jittery {
 public:
  Skipping(uint64_t seed, uint32_t parity) : Jittery(seed), parity_(parity) {}
  void store_release(uint32_t* flag, uint32_t value) override {
    epoch_ = value;
    Jittery::store_release(flag, value);
  }
  uint32_t load_acquire(const uint32_t* flag) override {
    return epoch_ % 2 == parity_ ? epoch_ : Jittery::load_acquire(flag);
  }

 private:
  const uint32_t parity_;
  uint32_t epoch_ = 0;
};

// A ring's rank does not wait until its successor has read a slot, or until one is full.
class Hasty : public Jittery {
 public:
  Hasty(uint64_t seed, bool reads) : Jittery(seed), reads_(reads) {}
  std::vector<cuda::Flags*> all;  // of the group
  uint32_t load_acquire(const uint32_t* flag) override {
    const uint32_t value = Jittery::load_acquire(flag);
    for (cuda::Flags* flags : all) {
      for (const cuda::RingFlags& ring : flags->ring) {
        if (flag == (reads_ ? &ring.filled : &ring.read)) return value + cuda::kRingSlots;
      }
    }
    return value;
  }

 private:
  const bool reads_;
};

// The threads of a block do not wait for each other before they tell others that they are done.
class OutOfStep : public Jittery {
 public:
  using Jittery::Jittery;
  bool in_step(int sync) const override { return sync != 3; }  // one-shot's, once it has written
};

// A line comes in two halves, its flag first.
class Torn : public Jittery {
 public:
  using Jittery::Jittery;
  void store_line(uint64_t* line, uint64_t value) override {
    const uint64_t before = sim::Memory::load_line(line);
    sim::Memory::store_line(line, (value >> 32 << 32) | (before & UINT32_MAX));
    jitter();
    sim::Memory::store_line(line, value);
  }
};

// The data come, and their flags do not.
class Flagless : public Jittery {
 public:
  explicit Flagless(uint64_t seed) : Jittery(seed, std::chrono::seconds(2)) {}
  void store_line(uint64_t* line, uint64_t value) override {
    Jittery::store_line(line, value & UINT32_MAX);
  }
};

struct Died {};

// Memory of a rank that dies at its `last`-th access, by any block.
class Dying : public sim::Memory {
 public:
  Dying(std::atomic<int>& accesses, int last) : accesses_(accesses), last_(last) {}
  void touch() override {
    if (accesses_++ >= last_) throw Died();
  }
  void store_release(uint32_t* flag, uint32_t value) override {
    touch();
    sim::Memory::store_release(flag, value);
  }
  uint32_t load_acquire(const uint32_t* flag) override {
    touch();
    return sim::Memory::load_acquire(flag);
  }
  void store_line(uint64_t* line, uint64_t value) override {
    touch();
    sim::Memory::store_line(line, value);
  }

 private:
  std::atomic<int>& accesses_;
  const int last_;
};

// Memory of a block that must touch nothing after it saw that it is aborted; its other threads look
// at their flags until they saw it, too.
class Watching : public sim::Memory {
 public:
  explicit Watching(const uint32_t* abort) : abort_(abort) {}
  bool aborted = false;
  int later = 0;  // accesses after that

  void touch() override { later += aborted; }
  void store_release(uint32_t* flag, uint32_t value) override {
    touch();
    sim::Memory::store_release(flag, value);
  }
  uint32_t load_acquire(const uint32_t* flag) override {
    const uint32_t value = sim::Memory::load_acquire(flag);
    aborted |= flag == abort_ && value != 0;
    return value;
  }

 private:
  const uint32_t* const abort_;
};

}  // namespace ringcomm::testing
