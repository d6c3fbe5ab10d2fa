// The part of a rank's shared memory of the host that is for devices. Ranks tell one another of
// their devices here, and their streams wait for words here. It is registered with every device, so
// that streams and kernels reach it as the host does.
//
// Its owner writes it, except for lines: those are written by the peer that they come from.
#pragma once

#include <atomic>
#include <concepts>

#include "device/api.h"

namespace ringcomm::cuda {

inline constexpr uint64_t kOperations = 128;  // that a group has under way on its device
inline constexpr int kExports = 1024;         // allocations of a rank that others may map
inline constexpr uint64_t kMessages = 64;     // to one peer whose sizes can be compared

// A rank's lines from one peer say, of operations and of messages, how many rounds the peer has
// made ready for this rank's kernel, and how many of this rank's the peer's kernel has done
// (handover.h).
enum Lane : uint8_t { kReadyLane, kDoneLane, kSentLane, kTakenLane };
inline constexpr int kLanes = 4;
inline constexpr uint32_t kAllDone = 1 << 29;  // more rounds than there are

// The words of a rank to the others of a subgroup (peers.h): its device, and its memory for
// them there.
struct alignas(128) RankInfo {
  std::atomic<uint32_t> step;  // how far its owner has come; partner: ranks that meet
  uint32_t usable;             // streams reach this area
  Uuid uuid;
  uint64_t memory_bytes;
  uint64_t most_bytes;  // that its owner gives a group; 0: as many as fit
  uint64_t pattern;     // stands in the memory behind `window`: proof of what is mapped
  IpcHandle window;
  int32_t blocks, capability;     // that its kernels may have at one time
  uint32_t bridged;               // it has mapped the memory of all for a ring through the host
  uint32_t shared;                // processes that are not of the subgroup use its device, too
  std::atomic<uint32_t> reaches;  // bit r: rank r's memory could be read
  std::atomic<uint32_t> nvlinks;  // bit r: NVLink leads to rank r's device
  uint64_t seen[kMostRanks];      // where its owner sees rank r's memory
  char why[160];                  // the first reason why something is missing
};

// An allocation of a process. Its id tells it from a later one at the same addresses.
struct ExportedRange {
  uint64_t base, bytes, id;
  size_t process = 0;  // known to importers
  auto operator<=>(const ExportedRange&) const = default;
};

struct ExportedMemory {
  enum Kind : uint32_t { kHandle, kChunks };
  Kind kind;
  uint32_t chunks;  // kChunks: so many descriptors were sent, of chunks that are equally long
  ExportedRange range;
  IpcHandle handle;
};

struct Export {
  std::atomic<uint64_t> generation;  // 0: its owner writes; partner: Imports
  std::atomic<uint32_t> wanted;      // bit r: its owner gives rank r what is there
  ExportedMemory memory;
};

struct Opened {  // where a rank sees a peer's export
  std::atomic<uint64_t> generation;
  std::atomic<uint64_t> address;
};

// A view of one rank's area, of a group of `size` ranks.
class Area {
 public:
  using Word32 = std::atomic<uint32_t>;
  using Word64 = std::atomic<uint64_t>;
  Area(std::byte* base, int size) : base_(base), size_(static_cast<uint64_t>(size)) {}

  static uint64_t bytes(int size) {
    const uint64_t all = Area(nullptr, size).at(kEnd);
    return (all + 4095) / 4096 * 4096;
  }

  RankInfo& info(int index) const { return in<RankInfo>(kInfos, index); }
  Word32& abort() const { return in<Word32>(kWords, 0); }
  // Counts what a stream of the owner has come to, in each of 2 * size + 2 timelines: see
  // StreamWords::mark().
  Word32& done(int timeline) const { return in<Word32>(kWords, (1 + timeline) * 16); }
  // Holds 1 while a stream of the owner is in an operation of a graph.
  Word32& replaying() const { return in<Word32>(kWords, (3 + 2 * size_) * 16); }
  // Holds the last operation for whose capture its owner has mapped the exports of peers.
  Word64& mapped_for() const { return in<Word64>(kWords, (4 + 4 * size_) * 8); }
  // Counts changes of exported() that concern `peer`.
  Word32& exports(Rank peer) const { return in<Word32>(kCounts, peer * 16); }
  Word32& line(Rank from, int lane) const {
    return in<Word32>(kLines, (from * kLanes + lane) * 32);
  }
  Export& exported(int index) const { return in<Export>(kExported, index); }
  Opened& opened(Rank owner, int index) const {
    return in<Opened>(kOpened, owner * kExports + index);
  }
  // Holds the stamp on which the owner and `peer` must agree, in operations with one for each pair.
  Word64& stamp(uint64_t sequence, Rank peer) const {
    return in<Word64>(kStamps, sequence % kOperations * size_ + static_cast<uint64_t>(peer));
  }
  // Describes the k-th message to, or from, a peer: k, its tag and its size.
  Word64& message(Rank peer, bool sending, uint64_t k) const {
    return in<Word64>(kSizes, direction(peer, sending) * kMessages + k % kMessages);
  }
  // Counts the messages to, or from, a peer, up to the last one that has ended well.
  Word64& ended(Rank peer, bool sending) const {
    return in<Word64>(kWords, (4 + 2 * size_ + direction(peer, sending)) * 8);
  }
  std::byte* base() const { return base_; }

  // Frees the owner's streams that wait for peers, and its kernels that do. Streams may write to
  // lines again, so it is repeated until all is done. Any thread may call it: it makes no CUDA
  // call.
  void release() const {
    constexpr uint32_t kBeyond = 2 * kAllDone;  // all that is awaited
    abort().store(1, std::memory_order_seq_cst);
    for (Rank rank = 0; rank < static_cast<Rank>(size_); ++rank) {
      for (int lane = 0; lane < kLanes; ++lane) {
        line(rank, lane).store(kBeyond, std::memory_order_seq_cst);
      }
    }
  }

 private:
  enum Part { kInfos, kWords, kLines, kCounts, kExported, kOpened, kStamps, kSizes, kEnd };

  uint64_t at(Part part) const {
    const uint64_t sizes[] = {
        (1 + size_) * sizeof(RankInfo), (5 + 4 * size_) * 64,
        size_ * kLanes * 128,           size_ * 64,
        kExports * sizeof(Export),      size_ * kExports * sizeof(Opened),
        size_ * kOperations * 8,        2 * size_ * kMessages * 8,
    };
    uint64_t offset = 0;
    for (int i = 0; i < part; ++i) offset += (sizes[i] + 127) / 128 * 128;
    return offset;
  }
  static uint64_t direction(Rank peer, bool sending) {
    return static_cast<uint64_t>(2 * peer + (sending ? 1 : 0));
  }
  template <typename T>
  T& in(Part part, std::integral auto index) const {
    return reinterpret_cast<T*>(base_ + at(part))[static_cast<uint64_t>(index)];
  }

  std::byte* base_;
  uint64_t size_;
};

}  // namespace ringcomm::cuda
