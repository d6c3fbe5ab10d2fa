// The ranks of a group on one host, and the memory of their devices that they give one another.
// Ranks of a subgroup meet step by step, and part again. All calls to a device go through the table
// of functions (api.h).
#pragma once

#include <deque>
#include <optional>

#include "device/bridge.h"
#include "device/exports.h"
#include "device/imports.h"
#include "device/kernels_for.h"

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
  bool bridged = false;      // or else their kernels add up through memory of the host
  bool one_device = false;   // they share one
  bool own_devices = false;  // each has its own
  bool shared = false;       // other processes of the host use these, too
  std::string why;           // where they do not reach one another: one sentence
};

struct Prologue {
  uint64_t pattern;
  // For operations, for messages; by the leader that reads it. The owner's stream writes it.
  alignas(4096) LeaderSlot slots[2][kMostRanks];
  Flags flags;
};
inline constexpr uint64_t kPrologue = 128 * 1024;
static_assert(sizeof(Prologue) <= kPrologue);

// The memory that a rank gives the others of a subgroup:
//   | RankInfo's pattern | slots | Flags | window | messages | ring | one-shot windows | lines |
// Operands that others cannot map are staged in the window, or among the messages. A subgroup of
// two has no window, and only ranks with a device each have what is behind the messages.
struct SubgroupMemory {
  std::vector<std::byte*> of;  // by rank, as seen here; null: not of the subgroup, or not reached
  uint64_t messages = 0, end = 0;  // where the window ends, and these: behind the prologue
  uint64_t for_kernels = 0;        // bytes of what follows
  const Bridge* bridge = nullptr;  // where the flags and the ring are, if others can't map this

  std::byte* window(Rank rank) const { return of[static_cast<size_t>(rank)] + kPrologue; }
  std::byte* slots(Rank rank) const { return bridge ? bridge->slots(rank) : window(rank) + end; }
  std::byte* one_shot(Rank rank) const { return window(rank) + end + kRingBytes; }
  std::byte* lines(Rank rank) const { return one_shot(rank) + 2 * kOneShotWindow; }
  Prologue& prologue(Rank rank) const {
    return *reinterpret_cast<Prologue*>(of[static_cast<size_t>(rank)]);
  }
  Flags* flags(Rank rank) const { return bridge ? bridge->flags(rank) : &prologue(rank).flags; }
};

// One thread at a time may call it, on the group's device. Every failure is a DeviceError. Then the
// streams of the group are in no known state.
class Peers {
 public:
  static constexpr uint32_t kSteps = 5;

  struct Place {
    int device;
    Neighbours& neighbours;
    uint64_t most_bytes = 0;        // that this rank gives the others; 0: a share that fits
    int most_blocks = kMostBlocks;  // of kernels that wait for one another
    std::string refusal;            // the reason why it maps no other rank's memory, or ""
  };
  Peers(ExportContext context, Place place);
  ~Peers();
  Peers(const Peers&) = delete;

  // Takes a step of a meeting. Every rank of a subgroup takes step 1; when all say so in their
  // RankInfo, step 2; up to kSteps. Throws nothing: a failure is written there.
  void bootstrap(const Subgroup& subgroup, uint32_t step);
  // Tells how the meeting ended, and keeps the result.
  PeerAccess access(const Subgroup& subgroup);
  // Closes peers' memory; then each RankInfo says kSteps + 1. This rank's own goes at the end: not
  // before they have done the same.
  void let_go();

  Api& api() const { return context_.api; }
  Rank rank() const { return rank_; }
  int size() const { return static_cast<int>(peers_.size()); }
  const Area& own() const { return area(rank_); }
  const Area& area(Rank rank) const { return peer(rank).area; }
  // Returns the device's address of a word in that rank's area.
  std::byte* word(Rank of, const void* in_its_area) const;

  // ---- once the group, or for messages a pair of it, has met and reaches one another

  bool one_device() const { return one_device_; }  // the group shares one
  // Returns the links of a group whose ranks have a device each, with room for kernels that wait.
  const std::optional<DeviceLink>& link() const { return link_; }
  // Returns the kernel for an operation: equal on all ranks. Ranks that share a device hand over.
  // Over a bridge kernels add up; nothing if the host does the operation.
  std::optional<Algorithm> kernel_for(const Shape& shape, std::optional<Algorithm> asked) const {
    if (bridge_ && !reduces(shape.collective)) return std::nullopt;
    if (bridge_) return kByRing;
    return link_ ? cuda::kernel_for(shape, *link_, group_->messages, asked) : kHandOver;
  }
  std::string kernels_text() const {  // the table; empty where none wait for one another
    return link_ ? cuda::kernels_text(size(), *link_, group_->messages) : "";
  }
  const SubgroupMemory& group() const { return *group_; }
  // Returns the part of this rank's memory where it stages operands for that leader.
  Span region(Rank leader, bool messages) const;
  // Returns the leader's address of a place in a region.
  uint64_t seen_by(Rank leader, const std::byte* mine, bool messages) const;
  LeaderSlot& slot_of(Rank leader, Rank from, bool messages) const;
  Exports& exports() { return *exports_; }
  // Tells whether peers export something new, or have freed something. Then call refresh_imports()
  // while nothing is under way on the device.
  bool has_news() const { return std::ranges::any_of(imports_, &Imports::has_news); }
  void refresh_imports() {
    for (Imports& imports : imports_) imports.refresh();
  }

 private:
  struct Peer {
    Area area;
    std::byte* device_area = nullptr;  // null: of another host, or not registered
  };

  RankInfo& info(const Subgroup& subgroup, Rank rank) const {
    return peer(rank).area.info(subgroup.index_of(rank));
  }
  const Peer& peer(Rank rank) const { return peers_[static_cast<size_t>(rank)]; }
  void prepare(RankInfo& info);
  void open(const Subgroup& subgroup, RankInfo& info);
  void allocate(SubgroupMemory& memory, RankInfo& info);
  void reach(const Subgroup& subgroup, RankInfo& info);
  uint64_t bytes_of(const Subgroup& subgroup) const;
  bool own_devices(const Subgroup& subgroup) const;
  bool needs_bridge(const Subgroup& subgroup) const;
  void claim_blocks();
  void keep_blocks(int count);
  const SubgroupMemory& memory_with(Rank peer, bool messages) const;

  const ExportContext context_;
  const Rank rank_;
  const Place place_;
  std::vector<Peer> peers_;
  std::map<int, SubgroupMemory> memory_;  // by this rank's info
  SubgroupMemory* group_ = nullptr;       // info 0's, once it has met
  bool one_device_ = false;               // the group's
  std::optional<DeviceLink> link_;        // where each of its ranks has a device, with room
  std::optional<Bridge> bridge_;          // where they don't reach one another
  int blocks_ = 0;                        // claimed
  uint64_t* proof_ = nullptr;             // in the host's memory: a copy of a prologue
  Stream stream_ = nullptr;               // for meeting: others may wait for peers
  std::optional<Exports> exports_;
  std::deque<Imports> imports_;  // from peers whose memory this rank's kernels use
};

}  // namespace ringcomm::cuda
