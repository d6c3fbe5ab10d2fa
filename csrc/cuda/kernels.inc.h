// The kernels, for a device and, as its simulation, for the host. All their accesses to memory go
// through a Context (kernels_device.inc.h; tests/sim/kernels_host.h), which has
//   block(), blocks(), threads()      this one's place, and their numbers: a thread for each rank
//   part()                            the part of an operation that these blocks do
//   operands()                        memory that the threads of a block share
//   for_each_thread(f)                f(thread) on every thread of the block
//   all(f)                            the same and, after sync(), whether f was true for all
//   sync()                            all that the block's threads did before it is done
//   load<T>(at), store(at, value)     16 bytes, or less, aligned to alignof(T)
//   store_release(), load_acquire()   of a flag that another device, or the host, looks at
//   store_lines(), load_lines()       two times 8 bytes that another device writes; each is whole
//   pause()                           between two looks at a flag
//   nanoseconds()                     of a clock that the threads of a device share
// Included in an unnamed namespace inside ringcomm::cuda, after cuda/codecs.inc.h. Functions are
// constexpr because nvcc takes such ones for the device, too (--expt-relaxed-constexpr).

struct alignas(16) Wide {
  uint32_t words[4];
};
struct alignas(16) Lines {
  uint64_t line[4];
};

// The numbers in 16 bytes, or in one element, which is the lowest of its register.
template <class Codec, class Memory>
struct Numbers {
  using Register = typename Codec::template Register<1>;
  static constexpr int kRegisters = (sizeof(Memory) + sizeof(Register) - 1) / sizeof(Register);
  typename Codec::Acc parts[kRegisters][Codec::kParts];

  constexpr explicit Numbers(Memory memory) {
    Register registers[kRegisters]{};
    __builtin_memcpy(registers, &memory, sizeof(memory));
    for (int r = 0; r < kRegisters; ++r) Codec::decode(registers[r], parts[r]);
  }

  template <class Op>
  constexpr void apply(const Numbers& next) {
    for (int r = 0; r < kRegisters; ++r) {
      for (int p = 0; p < Codec::kParts; ++p) {
        parts[r][p] = Op::apply(parts[r][p], next.parts[r][p]);
      }
    }
  }

  template <class Op>
  constexpr Memory finish(const ReduceArgs& args) {
    Register registers[kRegisters];
    for (int r = 0; r < kRegisters; ++r) {
      for (int p = 0; p < Codec::kParts; ++p) parts[r][p] = Op::finish(parts[r][p], args);
      registers[r] = Codec::encode(parts[r]);
    }
    Memory memory;
    __builtin_memcpy(&memory, registers, sizeof(memory));
    return memory;
  }
};

struct Operands {
  int32_t n_srcs, n_dsts;
  const std::byte* src[kMostRanks];
  std::byte* dst[kMostRanks];
};

// kUnroll times the size of Memory, `stride` bytes from one another. All loads come first where
// the number of sources is known (not 0), so that all are under way at once; in any case before
// the stores, so that a destination may be a source.
template <class Codec, class Op, int kSources, class Memory, int kUnroll, class Context>
constexpr void combine(Context& context, const ReduceArgs& args, uint64_t offset, uint64_t stride) {
  const Operands& operands = context.operands();
  Memory result[kUnroll];
  if constexpr (kSources == 0) {
    static_assert(kUnroll == 1);
    Numbers<Codec, Memory> total(context.template load<Memory>(operands.src[0] + offset));
#pragma unroll(sizeof(Memory) == 16 ? 4 : 1)
    for (int s = 1; s < operands.n_srcs; ++s) {
      const Numbers<Codec, Memory> next(context.template load<Memory>(operands.src[s] + offset));
      total.template apply<Op>(next);
    }
    result[0] = total.template finish<Op>(args);
  } else {
    Memory raw[kSources][kUnroll];
    for (int s = 0; s < kSources; ++s) {
      const std::byte* const src = operands.src[s] + offset;
      for (int u = 0; u < kUnroll; ++u) raw[s][u] = context.template load<Memory>(src + u * stride);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      Numbers<Codec, Memory> total(raw[0][u]);
      for (int s = 1; s < kSources; ++s) {
        total.template apply<Op>(Numbers<Codec, Memory>(raw[s][u]));
      }
      result[u] = total.template finish<Op>(args);
    }
  }
  for (int d = 0; d < operands.n_dsts; ++d) {
    std::byte* const dst = operands.dst[d] + offset;
    for (int u = 0; u < kUnroll; ++u) context.store(dst + u * stride, result[u]);
  }
}

