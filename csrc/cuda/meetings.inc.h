// The kernels of ranks that have a device each: they wait for one another. A Context is as in
// cuda/kernels.inc.h, after which this is included. An aborted block returns before its next access
// of any memory; its epoch stays, and flags are of no more use.
//
// Two-shot: Rabenseifner's reduce-scatter and all-gather ("A new optimized MPI reduce algorithm",
// 1997), each in one step. One-shot, and flags in the data: as NCCL's LL, and TensorRT-LLM's and
// vLLM's kernels do it.

// Looks until `done()`, which may say in `peer` whom it waits for. False: aborted, or it took too
// long, of which this rank's host is told.
constexpr bool await(auto& context, const Members& members, const int& peer, const auto& done) {
  uint64_t begin = 0;
  for (uint32_t looks = 1; !done(); ++looks) {
    if (looks % 1024 == 0) {
      if (context.load_acquire(members.abort) != 0) return false;
      const uint64_t now = context.nanoseconds();
      if (begin == 0) begin = now;
      if (members.patience != 0 && now - begin > members.patience) {
        // Partner: Verdicts::gave_up(), on the host.
        context.store_release(members.abort, kGaveUp + static_cast<uint32_t>(peer));
        return false;
      }
    }
    context.pause();
  }
  return true;
}

// A flag is set to the epoch, which is one higher at every meeting, in one of two places in turn: a
// fast peer may be at the next meeting before this rank looks at the flag of this one, but at the
// one after that only when this rank came to the next. So blocks of equal index of all ranks meet.
// Their writes before it are visible to all after it. False: aborted.
constexpr bool meet(auto& context, const Members& members, const auto& place, uint32_t epoch) {
  context.sync();
  context.for_each_thread([&](int peer) {
    if (peer >= members.n_ranks) return;
    context.store_release(&place(*members.flags[peer]).flag[epoch % 2][members.rank], epoch);
  });
  return context.all([&](int peer) {
    if (peer >= members.n_ranks) return true;
    const uint32_t* const flag = &place(*members.flags[members.rank]).flag[epoch % 2][peer];
    return await(context, members, peer, [&] { return context.load_acquire(flag) == epoch; });
  });
}

constexpr void end_epoch(auto& context, uint32_t& last, uint32_t epoch) {
  context.for_each_thread([&](int thread) {
    if (thread == 0) last = epoch;
  });
}

// When one block has come, all that was before the kernel in its rank's stream is done. A kernel is
// over when each of its blocks has met twice: then all ranks are done with its rank's operands.
// A slot is written again by the next kernel of its writer, after the second meeting of this one.
template <class Codec, class Op, int kSources, class Context>
constexpr void two_shot_body(Context& context, const TwoShotArgs& args, uint64_t element_bytes) {
  const Members& members = args.members;
  const int block = context.block(), rank = members.rank;
  Flags& mine = *members.flags[rank];
  const auto place = [&](Flags& flags) -> BarrierFlags& { return flags.two_shot[block]; };
  const uint32_t epoch = place(mine).epoch;
  context.for_each_thread([&](int peer) {
    if (peer >= members.n_ranks || peer == rank) return;
    auto* const slot = reinterpret_cast<std::byte*>(&members.flags[peer]->slot[block][rank]);
    context.store(slot, args.given[peer]);
  });
  if (!meet(context, members, place, epoch + 1)) return;
  const auto slot_at = [&](int from) { return &mine.slot[block][from]; };
  const bool good = args.part.parts == 0 ||
                    reduce_part<Codec, Op, kSources>(context, args.part, element_bytes, slot_at);
  if (!good || !meet(context, members, place, epoch + 2)) return;
  end_epoch(context, place(mine).epoch, epoch + 2);
}

// The part of one block: whole pieces of 16 bytes, but for the end.
template <class Stored>
constexpr Range cut_of(uint64_t first_byte, uint64_t bytes, int block, uint64_t blocks) {
  constexpr uint64_t kElements = kPiece / sizeof(Stored);
  const uint64_t count = bytes / sizeof(Stored);
  const uint64_t per_block = (count + blocks * kElements - 1) / (blocks * kElements) * kElements;
  const uint64_t begin = per_block * block < count ? per_block * block : count;
  return {first_byte / sizeof(Stored) + begin,
          count - begin < per_block ? count - begin : per_block};
}

