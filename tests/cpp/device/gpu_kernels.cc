// The kernels of ranks that have a device each, where one device can be used: n ranks are n streams
// of one process, whose kernels run at the same time.
//
//   gpu_kernels LIBRARY RANKS [OPERATIONS [SEED]]
//
// LIBRARY is libringcomm_cuda.so, or that of the simulated device. First random operations of all
// kernels, types and lengths, several under way at a time, and every number of short types, against
// ringcomm::reduce(), bit for bit. Then a rank that does not come. Then times, whose results are
// compared, too. Prints lines of verdict, what, figure, unit, target and note, with tabs between.
#include <dlfcn.h>

#include "device/api.h"
#include "number_steps.h"

namespace ringcomm::testing {
namespace {

constexpr uint64_t kBurstBytes = 8 << 20;  // of a rank, for operands of a burst
constexpr uint64_t kLong = 16 << 20;       // of a message: from there on the memory is the limit
constexpr int kBurst = 8;                  // operations that are under way at a time
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
  // Timed calls take up to 64 MiB on a GPU; simulated, that would take long.
  DeviceGroup(Api& api, int size)
      : arena_bytes(api.simulated() ? kBurstBytes : 64 << 20),
        api_(api),
        size_(size),
        control_(api.make_stream()) {
    pinned_ = api.allocate_pinned(bytes());
    abort_ = reinterpret_cast<uint32_t*>(api.allocate_pinned(sizeof(uint32_t)));
    for (Rank rank = 0; rank < size; ++rank) {
      streams_.push_back(api.make_stream());
      memory_.push_back(api.allocate(bytes()));
    }
    begin(std::chrono::nanoseconds(0));
    api.load_kernels();
  }

  // Anew, as after an operation that failed. Kernels wait so long for a rank; 0: for ever.
  void begin(std::chrono::nanoseconds patience) {
    patience_ = patience;
    *abort_ = 0;
    std::memset(pinned_, 0, bytes());
    for (std::byte* const memory : memory_) copy(memory, pinned_, bytes());
  }

