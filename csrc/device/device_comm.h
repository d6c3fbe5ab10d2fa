// One rank's part of a group on one device: ranks of one host that move and reduce memory of
// devices by work that their streams do, so that no host waits for another once they have met. All
// calls to a device go through the table of functions (api.h).
#pragma once

#include <algorithm>
#include <chrono>
#include <optional>

#include "device/exports.h"
#include "device/kernels_for.h"
#include "plan/shape.h"

namespace ringcomm::cuda {

// Ranks that meet: those of the group, or two of them that exchange messages. A rank has a RankInfo
// (area.h) for every subgroup that it may be in.
struct Subgroup {
  std::vector<Rank> ranks;
  bool pair = false;

  int index_of(Rank rank) const {
    if (!pair) return 0;
    return 1 + (ranks[0] == rank ? ranks[1] : ranks[0]);
  }
};

// The way in which the ranks of a subgroup reach one another's devices. It is equal on each of
// them.
struct PeerAccess {
  bool reach = false;        // all read and write all others' memory, and their streams meet
  bool one_device = false;   // they share one
  bool own_devices = false;  // each has its own
  std::string why;           // where they do not reach one another: one sentence
};

// A message on a device.
struct Transfer {
  bool sending;
  Rank peer;
  Span data;
  uint64_t element;  // bytes
};

// The memory that a rank gives the others of a subgroup:
//   | RankInfo's pattern | slots | Flags | window | messages | ring | one-shot windows | lines |
// Operands that others cannot map are staged in the window, or among the messages. A subgroup of
// two has no window, and only ranks with a device each have what is behind the messages.
struct Prologue {
  uint64_t pattern;
  // For operations, for messages; by the leader that reads it. The owner's stream writes it.
  alignas(4096) LeaderSlot slots[2][kMostRanks];
  Flags flags;
};
inline constexpr uint64_t kPrologue = 128 * 1024;
static_assert(sizeof(Prologue) <= kPrologue);

// One thread at a time may call it, on the group's device, but release() anywhere at any time.
// Every failure is a DeviceError. Then the streams of the group are in no known state.
class DeviceComm {
 public:
  static constexpr uint32_t kSteps = 3;

  // Each rank gives `most_bytes` of its memory, or if that is 0 a share that fits the device. If
  // there is a `refusal`, the reason, this rank maps no other rank's memory.
  DeviceComm(Ends ends, int device, uint64_t most_bytes, std::string refusal);
  ~DeviceComm();
  DeviceComm(const DeviceComm&) = delete;

  // Every rank of a subgroup takes step 1; when all say so in their RankInfo, step 2; up to kSteps.
  // Throws nothing: a failure is written there.
  void bootstrap(const Subgroup& subgroup, uint32_t step);
  PeerAccess access(const Subgroup& subgroup);

  // Enqueued; words at the end of it may be put off until flush(). Nothing counts, so a graph that
  // has it does the same at each replay.
  //
  // An operation by kernels that read inputs and write outputs of all ranks, and add up in rank
  // order. `call` is equal where ranks call the same. What is `kept` stays mapped for graphs.
  struct Call {
    const Shape& shape;
    uint64_t call;
    const Reduction& reduction;
    const Spans &input, &output;
    bool kept = false;
    std::chrono::nanoseconds patience{0};  // of a kernel that waits for others; 0: no end
  };
  void collective(Stream stream, const Call& call, Algorithm kernel);
  // The kernel for it: equal on all ranks. Ranks that share a device hand over.
  Algorithm kernel_for(const Shape& shape, std::optional<Algorithm> asked) const;
  std::string kernels_text() const;  // the table; empty where none meet
  // Exports what collective() needs.
  void offer(const Shape& shape, const Spans& input, const Spans& output);
  // `replaying` of this rank's area says that what comes in between may wait. Flushed with it.
  void watch(bool begins) { words_.push_back({word(rank_, &own().replaying()), begins ? 1u : 0u}); }
  // Do peers export something new, or have they freed something? Then look() while nothing is under
  // way on the device.
  bool has_news() const {
    return std::ranges::any_of(imports_, [](const auto& each) { return each.has_news(); });
  }
  void look() {
    for (Imports& imports : imports_) imports.look();
  }
  Exports& exports() { return *exports_; }  // where a subgroup has met, and reaches one another
  // Messages that make progress side by side.
  void transfer(Stream stream, std::span<const Transfer> transfers);

  void flush(Stream stream);
  // Enqueued: all before it is done when Area::done(timeline) has come to `value`.
  void mark(Stream stream, int timeline, uint32_t value);
  // Frees the streams of a rank that wait for peers, and kernels that do. Streams may write to its
  // lines again, so it is repeated until all is done. Makes no CUDA call.
  static void release(const Area& own, int size);
  // Closes peers' memory; then each RankInfo says kSteps + 1. This rank's own goes at the end: not
  // before they have done the same.
  void let_go();

 private:
  struct Memory {
    std::vector<std::byte*> of;  // by rank, as seen here; null: not of the subgroup, or not reached
    uint64_t messages = 0, end = 0;  // where the window ends, and these: behind the prologue
    uint64_t meeting = 0;            // bytes of what follows

    Prologue& prologue(Rank rank) const {
      return *reinterpret_cast<Prologue*>(of[static_cast<size_t>(rank)]);
    }
  };
  struct Peer {
    Area area;
    std::byte* device_area = nullptr;  // null: of another host, or not registered
  };

