// The kernels, for a device and, as its simulation, for the host. All their accesses to memory go
// through a Context (kernels_device.inc.h; tests/sim/kernels_host.h), which has
//   block(), blocks(), threads()      where this is, and of how many; threads at least one a rank
//   part()                            of an operation's parts the one that these blocks do
//   operands()                        memory that the threads of a block share
//   each(f)                           f(thread) on every thread of the block
//   all(f)                            the same and, after sync(), whether f was true for all
//   sync()                            what was done before it by any thread of the block is done
//   load<T>(at), store(at, value)     16 bytes, or less, aligned to alignof(T)
//   store_release(), load_acquire()   of a flag that another device, or the host, looks at
//   pause()                           between two looks at a flag
// Included in an unnamed namespace inside ringcomm::cuda, after cuda/codecs.inc.h. Functions are
// constexpr because nvcc takes such ones for the device, too (--expt-relaxed-constexpr).

struct alignas(16) Wide {
  uint32_t words[4];
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
  constexpr Memory finish(const Job& job) {
    Register registers[kRegisters];
    for (int r = 0; r < kRegisters; ++r) {
      for (int p = 0; p < Codec::kParts; ++p) parts[r][p] = Op::finish(parts[r][p], job);
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
constexpr void combine(Context& context, const Job& job, uint64_t offset, uint64_t stride) {
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
    result[0] = total.template finish<Op>(job);
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
      result[u] = total.template finish<Op>(job);
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

// One thread's share of what is counted: first, first + step, ...
struct Share {
  uint64_t first, step;
};

template <class Codec, class Op, int kSources, class Context>
constexpr void sweep(Context& context, const Job& job, Range range, Share share) {
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
      combine<Codec, Op, kSources, Wide, kUnroll>(context, job, offset, step * sizeof(Wide));
    }
  }
  for (; at < pieces; at += step) {
    combine<Codec, Op, kSources, Wide, 1>(context, job, middle + at * sizeof(Wide), 0);
  }
  for (at = share.first; at < range.count - body; at += step) {
    const uint64_t element = at < head ? at : at + body;
    combine<Codec, Op, 0, Stored, 1>(context, job, start + element * sizeof(Stored), 0);
  }
}

constexpr Job job_of(const Reduction& reduction) {
  Job job{};
  job.ranks = reduction.op == ReduceOp::kAvg ? reduction.ranks : 1;
  return job;
}

// Operands of a part. False: touch nothing. The abort word is read after the slots: the leader sets
// it before it goes on without its peers.
constexpr bool set_part(auto& context, const LeaderArgs& args, int part) {
  const int sources = args.from == Who::kAll ? args.n_ranks : 1;
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
    return context.template load<LeaderSlot>(reinterpret_cast<const std::byte*>(args.slot[rank]));
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

template <class Codec, class Op, int kSources, class Context>
constexpr void reduce_body(Context& context, const LeaderArgs& args, uint64_t element_bytes) {
  using Stored = typename Codec::Stored;
  const int part = args.begin + context.part();
  const uint64_t length = args.length[part], round = args.round;
  if (round >= length || !set_part(context, args, part)) return;
  const uint64_t bytes = length - round < args.unit ? length - round : args.unit;
  const Job job = job_of(args.reduction);
  const Range range{0, bytes / element_bytes * (element_bytes / sizeof(Stored))};
  const uint64_t threads = context.threads();
  context.each([&](int thread) {
    const Share share{context.block() * threads + thread, context.blocks() * threads};
    sweep<Codec, Op, kSources>(context, job, range, share);
  });
}

// Blocks of equal index of all ranks meet. Their writes before it are visible to all after it.
// A flag is set to the epoch, which is one higher at every meeting, in one of two places in turn: a
// fast peer may be at the next meeting before this rank looks at the flag of this one, but at the
// one after that only when this rank came to the next. False: aborted.
constexpr bool meet(auto& context, const TwoShotArgs& args, uint32_t epoch) {
  const int block = context.block(), rank = args.rank;
  context.sync();
  context.each([&](int peer) {
    if (peer >= args.n_ranks) return;
    context.store_release(&args.flags[peer]->flag[epoch % 2][block][rank], epoch);
  });
  return context.all([&](int peer) {
    if (peer >= args.n_ranks) return true;
    const uint32_t* const flag = &args.flags[rank]->flag[epoch % 2][block][peer];
    for (uint32_t looks = 1; context.load_acquire(flag) != epoch; ++looks) {
      if (looks % 1024 == 0 && context.load_acquire(args.abort) != 0) return false;
      context.pause();
    }
    return true;
  });
}

// The part of one block in a rank's slice of `count` elements. Slices and parts are whole pieces
// of 16 bytes, but for the end.
template <class Stored>
constexpr Range part_of(uint64_t count, const TwoShotArgs& args, int rank, int block) {
  constexpr uint64_t kPiece = sizeof(Wide) / sizeof(Stored);
  const uint64_t ranks = args.n_ranks, blocks = args.blocks;
  const uint64_t slice = (count + ranks * kPiece - 1) / (ranks * kPiece) * kPiece;
  const uint64_t part = (slice + blocks * kPiece - 1) / (blocks * kPiece) * kPiece;
  const uint64_t slice_end = slice * (rank + 1), end = slice_end < count ? slice_end : count;
  const uint64_t first = slice * rank + part * block, next = first + part;
  return {first, first >= end ? 0 : (next < end ? next : end) - first};
}

// Two meetings are enough for an operation and for the one after it:
//  - Other ranks' blocks read and write this rank's window between their two meetings only, and
//    there only the part of their slice that has their index.
//  - They do so after the first meeting: all of that part is published, by the block of the same
//    index; and before the second: when that is over, the result is whole where this block reads.
//  - The next operation overwrites the window from its beginning. Its kernel runs after this one,
//    in one stream: after the second meetings of all of this rank's blocks, so after all that other
//    ranks do with this window. It may divide the window otherwise, among more or fewer blocks.
//  - Others write this window in the next operation after its first meeting, so after this kernel.
// An aborted block returns before its next access of any memory; the epoch stays, and the flags
// are of no more use.
template <class Codec, class Op, class Context>
constexpr void two_shot_body(Context& context, const TwoShotArgs& args, uint64_t element_bytes) {
  using Stored = typename Codec::Stored;
  Operands& operands = context.operands();
  const uint64_t count = args.count * element_bytes / sizeof(Stored);
  const uint64_t threads = context.threads();
  const int block = context.block(), rank = args.rank, ranks = args.n_ranks;
  const Job job = job_of(args.reduction);
  uint32_t& last_epoch = args.flags[rank]->epoch[block];
  const uint32_t epoch = last_epoch;
  for (int step = 0; step < 3; ++step) {
    if (step > 0 && !meet(context, args, epoch + step)) return;
    const bool reduces = step == 1;
    const int n = reduces ? ranks : 1;
    // All threads were at a sync() since the block read the operands before.
    context.each([&](int i) {
      if (i == 0) operands.n_srcs = operands.n_dsts = n;
      if (i >= n) return;
      // Every rank writes to itself first, so that not all write to one at once.
      operands.src[i] = step == 0 ? args.input : args.window[reduces ? i : rank];
      operands.dst[i] = step == 2 ? args.output : args.window[reduces ? (rank + i) % ranks : rank];
    });
    context.sync();
    context.each([&](int thread) {
      const Share share{static_cast<uint64_t>(thread), threads};
      if (reduces) {
        sweep<Codec, Op, 0>(context, job, part_of<Stored>(count, args, rank, block), share);
        return;
      }
      for (int slice = 0; slice < ranks; ++slice) {
        const Range part = part_of<Stored>(count, args, slice, block);
        sweep<Bits<Stored>, Bor, 1>(context, job, part, share);
      }
    });
  }
  context.each([&](int thread) {
    if (thread == 0) last_epoch = epoch + 2;
  });
}

// The table's entry, null if the pair is impossible.
template <class Entry>
const Entry& find(const TableOf<Entry>& table, const Reduction& what) {
  return table.reduce[static_cast<int>(what.dtype)][static_cast<int>(what.op)];
}

// The entry of one pair. Common pairs have functions of their own for 2, 4 and 8 sources, and what
// copies has one for 1.
template <class Function>
struct BySources {
  Function any, one, two, four, eight;

  Function of(int sources) const {
    if (sources == 1) return one;
    return sources == 2 ? two : sources == 4 ? four : sources == 8 ? eight : any;
  }
};

template <class Codec, class Op>
inline constexpr bool kWorthIt =
    Op::kHot && !std::is_same_v<Codec, Widened<typename Codec::Stored>>;
