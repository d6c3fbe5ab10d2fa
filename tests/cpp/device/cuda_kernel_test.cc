// The kernels of one rank, for itself or as a leader, as the host runs them: against
// ringcomm::reduce(), bit for bit.
#include "kernel_harness.h"

namespace ringcomm::testing {
namespace {

using cuda::LeaderArgs;
using cuda::LeaderSlot;
using cuda::Who;

// `run` gets the operands, of as many ranks as there are inputs; all must hold afterwards what they
// should. Some outputs are inputs, too; of some ranks only one gets the result.
void check_operands(const Bytes& wanted, const std::vector<Bytes>& inputs, const Reduction& math,
                    size_t variant, const std::function<void(LeaderArgs&)>& run) {
  const std::string name = str(to_string(math.dtype), ' ', to_string(math.op), ", ", inputs.size(),
                               " sources of ", wanted.size(), " bytes, variant ", variant);
  std::vector<Bytes> contents = inputs;
  const size_t n = inputs.size(), apart = variant % (n + 1);  // ranks whose output is no input
  contents.resize(n + apart, Bytes(wanted.size(), std::byte{0x5a}));
  std::vector<Placed> placed = place(contents, math.dtype, variant / 4);
  std::vector<LeaderSlot> slots(n);
  std::vector<bool> written(placed.size());
  LeaderArgs args{};
  args.reduction = math;
  args.call = args.parts = 1;
  args.rank = -1;  // all have slots
  args.n_ranks = static_cast<int>(n);
  args.root = static_cast<int>(variant % n);
  args.to = variant % 3 == 0 ? Who::kRoot : Who::kAll;
  args.length[0] = args.unit = wanted.size();
  for (size_t rank = 0; rank < n; ++rank) {
    const size_t to = rank < apart ? n + rank : rank;
    slots[rank] = {reinterpret_cast<uint64_t>(placed[rank].data()),
                   reinterpret_cast<uint64_t>(placed[to].data()), 0, 1};
    args.slot[rank] = &slots[rank];
    written[to] = args.to == Who::kAll || static_cast<int>(rank) == args.root;
  }
  run(args);
  for (size_t i = 0; i < placed.size(); ++i) {
    require(placed[i].intact(), name, ": wrote outside");
    require_same(placed[i].content(), written[i] ? wanted : contents[i], name);
  }
}

void every_pair_equals_reduce() {
  Inputs inputs;
  size_t variant = 0;
  for (const Pair& pair : possible_pairs()) {
    for (const size_t sources : {1, 2, 3, 4, 5, 8}) {
      for (const size_t count : {0, 1, 7, 16, 33, 1000}) {
        std::vector<Bytes> made(sources);
        for (Bytes& bytes : made) bytes = inputs.make(pair.dtype, count);
        for (int repeat = 0; repeat < 3; ++repeat, ++variant) {
          const int ranks = variant % 11 == 0 ? 200 : static_cast<int>(sources);
          const Reduction what{pair.dtype, pair.op, ranks, 1};
          check_operands(reduced(what, made), made, what, variant, [](LeaderArgs& args) {
            sim::Memory memory;
            sim::run_leader(args, memory);
          });
        }
      }
    }
  }
}

// Whose inputs a leader's kernel reads, and whose outputs it writes.
struct Pattern {
  const char* name;
  Who from, to;
  bool input_is_split, output_is_split;