  RankInfo& info(const Subgroup& subgroup, Rank rank) const {
    return peer(rank).area.info(subgroup.index_of(rank));
  }
  void prepare(RankInfo& info);
  void open(const Subgroup& subgroup, RankInfo& info);
  void reach(const Subgroup& subgroup, RankInfo& info);
  uint64_t bytes_of(const Subgroup& subgroup) const;
  bool own_devices(const Subgroup& subgroup) const;
  void claim(int multiprocessors);
  void keep_blocks(int count);

  const Peer& peer(Rank rank) const { return peers_[static_cast<size_t>(rank)]; }
  const Area& own() const { return peer(rank_).area; }
  int size() const { return static_cast<int>(peers_.size()); }
  std::byte* word(Rank of, const void* in_its_area) const;

  void copy(Stream stream, std::byte* to, const std::byte* from, uint64_t bytes);
  void copy(Stream stream, const Spans& to, uint64_t at, const Spans& from, uint64_t first,
            uint64_t bytes);

  // ---- kernels for several ranks: operands.cc makes a hand-over, and handover.cc runs it

  // Bytes of an operand that is staged: `unit` of them in each round, at that place in a window.
  struct Piece {
    const Spans* spans;
    uint64_t first, length;
    uint64_t unit;
    std::byte* window;
  };
  struct Share {  // what this rank gives a leader
    Rank leader;
    LeaderSlot slot;
    uint64_t rounds;

    bool staged() const { return slot.staged != 0; }
  };
  struct Served {  // what a kernel of this rank does
    LeaderArgs args{};
    std::array<uint64_t, kMostRanks> rounds{};  // of what each rank gives it, and of its own
  };
  struct Pull {  // by a copy engine, from a peer's window; or a kernel serves it
    Rank from;
    Piece piece;
    uint64_t rounds;
  };
  struct Handover {
    bool messages = false;
    std::vector<Share> shares;
    std::vector<Served> served;
    std::vector<Pull> pulls;
    std::vector<Piece> in, out;

    int ready() const { return messages ? kSentLane : kReadyLane; }
    int done() const { return messages ? kTakenLane : kDoneLane; }
    uint64_t rounds() const {
      uint64_t most = 0;
      for (const Share& share : shares) most = std::max(most, share.rounds);
      for (const Served& each : served) most = std::max(most, std::ranges::max(each.rounds));
      for (const Pull& pull : pulls) most = std::max(most, pull.rounds);
      return most;
    }
  };
  const Memory& memory_with(Rank peer, bool messages) const;
  Span region(Rank leader, bool messages) const;
  uint64_t seen_by(Rank leader, const std::byte* mine, bool messages) const;
  uint64_t address_at(Rank leader, const Spans& spans, uint64_t first, uint64_t bytes, bool kept);
  LeaderSlot& slot_of(Rank leader, Rank from, bool messages) const;
  void set_common(LeaderArgs& args, uint64_t element) const;
  Handover prepare(const Shape& shape, const Spans& input, const Spans& output, bool kept);
  uint64_t set_unit(LeaderArgs& args) const;
  std::byte* staged_at(const LeaderArgs& args, Rank part, bool is_split) const;
  std::vector<Piece> pieces_of(const LeaderArgs& args, const Spans& spans, bool is_split) const;
  Handover by_copies(const Shape& shape, const Spans& input, const Spans& output) const;
  Handover by_each(const Shape& shape, const Spans& input, const Spans& output, bool kept);
  void send(Handover& handover, const Transfer& message, const Spans& data);
  void receive(Handover& handover, const Transfer& message);
  void stage(Stream stream, const Piece& piece, uint64_t round, bool back);
  void run(Stream stream, Handover& handover);
  void hand_over(Stream stream, const Call& call, bool by_engines);
  void fill_slot(const Share& share, bool messages);
  void serve(Stream stream, const Handover& handover, Served& served, uint64_t round);
  void pull(Stream stream, const Handover& handover, const Pull& pull, uint64_t round);
  void let_go_on(Rank rank, const Handover& handover, uint64_t round, bool ends);
  void send_line(Rank to, int lane, uint64_t value) {
    words_.push_back({word(to, &peer(to).area.line(rank_, lane)), value});
  }
  void set_own_line(Rank from, int lane, uint64_t value) {
    words_.push_back({word(rank_, &own().line(from, lane)), value});
  }
  void await_line(Rank from, int lane, uint64_t value) {
    words_.push_back({word(rank_, &own().line(from, lane)), value, Word::kWait});
  }

  // ---- kernels that meet (meetings.cc)

  Members members(int blocks, const Call& call) const;
  void two_shot(Stream stream, const Call& call);
  void one_step(Stream stream, const Call& call, Algorithm kernel);
  void by_ring(Stream stream, const Call& call);
  void launch_ring(Stream stream, const Call& call, const Chunks& chunks, bool chain);

  const Ends ends_;
  Api& api_;
  const Rank rank_;
  const int device_;
  const uint64_t most_bytes_;
  const std::string refusal_;
  std::vector<Peer> peers_;
  std::map<int, Memory> memory_;  // by this rank's info
  Memory* group_ = nullptr;       // info 0's, once it has met
  bool one_device_ = false;       // the group's
  std::optional<Link> link_;      // where each of its ranks has a device, with room
  int blocks_ = 0;                // claimed
  uint64_t* proof_ = nullptr;     // of the host: a copy of a prologue
  Stream stream_ = nullptr;       // for meeting: others may wait for peers
  std::vector<Word> words_;       // to be written and waited for, next
  std::optional<Exports> exports_;
  std::deque<Imports> imports_;  // of peers whose memory this rank's kernels use
};

}  // namespace ringcomm::cuda
