// The Team (library.h) over a table of functions, real or simulated.
#pragma once

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "cuda/library.h"
#include "cuda/memory.h"

namespace ringcomm::cuda {

// The memory that a rank gives the others of a circle:
//   | a word from each rank, as proof of what is mapped | TwoShotFlags | half 0 | half 1 | messages
//   |
// In a circle of two only messages follow the flags. Of a group's, messages have a quarter.
inline constexpr uint64_t kProofs = 4096, kPrologue = 64 * 1024;
static_assert(kProofs + sizeof(TwoShotFlags) <= kPrologue);

class DeviceTeam final : public Team {
 public:
  DeviceTeam(Api& api, const TeamOptions& options);
  ~DeviceTeam() override;
  DeviceTeam(const DeviceTeam&) = delete;
  DeviceTeam& operator=(const DeviceTeam&) = delete;

  void meet(const Circle& circle, uint32_t step) override;
  Found found(const Circle& circle) override;
  const Geometry& geometry() const override { return geometry_; }
  void run(Stream stream, const Plan& plan, uint64_t sequence, const Reduction& reduction,
           const Spans& input, const Spans& output) override;
  void all_reduce(Stream stream, uint64_t sequence, const Reduction& reduction, const Spans& input,
                  const Spans& output) override;
  void transfer(Stream stream, std::span<const Transfer> transfers) override;
  void scale(Stream stream, DType dtype, double factor, Span dst, const std::byte* src) override;
  void mark(Stream stream, int track, uint32_t value) override;
  void release() override;
  void let_go() override;
  Api& api() override { return api_; }

 private:
  struct Memory {
    std::vector<std::byte*> of;  // by rank, as seen here; null: not of the circle, or not reached
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
    uint64_t element, count, round;  // count, round: elements

    uint64_t number() const { return count == 0 ? 1 : (count + round - 1) / round; }
    uint64_t first(uint64_t i) const { return i * round; }
    uint64_t length(uint64_t i) const { return std::min(round, count - first(i)); }
  };

  Card& card(const Circle& circle, Rank rank) const {
    return peer(rank).area.card(circle.card_of(rank));
  }
  void prepare(Card& card);
  void open(const Circle& circle, Card& card);
  void reach(const Circle& circle, Card& card);
  void verify(const Circle& circle, Card& card);
  uint64_t& proof(Rank rank) { return reinterpret_cast<uint64_t*>(proofs_)[rank]; }
  void set_geometry(uint64_t bytes);
  uint64_t bytes_of(const Circle& circle) const;

  Peer& peer(Rank rank) { return *peers_[static_cast<size_t>(rank)]; }
  const Peer& peer(Rank rank) const { return *peers_[static_cast<size_t>(rank)]; }
  const Area& own() const { return peer(options_.rank).area; }
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
  class Lowering;
  // all_reduce by kernels of its own.
  bool fill_slot(const Rounds& rounds);
  void lead(Stream stream, const Rounds& rounds, bool staged);
  void follow(Stream stream, const Rounds& rounds, bool staged);
  void two_shot(Stream stream, const Rounds& rounds);
  void stage(Stream stream, const Rounds& rounds, uint64_t i);
  void unstage(Stream stream, const Rounds& rounds, uint64_t i);
  // The next piece of a message.
  struct Inbox {
    std::byte* memory;
    uint64_t bytes;
  };
  Inbox inbox(Rank of, Rank from) const;
  void send_chunk(Stream stream, Rank to, Span data);
  void receive_chunk(Stream stream, Rank from, Span data);

  Api& api_;
  const TeamOptions options_;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::map<int, Memory> memory_;  // by this rank's card
  Memory* group_ = nullptr;       // card 0's, once it has met
  bool one_device_ = false;
  Geometry geometry_;
  std::byte* proofs_ = nullptr;  // of the host: a copy of a prologue
  std::vector<Word> words_;      // to be written and waited for, next
  std::optional<Exports> exports_;
  std::deque<Imports> imports_;
};

}  // namespace ringcomm::cuda