  bool sums() const { return from == Who::kAll; }
  bool splits() const { return input_is_split || output_is_split; }
};
constexpr Pattern kPatterns[] = {
    {"all_reduce", Who::kAll, Who::kAll, false, false},
    {"reduce", Who::kAll, Who::kRoot, false, false},
    {"reduce_scatter", Who::kAll, Who::kPart, true, false},
    {"broadcast", Who::kRoot, Who::kAll, false, false},
    {"all_gather", Who::kPart, Who::kAll, false, true},
    {"gather", Who::kPart, Who::kRoot, false, true},
    {"scatter", Who::kRoot, Who::kPart, true, false},
};

// The operands of all ranks, where every third one's are staged.
struct LeaderCase {
  LeaderCase(const Pattern& pattern, const Pair& pair, size_t ranks, size_t variant)
      : pattern(pattern), what{pair.dtype, pair.op, static_cast<int>(ranks), 1} {
    Inputs inputs(static_cast<uint32_t>(variant));
    const uint64_t element = size_of(pair.dtype);
    args.reduction = pattern.sums() ? what : copy_math(element);
    args.call = 1 + variant;
    args.n_ranks = static_cast<int>(ranks);
    args.parts = pattern.splits() ? args.n_ranks : 1;
    args.root = static_cast<int>(variant % ranks);
    args.rank = static_cast<int>(variant / 2 % ranks);
    args.from = pattern.from, args.to = pattern.to;
    args.input_is_split = pattern.input_is_split, args.output_is_split = pattern.output_is_split;
    args.unit = (1 + variant % 40) * 16;
    uint64_t whole = 0;
    for (int part = 0; part < args.parts; ++part) {
      args.first[part] = whole;
      args.length[part] = (variant * 7 + static_cast<size_t>(part) * 5) % 90 * element;
      whole += args.length[part];
    }
    for (size_t rank = 0; rank < ranks; ++rank) {
      const uint64_t mine = args.length[pattern.splits() ? rank : 0];
      made.push_back(inputs.make(pair.dtype, (pattern.input_is_split ? whole : mine) / element));
      const Bytes none((pattern.output_is_split ? whole : mine), std::byte{0x5a});
      in.emplace_back(made.back(), element * (variant % 3));
      out.emplace_back(none, element * (variant % 2));
      wanted.push_back(none);
      const size_t room = args.unit * (pattern.splits() ? ranks + 1 : 1);
      windows.emplace_back(Bytes(room, std::byte{0}), 0);
    }
    slots.resize(ranks);
    for (int part = 0; part < args.parts; ++part) expect(part);
  }

  static Reduction copy_math(uint64_t element) {
    Reduction math{};
    math.op = ReduceOp::kBor;
    math.dtype = element == 1   ? DType::kUint8
                 : element == 2 ? DType::kUint16
                 : element == 4 ? DType::kUint32
                                : DType::kUint64;
    return math;
  }
  bool concerns(Who who, size_t rank, int part) const {
    return who == Who::kAll || static_cast<int>(rank) == (who == Who::kRoot ? args.root : part);
  }
  // Where a part is in a rank's side.
  uint64_t at(bool is_split, int part) const { return is_split ? args.first[part] : 0; }

  void expect(int part) {
    std::vector<Bytes> sources;
    const uint64_t length = args.length[part];
    for (size_t rank = 0; rank < made.size(); ++rank) {
      const std::byte* const from = made[rank].data() + at(args.input_is_split, part);
      if (concerns(args.from, rank, part)) sources.emplace_back(from, from + length);
    }
    const Bytes result = pattern.sums() ? reduced(what, sources) : sources.at(0);
    for (size_t rank = 0; rank < made.size(); ++rank) {
      if (!concerns(args.to, rank, part)) continue;
      std::copy(result.begin(), result.end(),
                wanted[rank].begin() + static_cast<ptrdiff_t>(at(args.output_is_split, part)));
    }
  }

  static bool staged(size_t rank) { return rank % 3 == 2; }
  uint64_t in_window(bool is_split, int part) const {
    if (is_split) return static_cast<uint64_t>(part) * args.unit;
    return pattern.splits() ? static_cast<uint64_t>(args.parts) * args.unit : 0;
  }
  void fill_slots(uint64_t call) {
    for (size_t rank = 0; rank < slots.size(); ++rank) {
      const auto window = reinterpret_cast<uint64_t>(windows[rank].data());
      slots[rank] = {reinterpret_cast<uint64_t>(in[rank].data()),
                     reinterpret_cast<uint64_t>(out[rank].data()), 0, call};
      if (staged(rank)) {
        slots[rank] = {window + (args.input_is_split ? 0 : in_window(false, 0)),
                       window + (args.output_is_split ? 0 : in_window(false, 0)), 1, call};
      }
      args.slot[rank] = &slots[rank];
    }
    args.own = slots[static_cast<size_t>(args.rank)];
    args.own.call = 0;  // no kernel looks at it
  }

