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
#include "device/kernels_for.h"
#include "kernel_harness.h"

namespace ringcomm::testing {
namespace {

using namespace cuda;
using enum Collective;

constexpr std::array kKernels{kByTwoShot, kByOneShot, kByLowLatency};

// What all ranks do at one time, known to each from a seed.
struct Step {
  Algorithm kernel;
  Shape shape;  // but all_to_all's lengths
  Reduction what;
  int blocks;
  uint64_t unit;                              // of two-shot's rounds
  std::vector<std::vector<uint64_t>> lengths;  // all_to_all: from, to
  std::vector<Bytes> inputs, outputs;          // wanted
};

uint64_t below(Random& random, uint64_t limit) { return random.below(limit); }

std::vector<uint64_t> some_lengths(Random& random, int size, uint64_t element) {
  std::vector<uint64_t> lengths;
  for (Rank rank = 0; rank < size; ++rank) lengths.push_back(below(random, 40) * element);
  return lengths;
}

Bytes slice(const Bytes& bytes, uint64_t first, uint64_t count) {
  const auto begin = bytes.begin() + static_cast<ptrdiff_t>(first);
  return {begin, begin + static_cast<ptrdiff_t>(count)};
}

void append(Bytes& bytes, const Bytes& more) {
  bytes.insert(bytes.end(), more.begin(), more.end());
}

// Each rank's output.
void set_wanted(Step& step) {
  const Shape& shape = step.shape;
  const auto& in = step.inputs;
  const auto root = static_cast<size_t>(shape.root);
  step.outputs.assign(in.size(), {});
  for (size_t at = 0; at < in.size(); ++at) {
    Bytes& out = step.outputs[at];
    const auto rank = static_cast<Rank>(at);
    switch (shape.collective) {
      case kAllReduce: out = reduced(step.what, in); break;
      case kReduce: out = at == root ? reduced(step.what, in) : Bytes(); break;
      case kReduceScatter:
        out = slice(reduced(step.what, in), shape.shard_offset(rank), shape.shard(rank));
        break;
      case kBroadcast: out = in[root]; break;
      case kScatter: out = slice(in[root], shape.shard_offset(rank), shape.shard(rank)); break;
      case kAllGather:
      case kGather:
        for (const Bytes& each : in) {
          if (shape.collective == kAllGather || at == root) append(out, each);
        }
        break;
      case kAllToAll:
        for (size_t from = 0; from < in.size(); ++from) {
          const auto& sent = step.lengths[from];
          append(out, slice(in[from], offset_of(sent, rank), sent[at]));
        }
        break;
      case kBarrier: break;
    }
  }
}

uint64_t input_bytes(const Step& step, Rank rank) {
  const Shape& shape = step.shape;
  switch (shape.collective) {
    case kAllReduce:
    case kReduce: return shape.bytes;
    case kBroadcast: return rank == shape.root ? shape.bytes : 0;
    case kReduceScatter: return offset_of(shape.shards, shape.size);
    case kScatter: return rank == shape.root ? offset_of(shape.shards, shape.size) : 0;
    case kAllGather:
    case kGather: return shape.shard(rank);
    case kAllToAll: return offset_of(step.lengths[static_cast<size_t>(rank)], shape.size);
    case kBarrier: return 0;
  }
  return 0;
}

Step make_step(Random& random, int size, Algorithm kernel) {
  static const std::vector<Pair> pairs = possible_pairs();
  const Pair pair = pairs[below(random, pairs.size())];
  Step step{kernel, {}, {pair.dtype, pair.op, size, 1}, 1, 0, {}, {}, {}};
  Shape& shape = step.shape;
  shape.size = size;
  shape.element = size_of(pair.dtype);
  shape.root = static_cast<Rank>(below(random, static_cast<uint64_t>(size)));
  do {
    shape.collective = static_cast<Collective>(below(random, kCollectives));
  } while (kernel != kByLowLatency && (shape.collective == kAllToAll || shape.collective == kBarrier));
  const uint64_t most = below(random, 3) == 0 ? 3000 : 50;
  if (sharded(shape.collective)) {
    shape.shards = some_lengths(random, size, shape.element);
  } else {
    shape.bytes = below(random, most + 1) * shape.element;
  }
  for (Rank rank = 0; rank < size; ++rank) {
    step.lengths.push_back(some_lengths(random, size, shape.element));
  }
  step.blocks = kernel == kByTwoShot   ? 1 + static_cast<int>(below(random, 4))
                : kernel == kByOneShot ? kOneShotBlocks
                                       : kLowLatencyBlocks;
  step.unit = below(random, 2) == 0 ? 1 << 20 : 64 * shape.element;
  Inputs inputs(static_cast<uint32_t>(random.next()));
  for (Rank rank = 0; rank < size; ++rank) {
    step.inputs.push_back(inputs.make(pair.dtype, input_bytes(step, rank) / shape.element));
  }
  set_wanted(step);
  return step;
}

using MakeMemory = std::function<std::unique_ptr<sim::Memory>(uint64_t seed)>;

// A rank's operands, and how it does one step.
class Member {
 public:
  Member(MeetingGroup& group, const Step& step, Rank rank, std::byte* input, std::byte* output)
      : group_(group), step_(step), rank_(rank), input_(input), output_(output) {}

