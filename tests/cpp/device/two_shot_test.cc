// The two-shot kernel against ringcomm::reduce(), bit for bit, with ranks and blocks as threads;
// and their meetings.
//
//   two_shot_test [FILTER]            the checks
//   two_shot_test --broken relaxed    flags that order nothing: ThreadSanitizer must report it
//   two_shot_test --broken parity     one flag where two take turns: must fail
//   two_shot_test --broken first      no meeting before the reduction: must fail
//   two_shot_test --broken second     no meeting after it: must fail
//   two_shot_test --broken step       a block's threads do not wait for each other before it
#include "kernel_harness.h"

namespace ringcomm::testing {
namespace {

using cuda::TwoShotArgs;

constexpr uint64_t kWindow = 16'000;

// What all ranks do at one time, known to each from a seed.
struct Step {
  Reduction what;
  uint64_t count;
  int blocks;
  std::vector<Bytes> inputs;

  static Step make(Random& random, int size, int most_blocks) {
    static const std::vector<Pair> pairs = possible_pairs();
    const Pair pair = pairs[random.below(pairs.size())];
    Step step{{pair.dtype, pair.op, size, 1}, 0, 1, {}};
    const uint64_t most = random.below(3) == 0 ? kWindow / size_of(pair.dtype) : 50;
    step.count = random.below(most + 1);
    step.blocks = 1 + static_cast<int>(random.below(static_cast<uint64_t>(most_blocks)));
    Inputs inputs(static_cast<uint32_t>(random.next()));
    for (Rank rank = 0; rank < size; ++rank) {
      step.inputs.push_back(inputs.make(pair.dtype, step.count));
    }
    return step;
  }
};

using MakeMemory = std::function<std::unique_ptr<sim::Memory>(uint64_t seed)>;

// Operation after operation on the same windows; blocks one after the other, or all at once.
void two_shot(TwoShotGroup& group, uint64_t seed, int steps, const MakeMemory& make_memory,
              int members = 1) {
  run_threads(group.size(), [&](Rank rank) {
    Random shared(seed), own(seed * 100 + static_cast<uint64_t>(rank));
    for (int number = 0; number < steps; ++number) {
      const Step step = Step::make(shared, group.size(), 4);
      Placed input(step.inputs[static_cast<size_t>(rank)], own.below(3) * size_of(step.what.dtype));
      Placed output(Bytes(input.content().size()), own.below(3) * size_of(step.what.dtype));
      Placed& to = own.below(2) ? input : output;
      TwoShotArgs args = group.args(rank);
      args.reduction = step.what;
      args.count = step.count;
      args.input = input.data();
      args.output = to.data();
      args.blocks = step.blocks;
      const bool at_once = own.below(2) != 0;
      try {
        const uint64_t jitter = own.next();
        const auto run = [&](int block) {
          const auto memory = make_memory(jitter + static_cast<uint64_t>(block));
          sim::run_block(args, block, *memory, members);
        };
        if (at_once) run_threads(step.blocks, run);
        for (int block = 0; block < step.blocks && !at_once; ++block) run(block);
        require(input.intact() && output.intact(), "wrote outside");
        require_same(to.content(), reduced(step.what, step.inputs), str("step ", number));
      } catch (const std::exception&) {
        group.abort();
        throw;
      }
    }
  });
}

void two_shot_equals_reduce(int size, uint64_t seed, int steps) {
  TwoShotGroup group(size, kWindow);
  two_shot(group, seed, steps, [](uint64_t own) { return std::make_unique<Jittery>(own); });
}

// One rank dies at its every access in turn. The others finish, or they return and touch nothing
// more, and their epoch stays. False when the rank finished before that access.
bool others_return(int size, int blocks, int last) {
  TwoShotGroup group(size, 400);
  Inputs inputs;
  const Reduction what{DType::kInt32, ReduceOp::kSum, size, 1};
  std::vector<Bytes> made(static_cast<size_t>(size)), out(made.size());
  for (Bytes& bytes : made) bytes = inputs.make(what.dtype, 40);
  for (Bytes& bytes : out) bytes.resize(made[0].size());
  const Bytes wanted = reduced(what, made);
  std::atomic<int> accesses{0}, aborted{0}, finished{0};
  run_threads(size * blocks, [&](Rank index) {
    const Rank rank = index % size;
    const size_t at = static_cast<size_t>(rank);
    TwoShotArgs args = group.args(rank);
    args.reduction = what;
    args.count = 40;
    args.input = made[at].data();
    args.output = out[at].data();
    args.blocks = blocks;
    if (rank == size - 1) {
      Dying memory(accesses, last);
      try {
        sim::run_block(args, index / size, memory);
      } catch (const Died&) {
        group.abort();
      }
      return;
    }
    Watching memory(args.abort);
    sim::run_block(args, index / size, memory);
    require(memory.later == 0, "touched memory after it was aborted");
    const uint32_t epoch = group.flags(rank).epoch[index / size];
    require(epoch == (memory.aborted ? 0 : 2), "epoch ", epoch);
    ++(memory.aborted ? aborted : finished);
  });
  if (finished == (size - 1) * blocks) {
    for (size_t rank = 0; rank + 1 < out.size(); ++rank)
      require_same(out[rank], wanted, "finished");
  }
  require(finished + aborted == (size - 1) * blocks, "somebody is missing");
  return accesses > last;
}

void a_rank_that_dies_holds_nobody(int size, int blocks) {
  int last = 0;
  while (others_return(size, blocks, last)) ++last;
  require(last > 50, "only ", last, " accesses");
}

int broken(const std::string& how) {
  constexpr int kRanks = 3, kSteps = 100;
  TwoShotGroup group(kRanks, kWindow);
  const auto make = [&](uint64_t seed) -> std::unique_ptr<sim::Memory> {
    if (how == "relaxed") return std::make_unique<Relaxed>(seed);
    if (how == "first") return std::make_unique<Skipping>(seed, 1);
    if (how == "second") return std::make_unique<Skipping>(seed, 0);
    if (how == "step") return std::make_unique<OutOfStep>(seed);
    auto memory = std::make_unique<OneParity>(seed);
    for (Rank rank = 0; rank < kRanks; ++rank) memory->all.push_back(&group.flags(rank));
    return memory;
  };
  try {
    two_shot(group, 1, kSteps, make, how == "step" ? 3 : 1);
  } catch (const std::exception& error) {
    std::printf("caught: %s\n", error.what());
    return 1;
  }
  return 0;
}

std::vector<Check> all_checks() {
  std::vector<Check> checks;
  for (const int size : {1, 2, 3, 4, 8}) {
    checks.push_back({str("two_shot/", size), [=] { two_shot_equals_reduce(size, 7, 150); }});
  }
  checks.push_back(
      {"two_shot/several_threads", [] {
         TwoShotGroup group(2, kWindow);
         two_shot(group, 3, 40, [](uint64_t own) { return std::make_unique<Jittery>(own); }, 3);
       }});
  for (const int blocks : {1, 2}) {
    checks.push_back({str("a_rank_that_dies_holds_nobody/", blocks),
                      [=] { a_rank_that_dies_holds_nobody(3, blocks); }});
  }
  return checks;
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  using namespace ringcomm::testing;
  if (argc == 3 && std::string(argv[1]) == "--broken") return broken(argv[2]);
  return run_checks(all_checks(), argc, argv);
}
