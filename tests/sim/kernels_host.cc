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

constexpr int kThreads = kMostRanks;

// What the threads of a block share. With several members, they wait for each other.
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
  void each(const F& f) {
    if (shared_.members > 1) return f(member_);
    for (int thread = 0; thread < kThreads; ++thread) f(thread);
  }
  template <class F>
  bool all(const F& f) {
    each([&](int thread) { shared_.refusals += !f(thread); });
    sync();
    const bool everybody = shared_.refusals == 0;
    sync();  // nobody is at the next one before all looked
    return everybody;
  }
  void sync() {
    if (shared_.members > 1 && memory_.in_step(++syncs_)) shared_.meeting.arrive_and_wait();
  }

  template <class T>
  T load(const std::byte* at) {
    access(at);
    T value;
    __builtin_memcpy(&value, at, sizeof(value));
    return value;
  }
  template <class T>
  void store(std::byte* at, const T& value) {
    access(at);
    __builtin_memcpy(at, &value, sizeof(value));
  }
  void store_release(uint32_t* flag, uint32_t value) { memory_.store_release(flag, value); }
  uint32_t load_acquire(const uint32_t* flag) { return memory_.load_acquire(flag); }
  void pause() { memory_.pause(); }

 private:
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
void two_shot_on_host(Context& context, const TwoShotArgs& args, uint64_t element_bytes) {
  two_shot_body<Codec, Op>(context, args, element_bytes);
}

struct Kernel {
  BySources<void (*)(Context&, const LeaderArgs&, uint64_t)> reduce;
  void (*two_shot)(Context&, const TwoShotArgs&, uint64_t);
};
using KernelTable = TableOf<Kernel>;

template <class Codec, class Op>
constexpr Kernel kernel_of() {
  const auto any = reduce_on_host<Codec, Op, 0>;
  const auto two_shot = two_shot_on_host<Codec, Op>;
  if constexpr (kWorthIt<Codec, Op>) {
    return {{any, any, reduce_on_host<Codec, Op, 2>, reduce_on_host<Codec, Op, 4>,
             reduce_on_host<Codec, Op, 8>},
            two_shot};
  } else if constexpr (std::is_same_v<Op, Bor>) {
    return {{any, reduce_on_host<Codec, Op, 1>, any, any, any}, two_shot};
  } else {
    return {{any, any, any, any, any}, two_shot};
  }
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
  return find(kKernels, args.reduction).reduce.of(args.from == Who::kAll ? args.n_ranks : 1);
}

}  // namespace
}  // namespace ringcomm::cuda

namespace ringcomm::sim {

using namespace cuda;

void run_leader(const LeaderArgs& args) {
  constexpr int kBlocks = 3;
  Memory memory;
  for (int i = 0; i < kBlocks * args.parts; ++i) {
    Shared shared(1);
    Context context(i % kBlocks, kBlocks, memory, shared, 0, i / kBlocks);
    kernel_for(args)(context, args, size_of(args.reduction.dtype));
  }
}

void run_two_shot(const TwoShotArgs& args) {
  Memory memory;
  for (int block = 0; block < args.blocks; ++block) run_block(args, block, memory);
}

void run_block(const TwoShotArgs& args, int block, Memory& memory, int members) {
  Shared shared(members);
  on_members(members, [&](int member) {
    Context context(block, args.blocks, memory, shared, member);
    find(kKernels, args.reduction).two_shot(context, args, size_of(args.reduction.dtype));
  });
}

void run_block(const LeaderArgs& args, int block, int blocks, Memory& memory, int members) {
  Shared shared(members);
  on_members(members, [&](int member) {
    Context context(block, blocks, memory, shared, member);
    kernel_for(args)(context, args, size_of(args.reduction.dtype));
  });
}

}  // namespace ringcomm::sim
