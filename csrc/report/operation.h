// A collective as a caller asks for it, and its fingerprint, on which every rank must agree.
#pragma once

#include <array>
#include <chrono>

#include "exec/host_executor.h"
#include "plan/select.h"
#include "reduce/reduce.h"

namespace ringcomm {

// The kind of call that a collective belongs to. Ranks compare it, and texts name it.
enum class Purpose : uint8_t {
  kCall,     // a call of its own
  kSeveral,  // a call of several tensors, which every rank must cut alike
  kSparse,   // an all_reduce of sparse tensors (torch/sparse.cc)
  kMemory,   // ranks meet, as at a barrier, to map memory (stream/registered_memory.cc)
  kStaged,   // a call on a device that goes through memory of the host (stream/staged.cc)
  kCodes,    // an all_reduce in fewer bits (ringcomm/compression/exchange.py)
};
inline constexpr std::array kPurposeNames = {"call",   "several", "sparse",
                                             "memory", "staged",  "codes"};

// Spans follow the conventions of shapes (plan/shape.h); counts are bytes. Input and output may be
// the same memory wherever torch.distributed works in place. The memory must live until the
// operation ends.
struct Operation : CallShape {
  DType dtype = DType::kUint8;
  ReduceOp op = ReduceOp::kSum;
  double factor = 1;  // kPremulSum: this rank's own
  std::vector<Span> input, output;
  Purpose purpose = Purpose::kCall;
  // A hash of everything else that ranks must pass alike, made by compare() in torch/call.h.
  // 0: there is nothing else.
  uint64_t layout = 0;
  uint32_t line = 0;  // the program's line that calls, as _runtime/lines.py numbers it; 0: unknown
  std::chrono::milliseconds timeout{0};  // 0: the group's
  // If this is a piece of another operation: the terms of the whole, the bytes of its larger side,
  // and how much ranks exchange in all of it. Ranks compare them, too.
  std::optional<Descriptor> whole = std::nullopt;
  uint64_t whole_bytes = 0;
  std::vector<uint64_t> whole_send, whole_recv;  // all_to_all
};

// Throws UsageError when the operation contradicts itself (spans against counts, dtype against op).
void validate(const Operation& operation, int size, Rank rank);
// Makes `piece` a part of `call`: ranks compare the terms of the call, and the purpose.
void make_part(Operation& piece, Operation call, Purpose purpose);

Shape make_shape(const Operation& operation, const Geometry& geometry);
Reduction make_reduction(const Operation& operation, int size);

// Makes the terms that peers compare; a piece has those of the whole. They are equal on every rank,
// except for all_to_all's split sizes (see make_stamps).
Descriptor make_descriptor(const Operation& operation, uint64_t sequence);
// Adds the algorithm to the terms. `terms`: see hash_of_terms().
void set_plan(Descriptor& descriptor, Algorithm algorithm, uint64_t terms);
// Tells whether both make the same call, by whatever algorithm.
bool same_call(const Descriptor& a, const Descriptor& b);
std::string plan_text(const Descriptor& descriptor);  // "ring"
// Tells whether the algorithm is one that the program has registered.
bool by_registered(const Descriptor& descriptor);
Purpose purpose_of(const Descriptor& descriptor);
// Hashes everything that shapes plans, except the operation and the algorithm.
uint64_t hash_of_terms(const Geometry& geometry, const Reach& reach);
uint64_t hash_of(const Descriptor& descriptor);
// Makes the words by which signals name the operation.
void make_stamps(const Operation& operation, const Descriptor& descriptor, Stamps& stamps);

// One side of a message. It goes into the flight recorder, and to no peer.
struct MessageKind {
  bool sending = false;
  DType dtype = DType::kUint8;
  uint64_t count = 0;  // elements
  Rank peer = -1;      // -1: any
  uint32_t tag = 0;
  uint32_t line = 0, layout = 0;  // as in Operation
};
Descriptor make_descriptor(const MessageKind& message);
// Tags from here on are those of windows (message/mailbox.h). Programs have none of them.
inline constexpr uint32_t kWindowTags = uint32_t{1} << 31;
// Packs the terms on which both sides of a message must agree into 48 bits: its size, where that is
// below kMessageBytes, and above it a hash of the size, type, tag and layout.
inline constexpr uint64_t kMessageBytes = (uint64_t{1} << 30) - 1;
uint64_t message_terms(const Descriptor& message);

// Returns "all_reduce float32[500000] SUM", "broadcast float32[10] root 0", or "recv float32[10]
// tag 3 from rank 1". Takes any words: they may be a peer's.
std::string to_text(const Descriptor& descriptor);

}  // namespace ringcomm
