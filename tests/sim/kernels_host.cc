#include "sim/kernels_host.h"

#include <barrier>
#include <type_traits>
#include <vector>

#include "device/api.h"
#include "reduce/kernels.h"

namespace ringcomm::cuda {
namespace {

#include "cuda/codecs.inc.h"
#include "cuda/kernels.inc.h"
#include "cuda/meetings.inc.h"
#include "cuda/ring.inc.h"

constexpr int kThreads = kMostRanks;

// The parts that the threads of a block share. With several members, they wait for each other.
struct Shared {
  explicit Shared(int size) : members(size), meeting(size) {}
  const int members;
  Operands operands{};
  std::barrier<> meeting;
  std::atomic<int> refusals{0};  // of all(): a block that was refused once does nothing more
};

class Context {
 public:
  Context(int block, int blocks, sim::Memory& memory, Shared& shared, int member, int part = 0)
      : block_(block),
        blocks_(blocks),
        part_(part),
        memory_(memory),
        shared_(shared),
        member_(member) {}

  int part() const { return part_; }
  int block() const { return block_; }
  int blocks() const { return blocks_; }
  int threads() const { return shared_.members > 1 ? shared_.members : kThreads; }
  Operands& operands() { return shared_.operands; }

  template <class F>
  void for_each_thread(const F& f) {
    if (shared_.members > 1) return f(member_);
    for (int thread = 0; thread < kThreads; ++thread) f(thread);
  }
  template <class F>
  bool all(const F& f) {
    for_each_thread([&](int thread) { shared_.refusals += !f(thread); });
    sync();
    const bool everybody = shared_.refusals == 0;
    sync();  // nobody is at the next one before all looked
    return everybody;
  }
  void sync() {
    if (shared_.members > 1 && memory_.in_step(++syncs_)) shared_.meeting.arrive_and_wait();
  }

  template <class T>
  [[gnu::always_inline]] T load(const std::byte* at) {  // or else GCC 12 fails at it
    access(at);
    T value;
    memory_.load(at, &value, sizeof(value));
    return value;
  }
  template <class T>
  void store(std::byte* at, const T& value) {
    access(at);
    memory_.store(at, &value, sizeof(value));
  }
  void store_release(uint32_t* flag, uint32_t value) { memory_.store_release(flag, value); }
  uint32_t load_acquire(const uint32_t* flag) { return memory_.load_acquire(flag); }
  void store_lines(std::byte* at, const Lines& lines) {
    for (int i = 0; i < 4; ++i) memory_.store_line(line_at(at, i), lines.line[i]);
  }
  Lines load_lines(const std::byte* at) {
    Lines lines;
    for (int i = 0; i < 4; ++i) lines.line[i] = memory_.load_line(line_at(at, i));
    return lines;
  }
  void pause() { memory_.pause(); }
  uint64_t nanoseconds() { return memory_.nanoseconds(); }

 private:
  static uint64_t* line_at(const std::byte* at, int i) {
    return reinterpret_cast<uint64_t*>(const_cast<std::byte*>(at)) + i;
  }
  void access(const std::byte* at) {
    constexpr uintptr_t kNobodys = 1 << 16;
    if (reinterpret_cast<uintptr_t>(at) < kNobodys) {
      throw DeviceError("an illegal memory access was encountered");
    }
    memory_.touch();
  }

  const int block_, blocks_, part_;
  sim::Memory& memory_;
  Shared& shared_;
  const int member_;
  int syncs_ = 0;
};

template <class Codec, class Op, int kSources>
void reduce_on_host(Context& context, const LeaderArgs& args, uint64_t element_bytes) {
  reduce_body<Codec, Op, kSources>(context, args, element_bytes);
}

template <class Codec, class Op>
void on_host(Context& context, const TwoShotArgs& args, uint64_t element_bytes) {
  two_shot_body<Codec, Op, 0>(context, args, element_bytes);
}
template <class Codec, class Op>
void on_host(Context& context, const OneShotArgs& args, uint64_t element_bytes) {
  one_shot_body<Codec, Op>(context, args, element_bytes);
}
template <class Codec, class Op>
void on_host(Context& context, const LowLatencyArgs& args, uint64_t element_bytes) {
  low_latency_body<Codec, Op>(context, args, element_bytes);
}
template <class Codec, class Op>
void on_host(Context& context, const RingArgs& args, uint64_t element_bytes) {
  ring_body<Codec, Op, 0>(context, args, element_bytes);
}

struct Kernel {
  BySources<void (*)(Context&, const LeaderArgs&, uint64_t)> reduce;
  void (*two_shot)(Context&, const TwoShotArgs&, uint64_t);
  void (*one_shot)(Context&, const OneShotArgs&, uint64_t);
  void (*low_latency)(Context&, const LowLatencyArgs&, uint64_t);
  void (*ring)(Context&, const RingArgs&, uint64_t);

