// Scatter and gather through the ring: shards travel neighbour to neighbour, so these are for
// fabrics where only neighbours reach each other well. Positions count from the root; position 1 is
// the root's next rank. What passes through is staged in the rank's own window, to give the inbox
// slot back at once.
#include <vector>

#include "plan/builder.h"
#include "plan/planners.h"

namespace ringcomm {
namespace {

class Relay {
 public:
  Relay(const Shape& shape, Rank rank, bool from_root)
      : plan_(shape, Algorithm::kRing, rank),
        shape_(shape),
        size_(shape.size),
        position_(shape.after(rank, -shape.root)),
        slots_(shape.geometry.slots),
        slot_(std::min(shape.slot_bytes(), shape.align(shape.geometry.window_bytes() /
                                                       std::max<uint64_t>(slots_, 4)))) {
    uint64_t largest = 0;
    for (int p = 1; p < size_; ++p) largest = std::max(largest, shard(p).total);
    passes_ = Segments{largest, slot_}.count();
    const Rank near = plan_.peer(-1), far = plan_.peer(1);
    nearer_ = link(from_root ? near : rank, from_root ? rank : near, size_ - position_);
    farther_ = link(from_root ? rank : far, from_root ? far : rank, size_ - 1 - position_);
  }

  // Farthest shard first, so that all links are soon busy.
  Plan scatter() {
    if (position_ > 0 && called(position_)) plan_.signal(shape_.root, kCredit);
    repeat([&](uint64_t c) {
      for (int p = size_ - 1; p > position_; --p) give_farther(c, p);
      if (position_ > 0) keep(c);
    });
    if (position_ == 0) {
      roll_call(Verb::kWait, 1);
      copy_own(plan_.output(0), plan_.input(shape_.shard_offset(shape_.root)));
    }
    return plan_.finish();
  }

  Plan gather() {
    if (position_ == 0) {
      roll_call(Verb::kSignal, 1);
      copy_own(plan_.output(shape_.shard_offset(shape_.root)), plan_.input(0));
    }
    repeat([&](uint64_t c) {
      if (position_ > 0) give_mine(c);
      for (int p = position_ + 1; p < size_; ++p) take_farther(c, p);
    });
    if (position_ > 0 && called(position_)) plan_.wait(shape_.root, kCredit);
    return plan_.finish();
  }

 private:
  Segments shard(int position) const { return {shape_.shards[rank_at(position)], slot_}; }
  size_t rank_at(int position) const {
    return static_cast<size_t>(shape_.after(shape_.root, position));
  }
  uint64_t whole_side(uint64_t c, int position) const {
    return shape_.shard_offset(static_cast<Rank>(rank_at(position))) + shard(position).offset(c);
  }

  Link link(Rank from, Rank to, int per_pass) const {
    return {from, to, passes_ * static_cast<uint64_t>(per_pass), slot_};
  }

  // The farthest position that `position` knows to have begun once it may send this message on:
  // credit j of a link was given when its reader had the credit for its own latest message, and
  // so on around the ring.
  int reach(int position, uint64_t message) const {
    while (position + 1 < size_ && message >= slots_) {
      const uint64_t credit = message - slots_;
      const uint64_t per_pass = static_cast<uint64_t>(size_ - 1 - position);
      ++position;
      if (per_pass == 1) break;
      message = credit / per_pass * (per_pass - 1) + std::min(credit % per_pass, per_pass - 2);
    }
    return position;
  }

  // Is there a roll call (see rooted.cc) between the root and position p? What a position sends or
  // receives tells it of all on the way to the root. It must hear of p, beyond it, from its own
  // credits or with the last message it gets: from those of a rank on that message's way, or from
  // the root's roll call, which stands before the last message to p - 1. Gather is the mirror.
  bool called(int p) const {
    for (int q = 0; q < p; ++q) {
      const auto per_pass = [&](int v) { return static_cast<uint64_t>(size_ - 1 - v); };
      int known = reach(q, passes_ * per_pass(q) - 1);
      for (int v = 0; v < q; ++v) {
        known = std::max(known, reach(v, (passes_ - 1) * per_pass(v) + per_pass(q)));
      }
      if (known < p) return true;
    }
    return false;
  }
  void roll_call(Verb verb, int position) {
    if (position >= size_ || !called(position)) return;
    const Rank r = static_cast<Rank>(rank_at(position));
    verb == Verb::kWait ? plan_.wait(r, kCredit) : plan_.signal(r, kCredit);
  }