// One meeting is enough. A block reads from the blocks of its index alone: each of them writes one
// cut of a rank's bytes for another. The window of the next operation is the other one, and that of
// the operation after it comes after a meeting of the next: all ranks are through with this one.
template <class Codec, class Op, class Context>
constexpr void one_shot_body(Context& context, const OneShotArgs& args, uint64_t) {
  using Stored = typename Codec::Stored;
  const auto& [members, exchange, window] = args;
  const int block = context.block(), rank = members.rank, ranks = members.n_ranks;
  const auto place = [&](Flags& flags) -> BarrierFlags& { return flags.one_shot[block]; };
  uint32_t& last = place(*members.flags[rank]).epoch;
  const uint32_t epoch = last + 1;
  const uint64_t turn = epoch % 2 * kOneShotWindow;
  const Share share{0, static_cast<uint64_t>(context.threads())};
  Operands& operands = context.operands();
  const auto set = [&](int sources, std::byte* to, const auto& source) {
    context.sync();  // nobody reads the operands before
    context.for_each_thread([&](int i) {
      if (i == 0) operands.n_srcs = sources, operands.n_dsts = 1, operands.dst[0] = to;
      if (i < sources) operands.src[i] = source(i);
    });
    context.sync();
  };
  const auto copy = [&](Range range) {
    context.for_each_thread([&](int thread) {
      const Share own{static_cast<uint64_t>(thread), share.step};
      sweep<Bits<Stored>, Bor, 1>(context, ReduceArgs{}, range, own);
    });
  };
  set(1, window[rank] + turn, [&](int) { return exchange.input; });
  for (int to = 0; to < ranks; ++to) {
    const uint64_t first = exchange.sent_first[to], bytes = exchange.sent_bytes[to];
    const bool again =
        to > 0 && first == exchange.sent_first[to - 1] && bytes == exchange.sent_bytes[to - 1];
    if (!again) copy(cut_of<Stored>(first, bytes, block, members.blocks));
  }
  if (!meet(context, members, place, epoch)) return;
  if (exchange.sums) {
    set(ranks, exchange.output, [&](int i) { return window[i] + turn + exchange.first[i]; });
    const Range range = cut_of<Stored>(0, exchange.bytes[rank], block, members.blocks);
    context.for_each_thread([&](int thread) {
      const Share own{static_cast<uint64_t>(thread), share.step};
      sweep<Codec, Op, 0>(context, reduce_args_of(exchange.reduction), range, own);
    });
  }
  for (int from = 0; from < ranks && !exchange.sums; ++from) {
    if (exchange.bytes[from] == 0) continue;
    set(1, exchange.output + exchange.to[from],
        [&](int) { return window[from] + turn + exchange.first[from]; });
    copy(cut_of<Stored>(0, exchange.bytes[from], block, members.blocks));
  }
  end_epoch(context, last, epoch);
}

// 16 bytes of an operand, or as many as it has.
template <class Stored>
constexpr Wide load_piece(auto& context, const std::byte* operand, uint64_t piece, uint64_t bytes) {
  const std::byte* const at = operand + piece * kPiece;
  const uint64_t rest = bytes - piece * kPiece;
  if (rest >= kPiece && reinterpret_cast<uintptr_t>(at) % kPiece == 0) {
    return context.template load<Wide>(at);
  }
  Stored elements[kPiece / sizeof(Stored)]{};
  for (uint64_t i = 0; i < kPiece / sizeof(Stored) && i * sizeof(Stored) < rest; ++i) {
    elements[i] = context.template load<Stored>(at + i * sizeof(Stored));
  }
  Wide wide;
  __builtin_memcpy(&wide, elements, sizeof wide);
  return wide;
}

template <class Stored>
constexpr void store_piece(auto& context, std::byte* operand, uint64_t piece, uint64_t bytes,
                           const Wide& wide) {
  std::byte* const at = operand + piece * kPiece;
  const uint64_t rest = bytes - piece * kPiece;
  if (rest >= kPiece && reinterpret_cast<uintptr_t>(at) % kPiece == 0) {
    return context.store(at, wide);
  }
  Stored elements[kPiece / sizeof(Stored)];
  __builtin_memcpy(elements, &wide, sizeof wide);
  for (uint64_t i = 0; i < kPiece / sizeof(Stored) && i * sizeof(Stored) < rest; ++i) {
    context.store(at + i * sizeof(Stored), elements[i]);
  }
}

constexpr uint64_t pieces_of(uint64_t bytes) {
  return bytes == 0 ? 1 : (bytes + kPiece - 1) / kPiece;
}

// The pieces that so many ranks send are loaded at once: one after the other, each would take as
// long as all of them.
inline constexpr int kAtOnce = 4;