// Elements [first, first + count) of each operand.
struct Range {
  uint64_t first, count;
};

// A range has a body: the elements that all operands have in pieces of 16 aligned bytes. `head` is
// the number of elements before it. There is no body if operands are misaligned differently.
struct Split {
  uint64_t head, body;
};

template <class Stored>
constexpr Split split(const Operands& operands, Range range) {
  const auto address = [&](const std::byte* operand) {
    return reinterpret_cast<uintptr_t>(operand) + range.first * sizeof(Stored);
  };
  const uintptr_t start = address(operands.src[0]);
  uintptr_t difference = start % sizeof(Stored);
  for (int s = 1; s < operands.n_srcs; ++s) difference |= address(operands.src[s]) ^ start;
  for (int d = 0; d < operands.n_dsts; ++d) difference |= address(operands.dst[d]) ^ start;
  const uint64_t head = (-start % sizeof(Wide)) / sizeof(Stored);
  if (difference % sizeof(Wide) != 0 || head >= range.count) return {0, 0};
  constexpr uint64_t kPiece = sizeof(Wide) / sizeof(Stored);
  return {head, (range.count - head) / kPiece * kPiece};
}

// One thread's share of elements, or of pieces: first, first + step, ...
struct Share {
  uint64_t first, step;
};

template <class Codec, class Op, int kSources, class Context>
constexpr void sweep(Context& context, const ReduceArgs& args, Range range, Share share) {
  using Stored = typename Codec::Stored;
  // Loads of 16 bytes under way on a thread. Numbers of 8 bits need many registers for their sums.
  constexpr int kLoads = sizeof(Stored) == 1 ? 4 : 8;
  constexpr int kUnroll = kSources == 0 || kSources > kLoads ? 1 : kLoads / kSources;
  const auto [head, body] = split<Stored>(context.operands(), range);
  const uint64_t start = range.first * sizeof(Stored), middle = start + head * sizeof(Stored);
  const uint64_t pieces = body * sizeof(Stored) / sizeof(Wide), step = share.step;
  uint64_t at = share.first;
  if constexpr (kUnroll > 1) {
    for (; at + (kUnroll - 1) * step < pieces; at += kUnroll * step) {
      const uint64_t offset = middle + at * sizeof(Wide);
      combine<Codec, Op, kSources, Wide, kUnroll>(context, args, offset, step * sizeof(Wide));
    }
  }
  for (; at < pieces; at += step) {
    combine<Codec, Op, kSources, Wide, 1>(context, args, middle + at * sizeof(Wide), 0);
  }
  for (at = share.first; at < range.count - body; at += step) {
    const uint64_t element = at < head ? at : at + body;
    combine<Codec, Op, 0, Stored, 1>(context, args, start + element * sizeof(Stored), 0);
  }
}

constexpr ReduceArgs reduce_args_of(const Reduction& reduction) {
  ReduceArgs args{};
  args.ranks = reduction.op == ReduceOp::kAvg ? reduction.ranks : 1;
  return args;
}

constexpr int sources_of(const LeaderArgs& args) {
  return args.from == Who::kAll ? args.n_ranks : 1;
}