  // Copies pieces of this round into windows, or back.
  void stage(bool back) {
    for (size_t rank = 0; rank < made.size(); ++rank) {
      const bool is_split = back ? args.output_is_split : args.input_is_split;
      for (int part = 0; staged(rank) && part < args.parts; ++part) {
        const bool mine = pattern.splits() && !is_split;
        const uint64_t length = args.length[mine ? static_cast<int>(rank) : part];
        if ((mine && part > 0) || args.round >= length) continue;
        if (back && !concerns(args.to, rank, mine ? static_cast<int>(rank) : part)) continue;
        std::byte* const window = windows[rank].data() + in_window(is_split, part);
        const uint64_t first = at(is_split, part) + args.round;
        const uint64_t bytes = std::min(args.unit, length - args.round);
        back ? std::memcpy(out[rank].data() + first, window, bytes)
             : std::memcpy(window, in[rank].data() + first, bytes);
      }
    }
  }

  void run() {
    const uint64_t longest = *std::max_element(args.length, args.length + args.parts);
    for (args.round = 0; args.round < longest; args.round += args.unit) {
      stage(false);
      sim::Memory memory;
      sim::run_leader(args, memory);
      stage(true);
    }
  }
  void check(bool ran) {
    const std::string name = str(pattern.name, ' ', to_string(what.dtype), ' ', to_string(what.op),
                                 ", ", made.size(), " ranks, call ", args.call);
    for (size_t rank = 0; rank < made.size(); ++rank) {
      require(in[rank].intact() && out[rank].intact() && windows[rank].intact(), name,
              ": wrote outside");
      require_same(in[rank].content(), made[rank], name);
      const Bytes untouched(wanted[rank].size(), std::byte{0x5a});
      if (ran || !staged(rank))
        require_same(out[rank].content(), ran ? wanted[rank] : untouched, name);
    }
  }

  const Pattern pattern;
  const Reduction what;
  LeaderArgs args{};
  std::vector<Bytes> made, wanted;
  std::vector<Placed> in, out, windows;
  std::vector<LeaderSlot> slots;
};

// Some are aborted, and in some a slot is of another call: then nothing is touched.
void leader_equals_reduce() {
  size_t variant = 0;
  for (const Pair& pair : possible_pairs()) {
    for (const size_t ranks : {1, 2, 3, 4, 5, 8}) {
      for (const Pattern& pattern : kPatterns) {
        LeaderCase test(pattern, pair, ranks, ++variant);
        const uint32_t abort = variant % 11 == 0;
        const bool strange =
            variant % 13 == 0 && ranks > 1 && pattern.sums() && pattern.to == Who::kAll;
        test.args.abort = &abort;
        test.fill_slots(test.args.call);
        if (strange) test.slots[(test.args.rank + 1u) % ranks].call = 0;
        test.run();
        test.check(abort == 0 && !strange);
      }
    }
  }
}

// The threads of a block, all at once.
void several_threads() {
  sim::Memory memory;
  Inputs inputs;
  const Reduction what{DType::kFloat32, ReduceOp::kSum, 3, 1};
  const std::vector<Bytes> made(3, inputs.make(what.dtype, 500));
  const Bytes wanted = reduced(what, made);
  for (size_t variant = 0; variant < 12; ++variant) {
    check_operands(wanted, made, what, variant, [&](LeaderArgs& args) {
      for (int block = 0; block < 2; ++block) sim::run_block(args, block, 2, memory, 4);
    });
  }
}

void blocks_fill_the_device() {
  using cuda::blocks_for;
  require(blocks_for(0, 132) == 1 && blocks_for(1, 132) == 1, "a small operation takes one block");
  require(blocks_for(16 * cuda::kThreads + 1, 132) == 2, "then one for every thread's 16 bytes");
  require(blocks_for(uint64_t{1} << 40, 132) == 3 * 132, "a large one all that fit");
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  using namespace ringcomm::testing;
  return run_checks({{"blocks_fill_the_device", blocks_fill_the_device},
                     {"every_pair_equals_reduce", every_pair_equals_reduce},
                     {"leader_equals_reduce", leader_equals_reduce},
                     {"several_threads", several_threads}},
                    argc, argv);
}