  void run(const auto& run_all) const {
    const bool reduces = ringcomm::reduces(step_.shape.collective);
    const Reduction what = reduces ? step_.what : copy_of(step_.shape.element);
    if (step_.kernel != kByTwoShot) {
      Shape shape = step_.shape;
      shape.send = step_.lengths[static_cast<size_t>(rank_)];
      for (const auto& sent : step_.lengths) shape.recv.push_back(sent[static_cast<size_t>(rank_)]);
      Exchange exchange = exchange_of(shape, rank_);
      exchange.reduction = what;
      exchange.input = input_;
      exchange.output = output_;
      if (step_.kernel == kByOneShot) return one_step(OneShotArgs(), exchange, run_all);
      return one_step(LowLatencyArgs(), exchange, run_all);
    }
    TwoShotArgs args{.members = group_.members(rank_, step_.blocks),
                     .part = parts_of(step_.shape, false),
                     .given = {}};
    LeaderArgs& part = args.part;
    part.reduction = what;
    part.call = 7;
    part.rank = part.begin = rank_;
    part.abort = args.members.abort;
    part.unit = step_.unit;
    part.parts = 1;
    part.own = {reinterpret_cast<uint64_t>(input_), reinterpret_cast<uint64_t>(output_), 0, 7};
    std::ranges::fill(args.given, part.own);
    const uint64_t longest = *std::max_element(part.length, part.length + group_.size());
    const uint64_t rounds = Segments{longest, step_.unit}.count();
    for (uint64_t round = 0; round < rounds; ++round) {
      part.round = round * step_.unit;
      run_all(args);
    }
  }

 private:
  template <class Args>
  void one_step(Args args, const Exchange& exchange, const auto& run_all) const {
    args.members = group_.members(rank_, step_.blocks);
    args.exchange = exchange;
    group_.set_memory(args);
    run_all(args);
  }

  MeetingGroup& group_;
  const Step& step_;
  const Rank rank_;
  std::byte *input_, *output_;
};

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
    for (Meetings& each : flags.two_shot) each.epoch = UINT32_MAX - 4;
    for (Meetings& each : flags.one_shot) each.epoch = UINT32_MAX - 4;
  }
  operations(group, 11, 40, steps_of_all(3), jittery);
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
      // Each thread of that kernel waits for itself: others may just store what has come.
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

int broken(const std::string& how) {
  constexpr int kRanks = 3, kSteps = 150;
  MeetingGroup group(kRanks, how == "windows", how == "lines");
  const auto make = [&](uint64_t seed) -> std::unique_ptr<sim::Memory> {
    if (how == "relaxed") return std::make_unique<Relaxed>(seed);
    if (how == "first") return std::make_unique<Skipping>(seed, 1);
    if (how == "second") return std::make_unique<Skipping>(seed, 0);
    if (how == "step") return std::make_unique<OutOfStep>(seed);
    if (how == "torn") return std::make_unique<Torn>(seed);
    if (how == "flagless") return std::make_unique<Flagless>(seed);
    if (how != "parity") return std::make_unique<Jittery>(seed, std::chrono::seconds(3));
    auto memory = std::make_unique<OneParity>(seed);
    for (Rank rank = 0; rank < kRanks; ++rank) memory->all.push_back(&group.flags(rank));
    return memory;
  };
  const bool lines = how == "lines" || how == "torn" || how == "flagless";
  const bool windows = how == "windows" || how == "step";
  const Algorithm kernel = lines ? kByLowLatency : windows ? kByOneShot : kByTwoShot;
  try {
    operations(group, 1, kSteps, steps_of(kRanks, kernel), make, how == "step" ? 3 : 1);
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
  checks.push_back({"mixed/4", [] {
                      MeetingGroup group(4);
                      operations(group, 5, 300, steps_of_all(4), jittery);
                    }});
  checks.push_back({"epochs_wrap", epochs_wrap});
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
