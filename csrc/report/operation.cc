#include "report/operation.h"

#include "plan/registry.h"

namespace ringcomm {
namespace {

// The words of a Descriptor.
enum Word { kKind, kCount, kSplits, kLayout, kPlan };

// Messages have these kinds in the place of a collective. kNobody stands for no root.
constexpr uint64_t kSend = kCollectives, kRecv = kCollectives + 1;
constexpr uint64_t kNobody = 0xffffff;

uint64_t hash_of(const std::vector<uint64_t>& counts) {
  if (std::ranges::adjacent_find(counts, std::not_equal_to()) == counts.end()) return 0;
  return mix(1, counts);
}

}  // namespace

void validate(const Operation& operation, int size, Rank rank) {
  const char* name = to_string(operation.collective);
  RINGCOMM_CHECK(operation.root >= 0 && operation.root < size, name,
                 ": invalid root rank: ", operation.root);
  if (reduces(operation.collective)) {
    const std::string refusal = why_not(operation.dtype, operation.op);
    RINGCOMM_CHECK(refusal.empty(), name, ": ", refusal);
  }
  const auto ranks = static_cast<size_t>(size);
  if (sharded(operation.collective)) {
    RINGCOMM_CHECK(operation.shards.size() == ranks, name, ": ", operation.shards.size(),
                   " shards for ", size, " ranks");
  }
  if (operation.collective == Collective::kAllToAll) {
    RINGCOMM_CHECK(operation.send.size() == ranks && operation.recv.size() == ranks, name, ": ",
                   operation.send.size(), " and ", operation.recv.size(), " splits for ", size,
                   " ranks");
    const auto self = static_cast<size_t>(rank);
    RINGCOMM_CHECK(operation.send[self] == operation.recv[self], name, ": rank ", rank, " sends ",
                   operation.send[self], " bytes to itself and expects ", operation.recv[self]);
  }
  const Sides sides = operation.sides(rank);
  RINGCOMM_CHECK(bytes_of(operation.input) == sides.input, name, ": input has ",
                 bytes_of(operation.input), " bytes, not ", sides.input);
  RINGCOMM_CHECK(bytes_of(operation.output) == sides.output, name, ": output has ",
                 bytes_of(operation.output), " bytes, not ", sides.output);
}

void make_part(Operation& piece, Operation call, Purpose purpose) {
  call.purpose = purpose;
  piece.whole = make_descriptor(call, 0);
}

Shape make_shape(const Operation& operation, const Geometry& geometry) {
  Shape shape;
  static_cast<CallShape&>(shape) = static_cast<const CallShape&>(operation);
  shape.size = geometry.size;
  shape.element = size_of(operation.dtype);
  shape.geometry = geometry;
  return shape;
}

Reduction make_reduction(const Operation& operation, int size) {
  return {operation.dtype, operation.op, size, operation.factor};
}

Descriptor make_descriptor(const Operation& operation, uint64_t sequence) {
  Descriptor descriptor = operation.whole.value_or(Descriptor());
  descriptor.sequence = sequence;
  if (operation.whole) return descriptor;
  const auto collective = static_cast<uint64_t>(operation.collective);
  const auto dtype = static_cast<uint64_t>(operation.dtype);
  const uint64_t op = reduces(operation.collective) ? static_cast<uint64_t>(operation.op) : 0xff;
  const auto root = rooted(operation.collective) ? static_cast<uint64_t>(operation.root) : kNobody;
  descriptor.words[kKind] = collective | dtype << 8 | op << 16 | root << 24 |
                            static_cast<uint64_t>(operation.purpose) << 48;
  const bool split = operation.collective == Collective::kAllToAll;
  const uint64_t bytes =
      sharded(operation.collective) ? total_of(operation.shards) : operation.bytes;
  descriptor.words[kCount] = split ? 0 : bytes / size_of(operation.dtype);
  descriptor.words[kSplits] = hash_of(operation.shards);
  descriptor.words[kLayout] = operation.layout;
  return descriptor;
}

void set_plan(Descriptor& descriptor, Algorithm algorithm, uint64_t terms) {
  descriptor.words[kPlan] = terms << 8 | static_cast<uint64_t>(algorithm);
}

bool same_call(const Descriptor& a, const Descriptor& b) {
  Descriptor other = b;
  other.words[kPlan] = a.words[kPlan];
  return other == a;
}

std::string plan_text(const Descriptor& descriptor) {
  const auto by = static_cast<Algorithm>(descriptor.words[kPlan] & 0xff);
  if (!is_registered(by) && static_cast<int>(by) >= kNamed) return "a kernel";  // it may be garbage
  return by == kByGraph ? "a CUDA graph" : by == kHandOver ? "a kernel" : to_string(by);
}

bool by_registered(const Descriptor& descriptor) {
  return is_registered(static_cast<Algorithm>(descriptor.words[kPlan] & 0xff));
}

Purpose purpose_of(const Descriptor& descriptor) {
  return static_cast<Purpose>(descriptor.words[kKind] >> 48 & 0xff);
}

uint64_t hash_of_terms(const Geometry& geometry, const Reach& reach) {
  const auto& [size, segment, room, inbox, slots, line, one_shot] = geometry;  // each of them
  const auto& [local, site, costs, near, order] = static_cast<const Levels&>(reach);
  uint64_t hash = mix(static_cast<uint64_t>(size), static_cast<uint64_t>(local));
  hash = mix(hash, std::vector{segment, room, inbox, slots, line, one_shot});
  hash = mix(hash, static_cast<uint64_t>(site));
  if (order) hash = mix(hash, std::vector<uint64_t>(order->begin(), order->end()));
  for (const auto& [alpha, beta, gamma] : {costs, near}) {
    for (const double cost : {alpha, beta, gamma}) hash = mix(hash, std::bit_cast<uint64_t>(cost));
  }
  return hash;
}

Descriptor make_descriptor(const MessageKind& message) {
  Descriptor descriptor;
  const auto peer = message.peer < 0 ? kNobody : static_cast<uint64_t>(message.peer);
  descriptor.words[kKind] = (message.sending ? kSend : kRecv) |
                            static_cast<uint64_t>(message.dtype) << 8 | 0xff << 16 | peer << 24;
  descriptor.words[kCount] = message.count;
  descriptor.words[kSplits] = message.tag;
  descriptor.words[kLayout] = message.layout;
  return descriptor;
}

uint64_t message_terms(const Descriptor& message) {
  const uint64_t dtype = message.words[kKind] >> 8 & 0xff;
  const uint64_t bytes = message.words[kCount] * size_of(static_cast<DType>(dtype));
  const uint64_t hash = mix(0, {bytes, dtype, message.words[kSplits], message.words[kLayout]});
  return hash >> 46 << 30 | std::min(bytes, kMessageBytes);
}

uint64_t hash_of(const Descriptor& descriptor) {
  uint64_t hash = descriptor.sequence;
  for (const uint64_t word : descriptor.words) hash = mix(hash, word);
  return hash;
}

void make_stamps(const Operation& operation, const Descriptor& descriptor, Stamps& stamps) {
  const uint64_t hash = stamps.common = hash_of(descriptor);
  const auto stamp = [&](auto& words, const auto& parts, const auto& wholes) {
    words.clear();
    for (size_t i = 0; i < parts.size(); ++i) {
      words.push_back(mix(wholes.empty() ? hash : mix(hash, wholes[i]), parts[i]));
    }
  };
  stamp(stamps.sent, operation.send, operation.whole_send);
  stamp(stamps.received, operation.recv, operation.whole_recv);
}

std::string to_text(const Descriptor& descriptor) {
  const uint64_t kind = descriptor.words[kKind];
  const uint64_t collective = kind & 0xff, dtype = kind >> 8 & 0xff, op = kind >> 16 & 0xff;
  const uint64_t root = kind >> 24 & 0xffffff;
  if (collective > kRecv || dtype >= kDTypes) return "an unknown collective";
  if (collective >= kSend) {
    const bool sending = collective == kSend;
    const std::string peer = root == kNobody ? "any rank" : str("rank ", root);
    if (const uint64_t tag = descriptor.words[kSplits]; tag >= kWindowTags) {
      const std::string window = str(" window ", tag - kWindowTags, sending ? " to " : " from ");
      if (descriptor.words[kCount] == 0)
        return str(sending ? "signal" : "wait_signal", " of", window, peer);
      return str("put ", to_string(static_cast<DType>(dtype)), "[", descriptor.words[kCount],
                 "] into window ", tag - kWindowTags, " of ", peer);
    }
    return str(sending ? "send " : "recv ", to_string(static_cast<DType>(dtype)), "[",
               descriptor.words[kCount], "] tag ", descriptor.words[kSplits],
               sending ? " to " : " from ", peer);
  }
  const Purpose purpose = purpose_of(descriptor);
  if (purpose == Purpose::kMemory) return "registration of memory";
  std::string text = to_string(static_cast<Collective>(collective));
  if (static_cast<Collective>(collective) == Collective::kBarrier) return text;
  text += str(" ", to_string(static_cast<DType>(dtype)));
  if (static_cast<Collective>(collective) != Collective::kAllToAll && purpose != Purpose::kSparse) {
    text += str("[", descriptor.words[kCount], "]");
  }
  if (op < kReduceOps) text += str(" ", to_string(static_cast<ReduceOp>(op)));
  if (root != kNobody) text += str(" root ", root);
  if (descriptor.words[kSplits] != 0) text += " uneven";
  const uint64_t layout = descriptor.words[kLayout] % 10000;
  if (purpose == Purpose::kSparse) return text + str(" of sparse tensors of sizes #", layout);
  if (purpose == Purpose::kCodes) return text + str(" for a quantized all_reduce #", layout);
  if (purpose == Purpose::kSeveral) return text + str(" in tensors of sizes #", layout);
  return descriptor.words[kLayout] == 0 ? text : text + str(" memory layout ", layout);
}

}  // namespace ringcomm
