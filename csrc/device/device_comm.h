// One rank's part of a group on one device: ranks of one host that move and reduce memory of
// devices by work that their streams do, so that no host waits for another once they have met. All
// calls to a device go through the table of functions (api.h).
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "device/exports.h"
#include "plan/plan.h"
#include "plan/shape.h"
#include "transport/transport.h"

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
};

// The memory that a rank gives the others of a subgroup:
//   | proofs: a word from each rank | TwoShotFlags | half 0 | half 1 | messages |
// A subgroup of two has only messages after the flags. In a group, messages have a quarter.
inline constexpr uint64_t kProofs = 4096, kPrologue = 64 * 1024;
static_assert(kProofs + sizeof(TwoShotFlags) <= kPrologue);

// One thread at a time may call it, except for release(). Every failure is a DeviceError. Then the
// streams of the group are in no known state.
class DeviceComm {
 public:
  static constexpr uint32_t kSteps = 4;

  // Each rank gives `most_bytes` of its memory, or if that is 0 a share that fits the device. If
  // there is a `refusal`, the reason, this rank maps no other rank's memory.
  DeviceComm(Api& api, Transport& transport, int device, uint64_t most_bytes, std::string refusal,
             std::function<void(const std::string& text)> warn);
  ~DeviceComm();
  DeviceComm(const DeviceComm&) = delete;
  DeviceComm& operator=(const DeviceComm&) = delete;

  // Every rank of a subgroup takes step 1; when all say so in their RankInfo, step 2; up to kSteps.
  // Throws nothing: a failure is written there.
  void bootstrap(const Subgroup& subgroup, uint32_t step);
  PeerAccess access(const Subgroup& subgroup);
  const Geometry& geometry() const { return geometry_; }  // of plans, once the group has met

  // Enqueued. `sequence` counts the group's operations; its half of all memory is used.
  void run(Stream stream, const Plan& plan, uint64_t sequence, const Reduction& reduction,
           const Spans& input, const Spans& output);
  // all_reduce in rank order, by one kernel that reads all inputs and writes all outputs where
  // ranks share a device, by one kernel a rank where each has its own.
  void all_reduce(Stream stream, uint64_t sequence, const Reduction& reduction, const Spans& input,
                  const Spans& output);
  // Do peers export something new, or have they freed something? Then look() while nothing is under
  // way on the device.
  bool has_news() const;
  void look();
  // Messages that make progress side by side.
  void transfer(Stream stream, std::span<const Transfer> transfers);
  // dst[i] = src[i] * factor, as ringcomm::scale().
  void scale(Stream stream, DType dtype, double factor, Span dst, const std::byte* src);

  // Enqueued: all before it is done when Area::done(timeline) has come to `value`.
  void mark(Stream stream, int timeline, uint32_t value);
  // Frees the streams of this rank that wait for peers, and kernels that do. Other ranks' streams
  // may still write to our lines, so it is repeated until all is done. Makes no CUDA call.
  void release();
  // Closes peers' memory; then each RankInfo says kSteps + 1. This rank's own goes at the end: not
  // before they have done the same.
  void let_go();

 private:
  struct Memory {
    std::vector<std::byte*> of;  // by rank, as seen here; null: not of the subgroup, or not reached
    uint64_t bytes = 0;          // behind the prologue
  };
  struct Peer {
    explicit Peer(Area area) : area(area) {}
    Area area;
    std::byte* device_area = nullptr;            // null: of another host, or not registered
    uint32_t sent[kLanes] = {};                  // signals to it
    std::atomic<uint32_t> awaited[kLanes] = {};  // signals from it; partner: release()
    uint64_t messages[2] = {};                   // chunks received, sent
  };
  // An all_reduce in rounds of what a window holds, as its kernels need them.
  struct Rounds {
    uint64_t sequence;
    const Spans& input;
    const Spans& output;
    Math math;
    Segments bytes;
  };

  RankInfo& info(const Subgroup& subgroup, Rank rank) const {
    return peer(rank).area.info(subgroup.index_of(rank));
  }
  void prepare(RankInfo& info);
  void open(const Subgroup& subgroup, RankInfo& info);
  void reach(const Subgroup& subgroup, RankInfo& info);
  void verify(const Subgroup& subgroup, RankInfo& info);
  uint64_t& proof(Rank rank) { return reinterpret_cast<uint64_t*>(proofs_)[rank]; }
  uint64_t bytes_of(const Subgroup& subgroup) const;

  Peer& peer(Rank rank) { return *peers_[static_cast<size_t>(rank)]; }
  const Peer& peer(Rank rank) const { return *peers_[static_cast<size_t>(rank)]; }
  const Area& own() const { return peer(rank_).area; }
  int size() const { return static_cast<int>(peers_.size()); }
  std::byte* half(Rank rank, uint64_t sequence) const;
  std::byte* word(Rank of, const void* in_its_area) const;

  void signal(Rank to, int lane, uint32_t by = 1);
  void await(Rank from, int lane, uint32_t by = 1);
  void flush(Stream stream);
  void copy(Stream stream, std::byte* to, const std::byte* from, uint64_t bytes);
  template <typename Args>
  void launch(Stream stream, const Args& args);
  // Steps of a plan.
  struct Lowering;
  // all_reduce by kernels of its own.
  bool fill_slot(const Rounds& rounds);
  void lead(Stream stream, const Rounds& rounds, bool staged);
  void follow(Stream stream, const Rounds& rounds, bool staged);
  void two_shot(Stream stream, const Rounds& rounds);
  void stage(Stream stream, const Rounds& rounds, uint64_t i);
  void unstage(Stream stream, const Rounds& rounds, uint64_t i);
  Span slot(Rank of, Rank from, uint64_t chunk) const;
  void send_chunk(Stream stream, Rank to, Span data);
  void receive_chunk(Stream stream, Rank from, Span data);

  Api& api_;
  Transport& transport_;
  const Rank rank_;
  const int device_;
  const uint64_t most_bytes_;
  const std::string refusal_;
  const std::function<void(const std::string& text)> warn_;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::map<int, Memory> memory_;  // by this rank's info
  Memory* group_ = nullptr;       // info 0's, once it has met
  bool one_device_ = false;
  Geometry geometry_;
  std::byte* proofs_ = nullptr;  // of the host: a copy of a prologue
  Stream stream_ = nullptr;      // for meeting: others may wait for peers
  std::vector<Word> words_;      // to be written and waited for, next
  std::optional<Exports> exports_;
  std::deque<Imports> imports_;
};

}  // namespace ringcomm::cuda
