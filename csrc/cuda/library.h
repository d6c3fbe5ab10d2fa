// What libringcomm_cuda.so offers: ranks of one host that move and reduce memory of devices by
// work that their streams do, so that no host waits for another once they have met. The library
// knows no torch. It is opened when the first tensor on a device appears (comm/device_library.cc).
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "cuda/area.h"
#include "plan/plan.h"
#include "plan/shape.h"
#include "plan/spans.h"

namespace ringcomm::cuda {

// Ranks that meet: those of the group, or two of them that exchange messages. Each has a card for
// every circle that it may be in.
struct Circle {
  std::vector<Rank> ranks;
  bool pair = false;

  int card_of(Rank rank) const {
    if (!pair) return 0;
    return 1 + (ranks[0] == rank ? ranks[1] : ranks[0]);
  }
};

// What the ranks of a circle found, the same on each of them.
struct Found {
  bool reach = false;        // all read and write all others' memory, and their streams meet
  bool one_device = false;   // they share one
  bool own_devices = false;  // each has its own
  std::string why;           // where they do not reach one another: one sentence
};

struct TeamOptions {
  Rank rank = 0;
  int device = 0;
  uint64_t most_bytes = 0;                // of the memory that each rank gives; 0: fits the device
  std::string refusal;                    // why this rank maps nobody's memory; empty: it does
  std::vector<std::byte*> areas;          // of each rank
  std::function<const Fd*(Rank)> socket;  // to a rank, for descriptors; it may give null
};

// Where a message is, and whose it is.
struct Transfer {
  bool sending;
  Rank peer;
  Span data;
};

// One rank's part of a group, on one device. One thread at a time, but for release() and poll().
// Whatever fails is a DeviceError; the streams of the group are then in no known state.
class Team {
 public:
  static constexpr uint32_t kSteps = 4;

  virtual ~Team() = default;

  // Every rank of a circle takes step 1; when all cards say so, step 2; up to kSteps. Throws
  // nothing: what fails is on the card.
  virtual void meet(const Circle& circle, uint32_t step) = 0;
  virtual Found found(const Circle& circle) = 0;
  virtual const Geometry& geometry() const = 0;  // of plans, once the group has met

  // Enqueued. `sequence` counts the group's operations; its half of all memory is used.
  virtual void run(Stream stream, const Plan& plan, uint64_t sequence, const Reduction& reduction,
                   const Spans& input, const Spans& output) = 0;
  // all_reduce in rank order, by one kernel that reads all inputs and writes all outputs where
  // ranks share a device, by one kernel a rank where each has its own.
  virtual void all_reduce(Stream stream, uint64_t sequence, const Reduction& reduction,
                          const Spans& input, const Spans& output) = 0;
  // Messages that make progress side by side.
  virtual void transfer(Stream stream, std::span<const Transfer> transfers) = 0;
  // dst[i] = src[i] * factor, as ringcomm::scale().
  virtual void scale(Stream stream, DType dtype, double factor, Span dst, const std::byte* src) = 0;

  // Enqueued: all before it is done when Area::done(track) has come to `value`.
  virtual void mark(Stream stream, int track, uint32_t value) = 0;
  // Frees the streams of this rank that wait for peers, and kernels that do. Other ranks' streams
  // may still write to our lines, so it is repeated until all is done. Makes no CUDA call.
  virtual void release() = 0;
  // Closes peers' memory; then cards say kSteps + 1. This rank's own goes with the team: not before
  // they have done the same.
  virtual void let_go() = 0;

  virtual Api& api() = 0;
};

class Library {
 public:
  virtual ~Library() = default;
  virtual Api& api() = 0;
  virtual std::unique_ptr<Team> make_team(const TeamOptions& options) = 0;
};

// The symbol in the library: returns Library*, never destroyed. `interface`, a hash of all headers
// (RINGCOMM_INTERFACE), must be that of the library, else null: C++ types cross this line.
inline constexpr const char* kLibrarySymbol = "ringcomm_cuda_library";
using LibraryFunction = Library* (*)(const char* interface);

}  // namespace ringcomm::cuda