  void run(Context& context, const TwoShotArgs& args, uint64_t element) const {
    two_shot(context, args, element);
  }
  void run(Context& context, const OneShotArgs& args, uint64_t element) const {
    one_shot(context, args, element);
  }
  void run(Context& context, const LowLatencyArgs& args, uint64_t element) const {
    low_latency(context, args, element);
  }
  void run(Context& context, const RingArgs& args, uint64_t element) const {
    ring(context, args, element);
  }
};
using KernelTable = TableOf<Kernel>;

template <class Codec, class Op>
constexpr Kernel kernel_of() {
  const auto any = reduce_on_host<Codec, Op, 0>;
  Kernel kernel{{any, any, any, any, any},
                on_host<Codec, Op>,
                on_host<Codec, Op>,
                on_host<Codec, Op>,
                on_host<Codec, Op>};
  if constexpr (kWorthIt<Codec, Op>) {
    kernel.reduce.from_2 = reduce_on_host<Codec, Op, 2>;
    kernel.reduce.from_4 = reduce_on_host<Codec, Op, 4>;
    kernel.reduce.from_8 = reduce_on_host<Codec, Op, 8>;
  } else if constexpr (std::is_same_v<Op, Bor>) {
    kernel.reduce.from_1 = reduce_on_host<Codec, Op, 1>;
  }
  return kernel;
}

template <class Codec, class Op, int kUnit = 1>
constexpr Kernel kKernel = kernel_of<CodecFor<Codec, Op>, OpFor<Codec, Op>>();

#include "reduce/table.inc.h"

constinit const KernelTable kKernels = all_kernels();

// Runs body(member) on as many threads as there are members.
template <class F>
void on_members(int members, const F& body) {
  std::vector<std::thread> others;
  for (int member = 1; member < members; ++member) others.emplace_back(body, member);
  body(0);
  for (std::thread& other : others) other.join();
}

auto kernel_for(const LeaderArgs& args) {
  return find(kKernels, args.reduction).reduce.of(sources_of(args));
}

const Reduction& reduction_of(const TwoShotArgs& args) { return args.part.reduction; }
const Reduction& reduction_of(const RingArgs& args) { return args.chunks.reduction; }

void run(Context& context, const auto& args, const Reduction& what) {
  find(kKernels, what).run(context, args, size_of(what.dtype));
}
const Reduction& reduction_of(const auto& args) { return args.exchange.reduction; }

}  // namespace
}  // namespace ringcomm::cuda

namespace ringcomm::sim {

using namespace cuda;

void run_leader(const LeaderArgs& args, Memory& memory) {
  constexpr int kBlocks = 3;
  for (int i = 0; i < kBlocks * args.parts; ++i) {
    Shared shared(1);
    Context context(i % kBlocks, kBlocks, memory, shared, 0, i / kBlocks);
    kernel_for(args)(context, args, size_of(args.reduction.dtype));
  }
}

template <class Args>
void run_blocks(const Args& args, Memory& memory) {
  for (int block = 0; block < args.members.blocks; ++block) run_block(args, block, memory);
}
template void run_blocks(const TwoShotArgs&, Memory&);
template void run_blocks(const OneShotArgs&, Memory&);
template void run_blocks(const LowLatencyArgs&, Memory&);
template void run_blocks(const RingArgs&, Memory&);

template <class Args>
void run_block(const Args& args, int block, Memory& memory, int members) {
  const Reduction& what = reduction_of(args);
  Shared shared(members);
  on_members(members, [&](int member) {
    Context context(block, args.members.blocks, memory, shared, member);
    run(context, args, what);
  });
}
template void run_block(const TwoShotArgs&, int, Memory&, int);
template void run_block(const OneShotArgs&, int, Memory&, int);
template void run_block(const LowLatencyArgs&, int, Memory&, int);
template void run_block(const RingArgs&, int, Memory&, int);

void run_block(const LeaderArgs& args, int block, int blocks, Memory& memory, int members) {
  Shared shared(members);
  on_members(members, [&](int member) {
    Context context(block, blocks, memory, shared, member);
    kernel_for(args)(context, args, size_of(args.reduction.dtype));
  });
}

}  // namespace ringcomm::sim