  template <typename Pass>
  void repeat(Pass pass) {
    Passes passes{passes_, slots_, slot_, {slots_, minus(passes_, slots_), minus(passes_, 1)}};
    for (int p = 1; p < size_; ++p) {
      passes.edges.insert(passes.edges.end(), {shard(p).full(), shard(p).count()});
    }
    plan_.repeat(passes, pass);
  }

  // The number on a link of position p's piece in pass c.
  uint64_t number(const Link& link, uint64_t c, int order) const {
    return c * (link.messages / passes_) + static_cast<uint64_t>(order);
  }

  void give_farther(uint64_t c, int p) {
    const uint64_t bytes = shard(p).length(c);
    const int order = size_ - 1 - p;
    const uint64_t out = number(farther_, c, order);
    plan_.acquire(farther_, out);
    if (position_ == 0) {
      if (c + 1 == passes_) roll_call(Verb::kWait, p + 1);
      plan_.put(farther_, out, plan_.input(whole_side(c, p)), bytes);
    } else {
      const Ref staged = stage(nearer_, number(nearer_, c, order), out, bytes);
      plan_.put(farther_, out, staged, bytes);
    }
  }

  void keep(uint64_t c) {
    const uint64_t in = number(nearer_, c, size_ - 1 - position_);
    plan_.wait(nearer_.from);
    plan_.copy(plan_.output(shard(position_).offset(c)), plan_.slot(nearer_, in),
               shard(position_).length(c));
    plan_.release(nearer_, in);
  }

  void give_mine(uint64_t c) {
    const uint64_t out = number(nearer_, c, 0);
    plan_.acquire(nearer_, out);
    plan_.put(nearer_, out, plan_.input(shard(position_).offset(c)), shard(position_).length(c));
  }

  void take_farther(uint64_t c, int p) {
    const uint64_t bytes = shard(p).length(c);
    const uint64_t in = number(farther_, c, p - position_ - 1);
    if (position_ > 0) {
      const uint64_t out = number(nearer_, c, p - position_);
      plan_.acquire(nearer_, out);
      plan_.put(nearer_, out, stage(farther_, in, out, bytes), bytes);
      return;
    }
    plan_.wait(farther_.from);
    if (c == 0) roll_call(Verb::kSignal, p + 1);
    plan_.copy(plan_.output(whole_side(c, p)), plan_.slot(farther_, in), bytes);
    plan_.release(farther_, in);
  }

  // Moves an arrived message to the window slot of message `out`. That slot is free: the credit
  // for `out` says that the last put from it has arrived.
  Ref stage(const Link& link, uint64_t in, uint64_t out, uint64_t bytes) {
    const Ref staged = plan_.window(plan_.rank(), out % slots_ * slot_);
    plan_.wait(link.from);
    plan_.copy(staged, plan_.slot(link, in), bytes);
    plan_.release(link, in);
    return staged;
  }

  void copy_own(Ref dst, Ref src) { plan_.copy(dst, src, shard(0).total); }

  PlanBuilder plan_;
  const Shape& shape_;
  const int size_;
  const int position_;
  const uint64_t slots_, slot_;
  uint64_t passes_ = 0;
  Link nearer_{}, farther_{};  // towards the root, and away from it
};

}  // namespace

Plan ring_scatter(const Shape& shape, Rank rank) { return Relay(shape, rank, true).scatter(); }
Plan ring_gather(const Shape& shape, Rank rank) { return Relay(shape, rank, false).gather(); }

}  // namespace ringcomm
