// The ring of ranks that have a device each: for links that do not bear that all talk to all at
// once. The two halves of Patarasuk and Yuan's all-reduce ("Bandwidth optimal all-reduce algorithms
// for clusters of workstations", 2009), as in plan/ring.cc. After cuda/meetings.inc.h.
//
// A rank writes into its successor's slots and tells it with a count; it gets one back for each
// slot that was read. Blocks of equal index talk to one another alone. Counts go on from kernel to
// kernel, in memory of devices.

// A rank's work on a chunk at one time.
struct Turn {
  int chunk;
  bool receives, sends;
  bool adds;    // its own input, or takes that alone
  bool stores;  // in its output
  bool ends;    // the sum
};

// Turn 0 has nothing to receive, and the last one nothing to send, or a chain's ends have it so.
constexpr int turns_of(const RingArgs& args) {
  const int others = args.members.n_ranks - 1;
  return args.chain ? 1 : 1 + (args.chunks.sums ? others : 0) + (args.chunks.gathers ? others : 0);
}

constexpr Turn turn_of(const RingArgs& args, int turn) {
  const int ranks = args.members.n_ranks, rank = args.members.rank;
  if (args.chain) {
    const int place = (rank - args.root + (args.chunks.sums ? ranks - 1 : ranks)) % ranks;
    const bool last = place == ranks - 1;
    return {0,
            place > 0,
            !last,
            args.chunks.sums || place == 0,
            !args.chunks.sums || last,
            args.chunks.sums && last};
  }
  const int whole = args.chunks.sums ? ranks - 1 : 0;  // the turn in which a chunk is complete
  const int chunk = (rank + whole - turn + 2 * ranks) % ranks;
  const bool last = turn + 1 == turns_of(args);
  return {chunk, turn > 0, !last, turn <= whole, turn >= whole, args.chunks.sums && turn == whole};
}

// Waits for a full slot, and for a free one. False: aborted.
constexpr bool await_slots(auto& context, const Members& members, const Turn& turn,
                           const RingFlags& mine, uint32_t read, uint32_t filled) {
  const int ranks = members.n_ranks, rank = members.rank;
  const auto reaches = [&](int peer, const uint32_t* count, uint32_t value) {
    return await(context, members, peer,
                 [&] { return static_cast<int32_t>(context.load_acquire(count) - value) >= 0; });
  };
  return context.all([&](int thread) {
    if (thread == 0 && turn.receives)
      return reaches((rank + ranks - 1) % ranks, &mine.filled, read + 1);
    if (thread == 1 && turn.sends)
      return reaches((rank + 1) % ranks, &mine.read, filled + 1 - kRingSlots);
    return true;
  });
}

// A pass fills half of the slots in each turn, while the counts of the other half come back.
template <class Codec, class Op, int kSources, class Context>
constexpr void ring_body(Context& context, const RingArgs& args, uint64_t) {
  using Stored = typename Codec::Stored;
  const uint64_t per_slot = args.slot / sizeof(Stored), all = kRingSlots / 2 * per_slot;
  const Members& members = args.members;
  const int block = context.block(), ranks = members.n_ranks, rank = members.rank;
  const auto line = [&](int of) -> RingFlags& {
    return members.flags[(of + ranks) % ranks]->ring[block];
  };
  RingFlags& mine = line(rank);
  uint32_t read = mine.own_read, filled = mine.own_filled;
  const auto slot = [&](std::byte* slots, uint32_t number) {
    return slots + (static_cast<uint32_t>(block) * kRingSlots + number % kRingSlots) * args.slot;
  };
  const auto cut = [&](int chunk) {
    return cut_of<Stored>(0, args.chunks.bytes[chunk], block,
                          static_cast<uint64_t>(members.blocks));
  };
  uint64_t longest = 0;
  for (int chunk = 0; chunk < (args.chain ? 1 : ranks); ++chunk) {
    longest = cut(chunk).count > longest ? cut(chunk).count : longest;
  }
  Operands& operands = context.operands();
  const auto move = [&](const Turn& turn, Range part) {
    const uint64_t at = part.first * sizeof(Stored);
    context.for_each_thread([&](int thread) {
      if (thread != 0) return;
      operands.n_srcs = operands.n_dsts = 0;
      if (turn.receives) operands.src[operands.n_srcs++] = slot(args.slots, read);
      if (turn.adds) operands.src[operands.n_srcs++] = args.chunks.input[turn.chunk] + at;
      if (turn.stores) operands.dst[operands.n_dsts++] = args.chunks.output[turn.chunk] + at;
      if (turn.sends) operands.dst[operands.n_dsts++] = slot(args.next_slots, filled);
    });
    context.sync();
    context.for_each_thread([&](int thread) {
      const Share share{static_cast<uint64_t>(thread), static_cast<uint64_t>(context.threads())};
      ReduceArgs reduce_args = reduce_args_of(args.chunks.reduction);
      if (!turn.ends) reduce_args.ranks = 1;
      if (!turn.receives || !turn.adds) {
        if (turn.ends) return sweep<Codec, Op, 0>(context, reduce_args, {0, part.count}, share);
        return sweep<Bits<Stored>, Bor, 1>(context, ReduceArgs{}, {0, part.count}, share);
      }
      sweep<Codec, Op, kSources>(context, reduce_args, {0, part.count}, share);
    });
    context.sync();
    read += turn.receives;
    filled += turn.sends;
    context.for_each_thread([&](int thread) {
      if (thread == 0 && turn.receives) context.store_release(&line(rank - 1).read, read);
      if (thread == 1 && turn.sends) context.store_release(&line(rank + 1).filled, filled);
    });
  };
  for (uint64_t pass = 0; pass < longest; pass += all) {
    for (int i = 0; i < turns_of(args); ++i) {
      const Turn turn = turn_of(args, i);
      const auto [first, count] = cut(turn.chunk);
      for (uint64_t at = pass; at < count && at < pass + all; at += per_slot) {
        if (!await_slots(context, members, turn, mine, read, filled)) return;
        move(turn, {first + at, count - at < per_slot ? count - at : per_slot});
      }
    }
  }
  context.sync();  // all have read the counts
  context.for_each_thread([&](int thread) {
    if (thread == 0) mine.own_read = read, mine.own_filled = filled;
  });
}
