// The kernels of ranks that have a device each, where one device can be used: n ranks are n streams
// of one process, whose kernels run at the same time.
//
//   gpu_kernels LIBRARY RANKS [OPERATIONS [SEED]]
//
// LIBRARY is libringcomm_cuda.so, or that of the simulated device. First random operations of all
// kernels, types and lengths, several under way at a time, against ringcomm::reduce(), bit for bit.
// Then times. Prints lines of verdict, what, figure, unit, target and note, with tabs between.
#include <dlfcn.h>

#include "device/api.h"
#include "meetings_steps.h"

namespace ringcomm::testing {
namespace {

constexpr uint64_t kArena = 8 << 20;  // of a rank: for operands of a burst, and what is timed
constexpr int kBurst = 8;             // operations that are under way at a time
constexpr auto kPatience = std::chrono::seconds(60);

Api& open(const char* path) {
  void* const library = ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
  require(library != nullptr, path, " cannot be opened: ", library ? "" : ::dlerror());
  const auto function = reinterpret_cast<ApiFunction>(::dlsym(library, kApiSymbol));
  Api* const api = function ? function(RINGCOMM_INTERFACE) : nullptr;
  require(api != nullptr, path, " belongs to another build");
  require(api->unusable().empty(), api->unusable());
  return *api;
}

// As MeetingGroup, in memory of the device.
class DeviceGroup {
 public:
  DeviceGroup(Api& api, int size) : api_(api), size_(size), control_(api.make_stream()) {
    const uint64_t bytes = kFlags + 2 * kOneShotWindow + lines() + 2 * kArena + kRingBytes;
    pinned_ = api.allocate_pinned(bytes);
    std::memset(pinned_, 0, bytes);
    abort_ = reinterpret_cast<uint32_t*>(api.allocate_pinned(sizeof(uint32_t)));
    *abort_ = 0;
    for (Rank rank = 0; rank < size; ++rank) {
      streams_.push_back(api.make_stream());
      memory_.push_back(api.allocate(bytes));
      copy(memory_.back(), pinned_, bytes);
    }
    api.load_kernels();
  }