// Takes the piece of each rank from `first` on that sends this one. False: aborted.
constexpr bool take_lines(auto& context, const Members& members, int first, const auto& lines_from,
                          uint32_t epoch, Wide (&wide)[kAtOnce]) {
  int late = first;
  return await(context, members, late, [&] {
    Lines lines[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (const std::byte* const at = lines_from(first + i)) lines[i] = context.load_lines(at);
    }
    bool whole = true;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (lines_from(first + i) == nullptr) continue;
      for (int w = 0; w < 4; ++w) {
        wide[i].words[w] = static_cast<uint32_t>(lines[i].line[w]);
        if (lines[i].line[w] >> 32 != epoch) whole = false, late = first + i;
      }
    }
    return whole;
  });
}

// No meeting: bytes come with flags, which are the epoch. Every rank sends every other a piece, be
// it empty. So a rank at the next operation but one knows that this rank has come to the next, and
// is through with the lines that are written anew. The grid is always the same, so all blocks have
// one epoch. It is never 0, which new memory has.
template <class Codec, class Op, class Context>
constexpr void low_latency_body(Context& context, const LowLatencyArgs& args, uint64_t) {
  using Stored = typename Codec::Stored;
  const auto& [members, exchange, all_lines, all_pieces] = args;
  const int rank = members.rank, ranks = members.n_ranks;
  uint32_t& last = members.flags[rank]->low_latency[context.block()];
  const uint32_t epoch = last == UINT32_MAX ? 2 : last + 1;
  const uint64_t threads = context.threads(), step = threads * context.blocks();
  const auto lines = [&](int to, int from, uint64_t piece) {
    const uint64_t place = (epoch % 2 * ranks + from) * all_pieces + piece;
    return all_lines[to] + place * kPieceLines;
  };
  context.for_each_thread([&](int thread) {
    const uint64_t begin = context.block() * threads + thread;
    for (int i = 1; i < ranks; ++i) {
      const int to = (rank + i) % ranks;  // not all write to one at once
      const uint64_t bytes = exchange.sent_bytes[to];
      for (uint64_t piece = begin; piece < pieces_of(bytes); piece += step) {
        const Wide wide =
            load_piece<Stored>(context, exchange.input + exchange.sent_first[to], piece, bytes);
        Lines sent;
        for (int w = 0; w < 4; ++w) sent.line[w] = uint64_t{epoch} << 32 | wide.words[w];
        context.store_lines(lines(to, rank, piece), sent);
      }
    }
  });
  uint64_t longest = 1;
  for (int from = 0; from < ranks; ++from) {
    const uint64_t pieces = pieces_of(exchange.bytes[from]);
    longest = pieces > longest ? pieces : longest;
  }
  const auto get = [&](int first, uint64_t piece, Wide(&wide)[kAtOnce]) {
    const auto lines_from = [&](int from) -> const std::byte* {
      if (from >= ranks || from == rank) return nullptr;
      return piece < pieces_of(exchange.bytes[from]) ? lines(rank, from, piece) : nullptr;
    };
    if (!take_lines(context, members, first, lines_from, epoch, wide)) return false;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i != rank || piece >= pieces_of(exchange.bytes[rank])) continue;
      wide[i] = load_piece<Stored>(context, exchange.input + exchange.first[rank], piece,
                                   exchange.bytes[rank]);
    }
    return true;
  };
  const bool good = context.all([&](int thread) {
    for (uint64_t piece = context.block() * threads + thread; piece < longest; piece += step) {
      Numbers<Codec, Wide> total(Wide{});
      for (int first = 0; first < ranks; first += kAtOnce) {
        Wide wide[kAtOnce];
        if (!get(first, piece, wide)) return false;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int from = first + i;
          if (from >= ranks || piece >= pieces_of(exchange.bytes[from])) continue;
          const Numbers<Codec, Wide> next(wide[i]);
          if (!exchange.sums) {
            store_piece<Stored>(context, exchange.output + exchange.to[from], piece,
                                exchange.bytes[from], wide[i]);
          } else if (from == 0) {
            total = next;
          } else {
            total.template apply<Op>(next);
          }
        }
      }
      if (!exchange.sums) continue;
      const Wide sum = total.template finish<Op>(reduce_args_of(exchange.reduction));
      store_piece<Stored>(context, exchange.output, piece, exchange.bytes[rank], sum);
    }
    return true;
  });
  if (good) end_epoch(context, last, epoch);
}
