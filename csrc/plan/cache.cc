#include "plan/cache.h"

#include "plan/select.h"

namespace ringcomm {
namespace {

uint64_t heap_bytes(const Shape& shape) {
  return (shape.shards.capacity() + shape.send.capacity() + shape.recv.capacity()) *
         sizeof(uint64_t);
}

}  // namespace

// The geometry is the group's, and the same for almost all of its shapes.
size_t PlanCache::Hash::operator()(const Key& key) const {
  const Shape& shape = *key.shape;
  const uint64_t kind = static_cast<uint64_t>(shape.collective) << 8 |
                        static_cast<uint64_t>(key.algorithm) | shape.element << 16 |
                        static_cast<uint64_t>(shape.root) << 32;
  return mix(mix(mix(mix(mix(0, kind), shape.bytes), shape.shards), shape.send), shape.recv);
}

std::shared_ptr<const Plan> PlanCache::get(const Shape& shape, Algorithm algorithm) {
  const Key key{&shape, algorithm};
  if (!entries_.empty()) {
    const Entry& last = entries_.front();
    if (key == Key{&last.shape, last.algorithm}) return last.plan;
  }
  if (const auto hit = index_.find(key); hit != index_.end()) {
    entries_.splice(entries_.begin(), entries_, hit->second);
    return hit->second->plan;
  }
  auto plan = std::make_shared<const Plan>(make_plan(shape, rank_, algorithm));
  const uint64_t bytes = plan->memory_bytes() + sizeof(Entry) + heap_bytes(shape);
  entries_.push_front({shape, algorithm, plan, bytes});
  index_.emplace(Key{&entries_.front().shape, algorithm}, entries_.begin());
  bytes_ += bytes;
  // The plan just asked for and the one before stay, whatever their size: two that take turns, such
  // as a gather and a scatter, would always be made anew.
  while (bytes_ > limit_bytes_ && entries_.size() > 2) {
    const Entry& oldest = entries_.back();
    bytes_ -= oldest.bytes;
    index_.erase(Key{&oldest.shape, oldest.algorithm});
    entries_.pop_back();
  }
  return plan;
}

}  // namespace ringcomm
