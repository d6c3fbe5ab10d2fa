#include "host/tensor_places.h"

#include <functional>

namespace ringcomm {
namespace {

constexpr uint64_t kLeastBytes = 1 << 20;  // in all shards: to ask costs two or three microseconds
constexpr uint64_t kElsewhere = UINT64_MAX;

uint64_t bytes_in_all(const Shape& shape) {
  return sharded(shape.collective) ? total_of(shape.shards) : shape.bytes;
}

}  // namespace

// A factor is each rank's own, and applies to what it reads: it can't read the others' inputs.
bool TensorPlaces::are_asked(const Operation& operation, const Shape& shape, Algorithm algorithm,
                             bool mapped) {
  return mapped && shape.size > 1 && algorithm == Algorithm::kDirect &&
         shape.collective != Collective::kAllToAll && operation.op != ReduceOp::kPremulSum &&
         !operation.whole && bytes_in_all(shape) >= kLeastBytes;
}

// A rank that has not mapped all the others' arenas can read nobody's tensors there. So it says
// that it has none, and nobody reads.
void TensorPlaces::note(const Operation& operation) {
  mine_ = {kElsewhere, kElsewhere};
  for (Rank rank = 0; rank < transport_.size(); ++rank) {
    if (transport_.arena(rank).empty()) return;
  }
  mine_ = {offset_of(operation.input), offset_of(operation.output)};
}

uint64_t TensorPlaces::offset_of(const std::vector<Span>& spans) const {
  const std::span<std::byte> own = transport_.arena(transport_.rank());
  if (spans.empty()) return 0;  // nobody reads it
  const auto follows = [](const Span& a, const Span& b) { return a.data + a.bytes == b.data; };
  const bool in_one_piece = std::ranges::adjacent_find(spans, std::not_fn(follows)) == spans.end();
  const bool inside = spans[0].data >= own.data() && spans[0].data < own.data() + own.size();
  const bool readable = in_one_piece && inside;
  return readable ? static_cast<uint64_t>(spans[0].data - own.data()) : kElsewhere;
}

Shape TensorPlaces::shape_of_telling(const Shape& shape) {
  Shape telling;
  telling.collective = Collective::kAllGather;
  telling.size = shape.size;
  telling.geometry = shape.geometry;
  telling.shards.assign(static_cast<size_t>(shape.size), sizeof(Place));
  return telling;
}

// The others' words: checked before they are an address, and alike on all ranks.
std::byte* TensorPlaces::at(Rank rank, uint64_t offset, uint64_t bytes, uint64_t element) const {
  const bool inside = bytes <= Arena::kBytes && offset <= Arena::kBytes - bytes;
  return inside && offset % element == 0 ? transport_.arena(rank).data() + offset : nullptr;
}

bool TensorPlaces::find(const Shape& shape, Theirs& theirs) const {
  theirs.inputs.clear();
  theirs.outputs.clear();
  for (Rank rank = 0; rank < shape.size; ++rank) {
    const Place& place = all_[static_cast<size_t>(rank)];
    const Sides sides = shape.sides(rank);
    std::byte* const input = at(rank, place.input, sides.input, shape.element);
    std::byte* const output = at(rank, place.output, sides.output, shape.element);
    const bool is_read = shape.collective == Collective::kAllReduce;  // the output, too
    if (input == nullptr || (is_read && output == nullptr)) return false;
    theirs.inputs.push_back(input);
    theirs.outputs.push_back(output);
  }
  return true;
}

}  // namespace ringcomm
