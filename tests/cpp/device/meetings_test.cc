// The kernels of ranks that have a device each, with ranks and blocks as threads: against
// ringcomm::reduce(), bit for bit; and their meetings.
//
//   meetings_test [FILTER]            the checks
//   meetings_test --random N SEED     so many operations by random kernels, one after the other
//   meetings_test --broken HOW        must fail:
//     relaxed    flags that order nothing: ThreadSanitizer must report it
//     parity     two-shot: one flag where two take turns
//     first      two-shot: no meeting before the reduction
//     second     two-shot: no meeting after it
//     step       one-shot: a block's threads do not wait for each other
//     windows    one-shot: one window where two take turns
//     lines      low latency: one half of the lines where two take turns
//     torn       low latency: a flag comes before its data
//     flagless   low latency: no flag comes
//     unread     ring: kernels do not wait until a slot is read
//     unfilled   ring: kernels do not wait until a slot is full
//     unreleased-K, unacquired-K    a flag of K, of those in kFences, without its fence
#include <csignal>

#include "meetings_steps.h"
#include "weak_memory.h"

namespace ringcomm::testing {
namespace {

using MakeMemory = std::function<std::unique_ptr<sim::Memory>(uint64_t seed)>;

using MakeStep = std::function<Step(Random& random, int number)>;

// Operation after operation on the same memory; blocks one after the other, or all at once.
void operations(MeetingGroup& group, uint64_t seed, int steps, const MakeStep& make_step,
                const MakeMemory& make_memory, int members = 1) {
  run_threads(group.size(), [&](Rank rank) {
    Random shared(seed), own(seed * 100 + static_cast<uint64_t>(rank));
    for (int number = 0; number < steps; ++number) {
      const Step step = make_step(shared, number);
      const Bytes& wanted = step.outputs[static_cast<size_t>(rank)];
      const uint64_t element = step.shape.element;
      const bool halves = element == 16;  // complex numbers need no more than their halves do
      const auto shift = [&] { return own.below(3) * element / (halves ? 2 : 1); };
      Placed input(step.inputs[static_cast<size_t>(rank)], shift());
      Placed output(Bytes(wanted.size()), shift());
      const bool same = step.shape.collective == kAllReduce && own.below(2) != 0;
      Placed& to = same ? input : output;
      const bool at_once = own.below(4) == 0;
      try {
        Member(group, step, rank, input.data(), to.data()).run([&](const auto& args) {
          const uint64_t jitter = own.next();
          const auto run = [&](int block) {
            const auto memory = make_memory(jitter + static_cast<uint64_t>(block));
            sim::run_block(args, block, *memory, members);
          };
          if (at_once) return run_threads(args.members.blocks, run);
          for (int block = 0; block < args.members.blocks; ++block) run(block);
        });
        require(input.intact() && output.intact(), "wrote outside");
        require_same(to.content(), wanted,
                     str("operation ", number, ", ", to_string(step.shape.collective), " by ",
                         to_string(step.kernel), ", rank ", rank));
      } catch (const std::exception&) {
        group.abort();
        throw;
      }
    }
  });
}

MakeStep steps_of(int size, Algorithm kernel) {
  return [=](Random& random, int) { return make_step(random, size, kernel); };
}

MakeStep steps_of_all(int size) {
  return [=](Random& random, int) {
    return make_step(random, size, kKernels[below(random, kKernels.size())]);
  };
}

std::unique_ptr<sim::Memory> jittery(uint64_t seed) { return std::make_unique<Jittery>(seed); }

// The epochs of lines go round: 0 is no epoch.
void epochs_wrap() {
  MeetingGroup group(3);
  for (Rank rank = 0; rank < 3; ++rank) {
    Flags& flags = group.flags(rank);
    std::ranges::fill(flags.low_latency, UINT32_MAX - 5);
    for (BarrierFlags& barrier : flags.two_shot) barrier.epoch = UINT32_MAX - 4;
    for (BarrierFlags& barrier : flags.one_shot) barrier.epoch = UINT32_MAX - 4;
  }
  operations(group, 11, 40, steps_of_all(3), jittery);
}

// By the model of links: see benchmarks/README.md.
void links_and_lengths_decide() {
  const auto chosen = [](Collective collective, int size, uint64_t bytes, const DeviceLink& link) {
    Shape shape;
    shape.collective = collective;
    shape.size = size;
    (sharded(collective) ? shape.shards : shape.send).assign(static_cast<size_t>(size), bytes);
    shape.recv = shape.send;
    shape.bytes = bytes;
    return kernel_for(shape, link, 64 << 20);
  };
  const DeviceLink h100 = link_of(true, 90, 132), pcie = link_of(false, 90, 132);
  const auto expect = [&](Collective collective, int size, uint64_t bytes, const DeviceLink& link,
                          Algorithm kernel) {
    const Algorithm actual = chosen(collective, size, bytes, link);
    require(actual == kernel, to_string(collective), " of ", bytes, " B by ", size, ": ",
            to_string(actual), " and not ", to_string(kernel));
  };
  expect(kAllReduce, 8, 15 << 10, h100, kByLowLatency);
  expect(kAllReduce, 8, 17 << 10, h100, kByOneShot);
  expect(kAllReduce, 8, 83 << 10, h100, kByOneShot);
  expect(kAllReduce, 8, 84 << 10, h100, kByTwoShot);
  expect(kAllReduce, 2, kOneShotWindow, h100, kByOneShot);
  expect(kAllReduce, 2, kOneShotWindow + 4, h100, kByTwoShot);
  expect(kAllReduce, 32, 3 << 10, h100, kByLowLatency);
  expect(kReduceScatter, 8, 15 << 10, h100, kByLowLatency);
  expect(kReduceScatter, 8, 33 << 10, h100, kByTwoShot);  // a window has no room for the input
  expect(kAllGather, 8, 1 << 20, h100, kByTwoShot);
  expect(kBarrier, 8, 0, h100, kByLowLatency);
  expect(kAllToAll, 8, 64, h100, kHandOver);
  expect(kAllToAll, 8, 64, pcie, kByCopies);
  expect(kGather, 8, 64 << 20, pcie, kByCopies);
  for (const Collective collective :
       {kAllReduce, kReduceScatter, kAllGather, kBroadcast, kReduce}) {
    expect(collective, 8, 64 << 20, pcie, kByRing);
    expect(collective, 8, 64 << 20, h100, kByTwoShot);
  }
  expect(kAllReduce, 2, 4 << 10, pcie, kByLowLatency);
}

// A slot that says another call: ranks touch nothing, and end when they are let go.
void another_call_is_refused() {
  MeetingGroup group(2);
  Random random(5);
  Step step = make_step(random, 2, kByTwoShot);
  while (step.shape.collective != kAllReduce || step.shape.bytes == 0) {
    step = make_step(random, 2, kByTwoShot);
  }
  step.unit = 1 << 20;
  std::vector<Bytes> out(2, Bytes(step.shape.bytes, std::byte{42}));
  const Bytes before = out[0];
  std::atomic<int> refused{0};
  run_threads(2, [&](Rank rank) {
    const auto at = static_cast<size_t>(rank);
    Member(group, step, rank, step.inputs[at].data(), out[at].data()).run([&](const auto& args) {
      auto mine = args;
      if constexpr (requires { mine.part; }) {
        mine.part.call += static_cast<uint64_t>(rank);
        for (LeaderSlot& slot : mine.given) slot.call = mine.part.call;
      }
      Jittery memory(9);
      sim::run_block(mine, 0, memory);
      if (++refused == 2) group.abort();
    });
  });
  require(out[0] == before && out[1] == before, "a result of two calls");
}

// One rank dies at its every access in turn. The others finish, or they return and touch nothing
// more. False when the rank finished before that access.
bool others_return(Algorithm kernel, int size, int last) {
  MeetingGroup group(size);
  Random random(3);
  Step step = make_step(random, size, kernel);
  while (step.shape.collective != kAllReduce || step.shape.bytes == 0) {
    step = make_step(random, size, kernel);
  }
  step.blocks = std::min(step.blocks, 2);
  step.unit = 1 << 20;
  std::vector<Bytes> out(step.outputs.size(), Bytes(step.shape.bytes));
  std::atomic<int> accesses{0}, aborted{0}, finished{0};
  run_threads(size * step.blocks, [&](Rank index) {
    const Rank rank = index % size;
    const auto at = static_cast<size_t>(rank);
    Member(group, step, rank, step.inputs[at].data(), out[at].data()).run([&](const auto& args) {
      if (rank == size - 1) {
        Dying memory(accesses, last);
        try {
          sim::run_block(args, index / size, memory);
        } catch (const Died&) {
          group.abort();
        }
        return;
      }
      Watching memory(args.members.abort);
      sim::run_block(args, index / size, memory);
      // Each thread of that kernel waits for itself: others may be storing data that has come.
      require(memory.later == 0 || kernel == kByLowLatency, "touched memory after it was aborted");
      ++(memory.aborted ? aborted : finished);
    });
  });
  const int others = (size - 1) * step.blocks;
  require(finished + aborted == others, "somebody is missing");
  for (size_t rank = 0; finished == others && rank + 1 < out.size(); ++rank) {
    require_same(out[rank], step.outputs[rank], "finished");
  }
  return accesses > last;
}

void a_rank_that_dies_holds_nobody(Algorithm kernel) {
  int last = 0;
  while (others_return(kernel, 3, last)) last += 1 + last / 16;
  require(last > 20, "only ", last, " accesses");
}

// Which threads overtake which is up to the machine, so a broken kernel may get away with one seed.
void broken_operations(const std::string& how, uint64_t seed) {
  constexpr int kRanks = 3, kSteps = 150;
  MeetingGroup group(kRanks, how == "windows", how == "lines");
  const bool hasty = how == "unread" || how == "unfilled";
  const auto make = [&](uint64_t jitter) -> std::unique_ptr<sim::Memory> {
    if (how == "relaxed") return std::make_unique<Relaxed>(jitter);
    if (how == "first") return std::make_unique<Skipping>(jitter, 1);
    if (how == "second") return std::make_unique<Skipping>(jitter, 0);
    if (how == "step") return std::make_unique<OutOfStep>(jitter);
    if (how == "torn") return std::make_unique<Torn>(jitter);
    if (how == "flagless") return std::make_unique<Flagless>(jitter);
    const auto with_all = [&](auto memory) {
      for (Rank rank = 0; rank < kRanks; ++rank) memory->all.push_back(&group.flags(rank));
      return memory;
    };
    if (hasty) return with_all(std::make_unique<Hasty>(jitter, how == "unfilled"));
    if (how == "parity") return with_all(std::make_unique<OneParity>(jitter));
    return std::make_unique<Jittery>(jitter, std::chrono::seconds(3));
  };
  const bool lines = how == "lines" || how == "torn" || how == "flagless";
  const bool windows = how == "windows" || how == "step";
  const Algorithm kernel = hasty     ? kByRing
                           : lines   ? kByLowLatency
                           : windows ? kByOneShot
                                     : kByTwoShot;
  operations(group, seed, kSteps, steps_of(kRanks, kernel), make, how == "step" ? 3 : 1);
}

// The flags of a kernel whose fences weak memory needs.
struct Fence {
  const char* name;
  Algorithm kernel;
  bool releases, acquires;  // which of both a result depends on within the kernel
  std::function<bool(Flags& flags, const uint32_t* flag, uint32_t value)> is;
};

bool is_of(const BarrierFlags& barrier, const uint32_t* flag) {
  return flag >= barrier.flag[0] && flag < barrier.flag[0] + 2 * cuda::kMostRanks;
}

// Two-shot begins its meetings with odd epochs. Nothing is loaded after its second one, and after a
// slot of the ring was read.
const std::array<Fence, 4> kFences{{
    {"first", kByTwoShot, true, true,
     [](Flags& flags, const uint32_t* flag, uint32_t epoch) {
       return epoch % 2 == 1 && std::ranges::any_of(flags.two_shot, [&](const auto& barrier) {
                return is_of(barrier, flag);
              });
     }},
    {"second", kByTwoShot, true, false,
     [](Flags& flags, const uint32_t* flag, uint32_t epoch) {
       return epoch % 2 == 0 && std::ranges::any_of(flags.two_shot, [&](const auto& barrier) {
                return is_of(barrier, flag);
              });
     }},
    {"window", kByOneShot, true, true,
     [](Flags& flags, const uint32_t* flag, uint32_t) {
       return std::ranges::any_of(flags.one_shot,
                                  [&](const auto& barrier) { return is_of(barrier, flag); });
     }},
    {"slot", kByRing, true, true,
     [](Flags& flags, const uint32_t* flag, uint32_t) {
       return std::ranges::any_of(flags.ring,
                                  [&](const auto& ring) { return flag == &ring.filled; });
     }},
}};

// Operations on weak memory, of which one fence is left out or none.
void weak_operations(int size, uint64_t seed, int steps, const MakeStep& make,
                     const Fence* left_out = nullptr, bool release = false) {
  MeetingGroup group(size);
  History history;
  Unfenced unfenced{left_out != nullptr && release, left_out != nullptr && !release, {}};
  unfenced.at = [&](const uint32_t* flag, uint32_t value) {
    for (Rank rank = 0; rank < size; ++rank) {
      if (left_out->is(group.flags(rank), flag, value)) return true;
    }
    return false;
  };
  operations(group, seed, steps, make,
             [&](uint64_t jitter) { return std::make_unique<Weak>(jitter, history, unfenced); });
}

// "unreleased-first": leaves that fence out.
bool is_unfenced(const std::string& how, uint64_t seed) {
  for (const Fence& fence : kFences) {
    const bool release = how == str("unreleased-", fence.name);
    if (!release && how != str("unacquired-", fence.name)) continue;
    if (!(release ? fence.releases : fence.acquires)) continue;
    weak_operations(3, seed, 60, steps_of(3, fence.kernel), &fence, release);
    return true;
  }
  return false;
}

// A broken two-shot may take an address before it has come, or after its operand is gone. Then the
// processor or the allocator notices before the comparison of results does.
void report_fault(int) {
  constexpr std::string_view kText = "caught: went to memory that nobody had given it\n";
  ::_exit(::write(STDOUT_FILENO, kText.data(), kText.size()) > 0 ? 1 : 2);
}

int broken(const std::string& how) {
  for (const int signal : {SIGSEGV, SIGBUS, SIGABRT}) std::signal(signal, &report_fault);
  const uint64_t seeds = how == "relaxed" ? 1 : 20;  // ThreadSanitizer reports at the end
  try {
    for (uint64_t seed = 1; seed <= seeds; ++seed) {
      if (!is_unfenced(how, seed)) broken_operations(how, seed);
    }
  } catch (const std::exception& error) {
    std::printf("caught: %s\n", error.what());
    return 1;
  }
  return 0;
}

std::vector<Check> all_checks() {
  std::vector<Check> checks;
  for (const Algorithm kernel : kKernels) {
    for (const int size : {1, 2, 3, 4, 8}) {
      checks.push_back({str(to_string(kernel), "/", size), [=] {
                          MeetingGroup group(size);
                          operations(group, 7, 100, steps_of(size, kernel), jittery);
                        }});
    }
    checks.push_back({str("a_rank_that_dies_holds_nobody/", to_string(kernel)),
                      [=] { a_rank_that_dies_holds_nobody(kernel); }});
    checks.push_back({str("several_threads/", to_string(kernel)), [=] {
                        MeetingGroup group(2);
                        operations(group, 3, 25, steps_of(2, kernel), jittery, 3);
                      }});
  }
  checks.push_back({"weak_memory/2", [] { weak_operations(2, 3, 100, steps_of_all(2)); }});
  checks.push_back({"weak_memory/4", [] { weak_operations(4, 4, 100, steps_of_all(4)); }});
  checks.push_back({"mixed/4", [] {
                      MeetingGroup group(4);
                      operations(group, 5, 300, steps_of_all(4), jittery);
                    }});
  checks.push_back({"epochs_wrap", epochs_wrap});
  checks.push_back({"links_and_lengths_decide", links_and_lengths_decide});
  checks.push_back({"another_call_is_refused", another_call_is_refused});
  return checks;
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  using namespace ringcomm::testing;
  if (argc == 3 && std::string(argv[1]) == "--broken") return broken(argv[2]);
  if (argc == 4 && std::string(argv[1]) == "--random") {
    constexpr int kRanks = 4;
    MeetingGroup group(kRanks);
    operations(group, std::stoull(argv[3]), std::stoi(argv[2]), steps_of_all(kRanks), jittery);
    std::printf("ok %s operations\n", argv[2]);
    return 0;
  }
  return run_checks(all_checks(), argc, argv);
}