// Operands of a part. False: touch nothing. The abort word is read after the slots: the leader sets
// it before it goes on without its peers.
constexpr bool set_part(auto& context, const LeaderArgs& args, int part, const auto& slot_at) {
  const int sources = sources_of(args);
  const int targets = args.to == Who::kAll ? args.n_ranks : 1;
  const uint64_t call = args.call != 0 ? args.call : args.length[part];
  const auto rank_of = [&](Who who, int i) {
    return who == Who::kAll ? i : who == Who::kRoot ? args.root : part;
  };
  const auto slot_of = [&](int rank) {
    if (rank == args.rank) {
      LeaderSlot own = args.own;
      own.call = call;
      return own;
    }
    return context.template load<LeaderSlot>(reinterpret_cast<const std::byte*>(slot_at(rank)));
  };
  const auto place = [&](const LeaderSlot& slot, uint64_t base, bool is_split) {
    if (slot.staged) return base + (is_split ? part * args.unit : 0);
    return base + args.round + (is_split ? args.first[part] : 0);
  };
  Operands& operands = context.operands();
  const auto set = [&](int thread) {
    bool agrees = true;
    if (thread == 0) operands.n_srcs = sources, operands.n_dsts = targets;
    if (thread < sources) {
      const LeaderSlot slot = slot_of(rank_of(args.from, thread));
      const uint64_t at = place(slot, slot.input, args.input_is_split);
      operands.src[thread] = bits_as<const std::byte*>(at);
      agrees = slot.call == call;
    }
    if (thread < targets) {
      const LeaderSlot slot = slot_of(rank_of(args.to, thread));
      const uint64_t at = place(slot, slot.output, args.output_is_split);
      operands.dst[thread] = bits_as<std::byte*>(at);
      agrees = agrees && slot.call == call;
    }
    return agrees;
  };
  const auto goes_on = [&](int thread) {
    return thread != 0 || args.abort == nullptr || context.load_acquire(args.abort) == 0;
  };
  return context.all(set) && context.all(goes_on);
}

// False: the operands are not those of this operation.
template <class Codec, class Op, int kSources, class Context>
constexpr bool reduce_part(Context& context, const LeaderArgs& args, uint64_t element_bytes,
                           const auto& slot_at) {
  using Stored = typename Codec::Stored;
  const int part = args.begin + context.part();
  const uint64_t length = args.length[part], round = args.round;
  if (round >= length) return true;
  if (!set_part(context, args, part, slot_at)) return false;
  const uint64_t bytes = length - round < args.unit ? length - round : args.unit;
  const ReduceArgs reduce_args = reduce_args_of(args.reduction);
  const Range range{0, bytes / element_bytes * (element_bytes / sizeof(Stored))};
  const uint64_t threads = context.threads();
  context.for_each_thread([&](int thread) {
    const Share share{context.block() * threads + thread, context.blocks() * threads};
    sweep<Codec, Op, kSources>(context, reduce_args, range, share);
  });
  return true;
}

template <class Codec, class Op, int kSources, class Context>
constexpr void reduce_body(Context& context, const LeaderArgs& args, uint64_t element_bytes) {
  reduce_part<Codec, Op, kSources>(context, args, element_bytes,
                                   [&](int rank) { return args.slot[rank]; });
}

// The table's entry, null if the pair is impossible.
template <class Entry>
const Entry& find(const TableOf<Entry>& table, const Reduction& what) {
  return table.reduce[static_cast<int>(what.dtype)][static_cast<int>(what.op)];
}

// The entry of one pair. Common pairs have functions of their own for 2, 4 and 8 sources, and pairs
// that copy have one for 1.
template <class Function>
struct BySources {
  Function any, from_1, from_2, from_4, from_8;

  Function of(int sources) const {
    if (sources == 1) return from_1;
    return sources == 2 ? from_2 : sources == 4 ? from_4 : sources == 8 ? from_8 : any;
  }
  void for_each(const auto& f) const { f(any), f(from_1), f(from_2), f(from_4), f(from_8); }
};

template <class Codec, class Op>
inline constexpr bool kWorthIt =
    Op::kHot && !std::is_same_v<Codec, Widened<typename Codec::Stored>>;