  int size() const { return size_; }
  Stream stream(Rank rank) const { return streams_[static_cast<size_t>(rank)]; }
  Members members(Rank rank, int blocks) const {
    Members members{.rank = rank, .n_ranks = size_, .blocks = blocks, .flags = {}};
    for (Rank peer = 0; peer < size_; ++peer) {
      members.flags[peer] = reinterpret_cast<Flags*>(memory(peer));
    }
    members.abort = abort_;
    return members;
  }
  void set_memory(OneShotArgs& args) const {
    for (Rank rank = 0; rank < size_; ++rank) args.window[rank] = memory(rank) + kFlags;
  }
  void set_memory(RingArgs& args) const {
    args.slots = slots(args.members.rank);
    args.next_slots = slots((args.members.rank + 1) % size_);
  }
  void set_memory(LowLatencyArgs& args) const {
    for (Rank rank = 0; rank < size_; ++rank) {
      args.lines[rank] = memory(rank) + kFlags + 2 * kOneShotWindow;
    }
    args.pieces = low_latency_bytes(size_) / kPiece;
  }
  std::byte* arena(Rank rank) const { return memory(rank) + kFlags + 2 * kOneShotWindow + lines(); }
  void write(std::byte* to, const Bytes& bytes) {
    std::memcpy(pinned_, bytes.data(), bytes.size());
    copy(to, pinned_, bytes.size());
  }
  Bytes read(const std::byte* from, uint64_t bytes) {
    copy(pinned_, from, bytes);
    return {pinned_, pinned_ + bytes};
  }
  // Waits for all streams. Kernels that wait too long are told to end.
  void finish() {
    std::atomic<bool> done{false};
    std::thread watch([&] {
      const Deadline deadline(kPatience);
      while (!done && !deadline.passed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (!done) std::atomic_ref(*abort_).store(1);
    });
    for (const Stream stream : streams_) api_.synchronize(stream);
    done = true;
    watch.join();
    require(std::atomic_ref(*abort_).load() == 0, "kernels wait for one another in vain");
  }

 private:
  static constexpr uint64_t kFlags = (sizeof(Flags) + 4095) / 4096 * 4096;

  uint64_t lines() const { return 2 * static_cast<uint64_t>(size_) * low_latency_bytes(size_) * 2; }
  std::byte* slots(Rank rank) const { return arena(rank) + 2 * kArena; }
  std::byte* memory(Rank rank) const { return memory_[static_cast<size_t>(rank)]; }
  void copy(std::byte* to, const std::byte* from, uint64_t bytes) {
    if (bytes == 0) return;
    api_.copy(control_, to, from, bytes);
    api_.synchronize(control_);
  }

  Api& api_;
  const int size_;
  const Stream control_;
  std::byte* pinned_;
  uint32_t* abort_;
  std::vector<Stream> streams_;
  std::vector<std::byte*> memory_;
};

void run(Api& api, DeviceGroup& group, const Step& step, Rank rank, std::byte* in, std::byte* out) {
  Member(group, step, rank, in, out).run([&](const auto& args) {
    api.launch(group.stream(rank), args);
  });
}

// A burst of operations on operands of their own, enqueued rank by rank.
void check_burst(Api& api, DeviceGroup& group, const std::vector<Step>& steps, int first) {
  constexpr uint64_t kRoom = kArena / kBurst;
  const auto at = [&](Rank rank, size_t number, bool output) {
    return group.arena(rank) + (output ? kArena : 0) + number * kRoom;
  };
  for (Rank rank = 0; rank < group.size(); ++rank) {
    for (size_t number = 0; number < steps.size(); ++number) {
      const Bytes& input = steps[number].inputs[static_cast<size_t>(rank)];
      if (!input.empty()) group.write(at(rank, number, false), input);
    }
  }
  for (Rank rank = 0; rank < group.size(); ++rank) {
    for (size_t number = 0; number < steps.size(); ++number) {
      run(api, group, steps[number], rank, at(rank, number, false), at(rank, number, true));
    }
  }
  group.finish();
  for (Rank rank = 0; rank < group.size(); ++rank) {
    for (size_t number = 0; number < steps.size(); ++number) {
      const Bytes& wanted = steps[number].outputs[static_cast<size_t>(rank)];
      if (wanted.empty()) continue;
      require_same(group.read(at(rank, number, true), wanted.size()), wanted,
                   str("operation ", first + static_cast<int>(number), ", ",
                       to_string(steps[number].shape.collective), " by ",
                       to_string(steps[number].kernel), ", rank ", rank));
    }
  }
}

void check(Api& api, DeviceGroup& group, int operations, uint64_t seed) {
  Random random(seed);
  for (int first = 0; first < operations; first += kBurst) {
    std::vector<Step> steps;
    for (int i = 0; i < kBurst; ++i) {
      steps.push_back(make_step(random, group.size(), kKernels[random.below(kKernels.size())]));
    }
    check_burst(api, group, steps, first);
  }
  std::printf("pass\t%d random operations by %d ranks, bit for bit\n", operations, group.size());
}

// An all_reduce of float32. Ranks launch on threads of their own, as processes would.
double seconds_of(Api& api, DeviceGroup& group, Algorithm kernel, uint64_t bytes, int times) {
  Step step{kernel, {}, {DType::kFloat32, ReduceOp::kSum, group.size(), 1}, 1, 1 << 30, {}, {}, {}};
  step.shape.collective = kAllReduce;
  step.shape.size = group.size();
  step.shape.element = 4;
  step.shape.bytes = bytes;
  const auto ranks = static_cast<size_t>(group.size());
  step.lengths.assign(ranks, std::vector<uint64_t>(ranks));
  const Link link = link_of(true, 90, 128 / group.size());
  step.blocks = kernel == kByTwoShot   ? blocks_for(step.shape, link)
                : kernel == kByOneShot ? kOneShotBlocks
                : kernel == kByRing    ? kRingBlocks
                                       : kLowLatencyBlocks;
  const auto go = [&](int count) {
    run_threads(group.size(), [&](Rank rank) {
      const OnDevice here(api, 0);
      for (int i = 0; i < count; ++i) {
        run(api, group, step, rank, group.arena(rank), group.arena(rank) + kArena);
      }
    });
    group.finish();
  };
  go(5);
  const auto begin = Clock::now();
  go(times);
  return std::chrono::duration<double>(Clock::now() - begin).count() / times;
}

void time_all(Api& api, DeviceGroup& group, int times) {
  for (const uint64_t bytes :
       {uint64_t{1} << 10, uint64_t{8} << 10, uint64_t{32} << 10, uint64_t{64} << 10,
        uint64_t{256} << 10, uint64_t{1} << 20, kArena}) {
    for (const Algorithm kernel : kKernels) {
      if (kernel == kByOneShot && bytes > kOneShotWindow) continue;
      if (kernel == kByLowLatency && bytes > low_latency_bytes(group.size())) continue;
      const double seconds = seconds_of(api, group, kernel, bytes, times);
      const bool short_one = kernel == kByOneShot && bytes == 64 << 10;
      std::printf("info\tall_reduce of %llu B by %d ranks, %s\t%.2f\tµs\t%s\tlaunches included\n",
                  static_cast<unsigned long long>(bytes), group.size(), to_string(kernel),
                  seconds * 1e6, short_one ? "≤ 10" : "");
      std::fflush(stdout);
    }
  }
}

int run_program(int argc, char** argv) {
  require(argc >= 3, "gpu_kernels LIBRARY RANKS [OPERATIONS [SEED]]");
  Api& api = open(argv[1]);
  DeviceGroup group(api, std::stoi(argv[2]));
  check(api, group, argc > 3 ? std::stoi(argv[3]) : 10'000, argc > 4 ? std::stoull(argv[4]) : 1);
  time_all(api, group, api.simulated() ? 3 : 200);
  return 0;
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  try {
    return ringcomm::testing::run_program(argc, argv);
  } catch (const std::exception& error) {
    std::printf("fail\tkernels of ranks with a device each\t\t\t\t%s\n", error.what());
    return 1;
  }
}
