// A collective as a caller asks for it, and its fingerprint, on which every rank must agree.
#pragma once

#include <chrono>

#include "exec/host_executor.h"
#include "plan/select.h"
#include "reduce/reduce.h"

namespace ringcomm {

// What a collective is part of. Ranks compare it, and texts say it.
enum class Purpose : uint8_t {
  kCall,     // nothing else
  kSeveral,  // a call of several tensors, which every rank must cut alike
  kSparse,   // an all_reduce of sparse tensors (torch/sparse.cc)
  kBuffers,  // ranks tell where tensors lie that others read (torch/peer_reads.cc)
  kMemory,   // ranks meet, as at a barrier, to map memory (stream/registered_memory.cc)
  kStaged,   // a call on a device that goes through memory of the host (stream/staged.cc)
  kCodes,    // an all_reduce in fewer bits (ringcomm/_exchange.py)
};

// Spans follow the conventions of shapes (plan/shape.h); counts are bytes. Input and output may be
// the same memory wherever torch.distributed works in place. The memory lives until the operation
// ends.
struct Operation : CallShape {
  DType dtype = DType::kUint8;
  ReduceOp op = ReduceOp::kSum;
  double factor = 1;  // kPremulSum: this rank's own
  std::vector<Span> input, output;
  Purpose purpose = Purpose::kCall;
  // Hash of all else that ranks must pass alike: torch/call.h's compare() makes it. 0: nothing.
  uint64_t layout = 0;
  uint32_t line = 0;  // of the program, that calls: a number of ringcomm/_lines.py's; 0: unknown
  std::chrono::milliseconds timeout{0};  // 0: the group's
  // Of a piece of another operation: the terms of that, the bytes of its larger side, and what
  // ranks exchange in all of it. They compare that, too.
  std::optional<Descriptor> whole = std::nullopt;
  uint64_t whole_bytes = 0;
  std::vector<uint64_t> whole_send, whole_recv;  // all_to_all
};

// Throws UsageError when the operation contradicts itself (spans against counts, dtype against op).
void validate(const Operation& operation, int size, Rank rank);
// Makes `piece` a part of that call: ranks compare the terms of the call, and the purpose.
void make_part(Operation& piece, Operation call, Purpose purpose);

Shape make_shape(const Operation& operation, const Geometry& geometry);
Reduction make_reduction(const Operation& operation, int size);

// Makes the terms that peers compare: of a piece, those of the whole. They are equal on every rank,
// except for all_to_all's split sizes (see make_stamps).
Descriptor make_descriptor(const Operation& operation, uint64_t sequence);
// Records the algorithm. `terms`: see hash_of_terms().
void set_plan(Descriptor& descriptor, Algorithm algorithm, uint64_t terms);
// Do both call the same, by whatever algorithm?
bool same_call(const Descriptor& a, const Descriptor& b);
std::string plan_text(const Descriptor& descriptor);  // "ring"
bool by_registered(const Descriptor& descriptor);     // an algorithm of the program's own
Purpose purpose_of(const Descriptor& descriptor);
// Hashes everything that shapes plans, except the operation and the algorithm.
uint64_t hash_of_terms(const Geometry& geometry, const Reach& reach);
uint64_t hash_of(const Descriptor& descriptor);
void make_stamps(const Operation& operation, const Descriptor& descriptor, Stamps& stamps);

// One side of a message: it goes into the flight recorder, to no peer.
struct MessageKind {
  bool sending = false;
  DType dtype = DType::kUint8;
  uint64_t count = 0;  // elements
  Rank peer = -1;      // -1: any
  uint32_t tag = 0;
  uint32_t line = 0, layout = 0;  // as Operation's
};
Descriptor make_descriptor(const MessageKind& message);
// On what both sides of a message must agree, in 48 bits: type, tag, and the last bits of its size.
inline constexpr uint64_t kMessageBytes = (uint64_t{1} << 36) - 1;
uint64_t message_terms(const Descriptor& message);

// "all_reduce float32[500000] SUM", "broadcast float32[10] root 0", "recv float32[10] tag 3 from
// rank 1". Safe on a peer's words.
std::string to_text(const Descriptor& descriptor);

}  // namespace ringcomm