  const uint64_t arena_bytes;  // of a rank, for inputs, and as much for outputs
  std::byte* output(Rank rank) const { return arena(rank) + arena_bytes; }
  int size() const { return size_; }
  Stream stream(Rank rank) const { return streams_[static_cast<size_t>(rank)]; }
  Members members(Rank rank, int blocks) const {
    Members members{.rank = rank, .n_ranks = size_, .blocks = blocks, .flags = {}};
    for (Rank peer = 0; peer < size_; ++peer) {
      members.flags[peer] = reinterpret_cast<Flags*>(memory(peer));
    }
    members.abort = abort_;
    members.patience = static_cast<uint64_t>(patience_.count());
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
  void abort() { std::atomic_ref(*abort_).store(1); }
  void finish() { require(wait() == 0, "kernels wait for one another in vain"); }
  // Waits for all streams; returns why kernels have ended early. Those that never do are told to.
  uint32_t wait() {
    std::atomic<bool> done{false};
    std::thread watch([&] {
      const Deadline deadline(kPatience);
      while (!done && !deadline.passed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (!done) abort();
    });
    for (const Stream stream : streams_) api_.synchronize(stream);
    done = true;
    watch.join();
    return std::atomic_ref(*abort_).load();
  }

 private:
  static constexpr uint64_t kFlags = (sizeof(Flags) + 4095) / 4096 * 4096;

  uint64_t bytes() const {
    return kFlags + 2 * kOneShotWindow + lines() + 2 * arena_bytes + kRingBytes;
  }
  uint64_t lines() const { return 2 * static_cast<uint64_t>(size_) * low_latency_bytes(size_) * 2; }
  std::byte* slots(Rank rank) const { return output(rank) + arena_bytes; }
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
  std::chrono::nanoseconds patience_{};
  std::vector<Stream> streams_;
  std::vector<std::byte*> memory_;
};

void run(Api& api, DeviceGroup& group, const Step& step, Rank rank, std::byte* in, std::byte* out) {
  Member(group, step, rank, in, out).run([&](const auto& args) {
    api.launch(group.stream(rank), args);
  });
}

// A burst of operations on operands of their own, enqueued rank by rank.
void check_burst(Api& api, DeviceGroup& group, const std::vector<Step>& steps) {
  constexpr uint64_t kRoom = kBurstBytes / kBurst;
  const auto at = [&](Rank rank, size_t number, bool output) {
    return (output ? group.output(rank) : group.arena(rank)) + number * kRoom;
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
      const Step& step = steps[number];
      require_same(group.read(at(rank, number, true), wanted.size()), wanted,
                   str(to_string(step.shape.collective), " by ", to_string(step.kernel), ", ",
                       to_string(step.what.dtype), ' ', to_string(step.what.op), ", rank ", rank));
    }
  }
}

// Operations of up to `longest` bytes; 0: of a few elements.
void check(Api& api, DeviceGroup& group, int operations, uint64_t seed, uint64_t longest) {
  Random random(seed);
  for (int first = 0; first < operations; first += kBurst) {
    std::vector<Step> steps;
    for (int i = 0; i < kBurst; ++i) {
      const Algorithm kernel = kKernels[random.below(kKernels.size())];
      steps.push_back(make_step(random, group.size(), kernel, longest));
    }
    check_burst(api, group, steps);
  }
  std::printf("pass\t%d random %s operations by %d ranks, bit for bit\n", operations,
              longest == 0 ? "short" : "long", group.size());
}

void check_numbers(Api& api, DeviceGroup& group) {
  int pairs = 0;
  for (const Pair& pair : possible_pairs()) {
    std::vector<Step> steps;
    for (const Algorithm kernel : kKernels) {
      steps.push_back(number_step(pair, group.size(), kernel));
    }
    check_burst(api, group, steps);
    ++pairs;
  }
  std::printf(
      "pass\tevery number of 8 and 16 bits, and special ones: %d types and operations by "
      "%d ranks, bit for bit\n",
      pairs, group.size());
}

// An all_reduce of float32, without inputs.
Step plain_step(const DeviceGroup& group, Algorithm kernel, uint64_t bytes) {
  Step step{kernel, {}, {DType::kFloat32, ReduceOp::kSum, group.size(), 1}, 1, 1 << 30, {}, {}, {}};
  step.shape.collective = kAllReduce;
  step.shape.size = group.size();
  step.shape.element = 4;
  step.shape.bytes = bytes;
  const auto ranks = static_cast<size_t>(group.size());
  step.lengths.assign(ranks, std::vector<uint64_t>(ranks));
  const DeviceLink link = link_of(true, 90, 128 / group.size());
  step.blocks = blocks_of(kernel, blocks_for(step.shape, link));
  return step;
}

// The last rank does not come. Kernels of the others end by themselves, and say for whom they
// waited; or they end when the host tells them to.
void check_absence(Api& api, DeviceGroup& group) {
  const Rank last = group.size() - 1;
  const auto without_last = [&](Algorithm kernel) {
    const Step step = plain_step(group, kernel, 4096);
    for (Rank rank = 0; rank < last; ++rank) {
      run(api, group, step, rank, group.arena(rank), group.output(rank));
    }
  };
  for (const Algorithm kernel : kKernels) {
    group.begin(std::chrono::milliseconds(api.simulated() && last > 1 ? 1000 : 100));
    without_last(kernel);
    const uint32_t word = group.wait();
    require(word >= kGaveUp, to_string(kernel), ": kernels do not give up: ", word);
    const auto named = static_cast<Rank>(word - kGaveUp);
    // In a ring each waits for its neighbour.
    require(kernel == kByRing ? named <= last : named == last, to_string(kernel),
            " has waited for rank ", named, ", and rank ", last, " does not come");
    group.begin(std::chrono::nanoseconds(0));
    without_last(kernel);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    group.abort();
    require(group.wait() == 1, to_string(kernel), ": another word than that of the host");
  }
  group.begin(std::chrono::nanoseconds(0));
  std::printf("pass\tkernels of %d ranks end where the last does not come\n", group.size());
}

// Ranks launch on threads of their own, as processes would.
double seconds_of(Api& api, DeviceGroup& group, const Step& step, int times) {
  const auto go = [&](int count) {
    run_threads(group.size(), [&](Rank rank) {
      const OnDevice here(api, 0);
      for (int i = 0; i < count; ++i) {
        run(api, group, step, rank, group.arena(rank), group.output(rank));
      }
    });
    group.finish();
  };
  go(5);
  const auto begin = Clock::now();
  go(times);
  return std::chrono::duration<double>(Clock::now() - begin).count() / times;
}

// The time of one, whose results are then compared.
double checked_seconds(Api& api, DeviceGroup& group, Step& step, int times) {
  set_wanted(step);
  for (Rank rank = 0; rank < group.size(); ++rank) {
    group.write(group.arena(rank), step.inputs[static_cast<size_t>(rank)]);
    group.write(group.output(rank), Bytes(step.shape.bytes, std::byte{0x5a}));
  }
  const double seconds = seconds_of(api, group, step, times);
  for (Rank rank = 0; rank < group.size(); ++rank) {
    require_same(group.read(group.output(rank), step.shape.bytes),
                 step.outputs[static_cast<size_t>(rank)],
                 str("what is timed: ", step.shape.bytes, " bytes by ", to_string(step.kernel),
                     ", rank ", rank));
  }
  return seconds;
}

// The time in which a device moves what all ranks read and write in an all_reduce: as many bytes as
// copies of each rank's input do.
double bound_seconds(Api& api, DeviceGroup& group, uint64_t bytes, int times) {
  const Stream stream = group.stream(0);
  const auto go = [&](int count) {
    for (int i = 0; i < count; ++i) api.copy(stream, group.output(0), group.arena(0), bytes);
    api.synchronize(stream);
  };
  go(5);
  const auto begin = Clock::now();
  go(times);
  const std::chrono::duration<double> took = Clock::now() - begin;
  return group.size() * took.count() / times;
}

void time_all(Api& api, DeviceGroup& group, int times) {
  std::vector<Bytes> all;
  Inputs inputs;
  for (Rank rank = 0; rank < group.size(); ++rank) {
    all.push_back(inputs.make(DType::kFloat32, group.arena_bytes / 4));
  }
  for (uint64_t bytes = 1 << 10; bytes <= group.arena_bytes; bytes *= 4) {
    for (const Algorithm kernel : kKernels) {
      if (room_of(kernel, group.size(), bytes) < bytes) continue;
      Step step = plain_step(group, kernel, bytes);
      for (const Bytes& input : all) step.inputs.push_back(slice(input, 0, bytes));
      const double seconds = checked_seconds(api, group, step, times);
      const bool short_one = kernel == kByOneShot && bytes == 64 << 10;
      std::printf("info\tall_reduce of %llu B by %d ranks, %s\t%.2f\tµs\t%s\tlaunches included\n",
                  static_cast<unsigned long long>(bytes), group.size(), to_string(kernel),
                  seconds * 1e6, short_one ? "≤ 10" : "");
      if (kernel != kByTwoShot || bytes < kLong) continue;
      std::printf("info\ttwo_shot of %llu B by %d ranks, of the bound by bytes\t%.0f\t%%\t≥ 80\t\n",
                  static_cast<unsigned long long>(bytes), group.size(),
                  100 * bound_seconds(api, group, bytes, times) / seconds);
    }
  }
}

int run_program(int argc, char** argv) {
  require(argc >= 3, "gpu_kernels LIBRARY RANKS [OPERATIONS [SEED]]");
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // results are printed, even before a crash
  Api& api = open(argv[1]);
  DeviceGroup group(api, std::stoi(argv[2]));
  const int operations = argc > 3 ? std::stoi(argv[3]) : 10'000;
  const uint64_t seed = argc > 4 ? std::stoull(argv[4]) : 1;
  check(api, group, operations, seed, 0);
  check(api, group, operations / 50, seed, kBurstBytes / kBurst);
  check_numbers(api, group);
  check_absence(api, group);
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
