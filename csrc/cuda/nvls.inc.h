// The kernel whose sums NVLink's switches do (Klenk et al., "An in-network architecture for
// accelerating shared-memory multiprocessor collectives", 2020; NCCL calls it NVLS). After
// cuda/meetings.inc.h. A Context has besides
//   load_reduced<Codec>(at)   16 bytes: the sum of all windows there, rounded to the type
//   store_all(at, value)      16 bytes to all windows there
//   fence_aliases()           orders accesses of one memory by several addresses
//
// Ranks put their inputs into their windows and meet. Each has the switch add up its chunk, and
// hand it out, and they meet again. Then each takes all chunks from its own window. A window is
// written again after the next first meeting.
template <class Codec, class Op, class Context>
constexpr void nvls_body(Context& context, const NvlsArgs& args, uint64_t) {
  using Stored = typename Codec::Stored;
  const auto& [members, chunks, own, all] = args;
  const int block = context.block(), rank = members.rank, ranks = members.n_ranks;
  const auto place = [&](Flags& flags) -> Meetings& { return flags.two_shot[block]; };
  uint32_t& last = place(*members.flags[rank]).epoch;
  const uint32_t epoch = last;
  const auto meet_all = [&](uint32_t number) {
    context.fence_aliases();
    const bool met = meet(context, members, place, number);
    context.fence_aliases();
    return met;
  };
  // move(piece, offset) of a chunk's 16 bytes, which lie there in a window.
  const auto each_piece = [&](int chunk, const auto& move) {
    uint64_t before = 0;
    for (int i = 0; i < chunk; ++i) before += (chunks.bytes[i] + kPiece - 1) / kPiece;
    const auto [first, count] =
        cut_of<Wide>(0, (chunks.bytes[chunk] + kPiece - 1) / kPiece * kPiece, block,
                     static_cast<uint64_t>(members.blocks));
    context.each([&](int thread) {
      for (uint64_t i = static_cast<uint64_t>(thread); i < count;
           i += static_cast<uint64_t>(context.threads())) {
        move(first + i, (before + first + i) * kPiece);
      }
    });
  };
  for (int chunk = 0; chunk < ranks && chunks.sums; ++chunk) {
    each_piece(chunk, [&](uint64_t piece, uint64_t offset) {
      const Wide wide =
          load_piece<Stored>(context, chunks.input[chunk], piece, chunks.bytes[chunk]);
      context.store(own + offset, wide);
    });
  }
  if (!meet_all(epoch + 1)) return;
  each_piece(rank, [&](uint64_t piece, uint64_t offset) {
    Wide wide{};
    if (chunks.sums) {
      wide = context.template load_reduced<Codec>(all + offset);
      wide = Numbers<Codec, Wide>(wide).template finish<Op>(job_of(chunks.reduction));
    } else {
      wide = load_piece<Stored>(context, chunks.input[rank], piece, chunks.bytes[rank]);
    }
    if (chunks.gathers) return context.store_all(all + offset, wide);
    store_piece<Stored>(context, chunks.output[rank], piece, chunks.bytes[rank], wide);
  });
  if (!meet_all(epoch + 2)) return;
  for (int chunk = 0; chunk < ranks && chunks.gathers; ++chunk) {
    each_piece(chunk, [&](uint64_t piece, uint64_t offset) {
      const Wide wide = context.template load<Wide>(own + offset);
      store_piece<Stored>(context, chunks.output[chunk], piece, chunks.bytes[chunk], wide);
    });
  }
  end_epoch(context, last, epoch + 2);
}

// The functions, and the one for a call: SUM and AVG are one (cuda/codecs.inc.h).
template <class Function>
struct NvlsTable {
  Function copy, single, half, brain;

  constexpr Function of(const Chunks& chunks) const {
    if (!chunks.sums) return copy;
    if (chunks.reduction.dtype == DType::kFloat32) return single;
    return chunks.reduction.dtype == DType::kFloat16 ? half : brain;
  }
};
