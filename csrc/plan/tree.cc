// Broadcast and reduce along a tree that grows from the root, in segments through the inboxes. Two
// trees: binomial, log2 n deep, for short messages (Thakur, Rabenseifner, Gropp, "Optimization of
// Collective Communication Operations in MPICH", 2005), and a chain, where a rank has one child,
// which moves long messages over every link once: the pipelined ring without its closing edge.
#include <bit>
#include <vector>

#include "plan/builder.h"
#include "plan/planners.h"

namespace ringcomm {
namespace {

struct Node {
  Rank parent = -1;
  std::vector<Rank> children;  // the deepest first
  uint64_t depth = 0;
};

using Grow = Node (*)(const Shape&, Rank);

// Ranks are numbered from the root: the parent of v is v without its lowest bit.
Node binomial(const Shape& shape, Rank rank) {
  const unsigned size = static_cast<unsigned>(shape.size);
  const unsigned v = static_cast<unsigned>(shape.after(rank, -shape.root));
  const unsigned lowest = v == 0 ? std::bit_ceil(size) : v & -v;
  Node node;
  node.depth = static_cast<uint64_t>(std::popcount(v));
  if (v > 0) node.parent = shape.after(shape.root, static_cast<int>(v - lowest));
  for (unsigned bit = lowest / 2; bit > 0; bit /= 2) {
    if (v + bit < size) node.children.push_back(shape.after(rank, static_cast<int>(bit)));
  }
  return node;
}

Node chain(const Shape& shape, Rank rank) {
  Node node;
  node.depth = static_cast<uint64_t>(shape.after(rank, -shape.root));
  if (rank != shape.root) node.parent = shape.after(rank, -1);
  if (shape.after(rank) != shape.root) node.children.push_back(shape.after(rank));
  return node;
}

// What both directions share. A rank's data tells only part of the tree that all have begun, so
// there is a roll call over the root, see rooted.cc; a rank needs none if the message is so long
// that the credits, which run so many messages behind on each level as there are slots, come to
// tell the root of it.
class TreePlan {
 public:
  TreePlan(const Shape& shape, Rank rank, Algorithm algorithm, Grow grow)
      : plan_(shape, algorithm, rank),
        grow_(grow),
        node_(grow(shape, rank)),
        rank_(rank),
        root_(shape.root),
        segments_{shape.bytes, shape.slot_bytes()},
        count_(segments_.count()) {}

  Plan broadcast() {
    if (rank_ != root_ && called(rank_)) plan_.signal(root_, kCredit);
    plan_.repeat(passes(), [&](uint64_t c) { rank_ == root_ ? send(c) : pass_down(c); });
    return plan_.finish();
  }

  Plan reduce() {
    plan_.repeat(passes(), [&](uint64_t c) { rank_ == root_ ? collect(c) : pass_up(c); });
    if (rank_ != root_ && called(rank_)) plan_.wait(root_, kCredit);
    return plan_.finish();
  }

 private:
  bool called(Rank r) const { return count_ <= plan_.slots() * grow_(plan_.shape(), r).depth; }
  Link link(Rank from, Rank to) const { return plan_.link(from, to, segments_.total); }
  Passes passes() const {
    const uint64_t slots = plan_.slots();
    return {count_, slots, segments_.unit, {slots, minus(count_, slots), minus(count_, 1)}};
  }

  void acquire_children(uint64_t c) {
    for (Rank child : node_.children) plan_.acquire(link(rank_, child), c);
  }
  void put_to_children(uint64_t c, Ref source) {
    for (Rank child : node_.children) {
      plan_.put(link(rank_, child), c, source, segments_.length(c));
    }
  }

  void send(uint64_t c) {
    acquire_children(c);
    for (int i = 1; c + 1 == count_ && i < plan_.shape().size; ++i) {
      if (called(plan_.peer(i))) plan_.wait(plan_.peer(i), kCredit);
    }
    const Ref source = plan_.input(segments_.offset(c));
    put_to_children(c, source);
    plan_.copy(plan_.output(segments_.offset(c)), source, segments_.length(c));
  }

  void pass_down(uint64_t c) {
    const Link up = link(node_.parent, rank_);
    const Ref mine = plan_.output(segments_.offset(c));
    acquire_children(c);
    plan_.wait(node_.parent);
    plan_.copy(mine, plan_.slot(up, c), segments_.length(c));
    plan_.release(up, c);
    put_to_children(c, mine);
  }

  // My own segment, then the children's, the shallowest first: it is there first.
  std::vector<Ref> sources(uint64_t c) const {
    std::vector<Ref> refs = {plan_.input(segments_.offset(c))};
    for (auto child = node_.children.rbegin(); child != node_.children.rend(); ++child) {
      refs.push_back(plan_.slot(link(*child, rank_), c));
    }
    return refs;
  }
  void wait_for_children() {
    for (auto child = node_.children.rbegin(); child != node_.children.rend(); ++child) {
      plan_.wait(*child);
    }
  }
  void release_children(uint64_t c) {
    for (Rank child : node_.children) plan_.release(link(child, rank_), c);
  }

  void collect(uint64_t c) {
    wait_for_children();
    for (int i = 1; c == 0 && i < plan_.shape().size; ++i) {
      if (called(plan_.peer(i))) plan_.signal(plan_.peer(i), kCredit);
    }
    plan_.reduce({plan_.output(segments_.offset(c))}, sources(c), segments_.length(c), true);
    release_children(c);
  }

  void pass_up(uint64_t c) {
    const Link up = link(rank_, node_.parent);
    plan_.acquire(up, c);
    if (node_.children.empty()) {
      plan_.put(up, c, plan_.input(segments_.offset(c)), segments_.length(c));
      return;
    }
    wait_for_children();
    plan_.reduce({plan_.slot(up, c)}, sources(c), segments_.length(c), false);
    plan_.signal(node_.parent);
    release_children(c);
  }

  PlanBuilder plan_;
  const Grow grow_;
  const Node node_;
  const Rank rank_, root_;
  const Segments segments_;
  const uint64_t count_;
};

}  // namespace

Plan tree_broadcast(const Shape& shape, Rank rank) {
  return TreePlan(shape, rank, Algorithm::kTree, binomial).broadcast();
}

Plan tree_reduce(const Shape& shape, Rank rank) {
  return TreePlan(shape, rank, Algorithm::kTree, binomial).reduce();
}

Plan ring_broadcast(const Shape& shape, Rank rank) {
  return TreePlan(shape, rank, Algorithm::kRing, chain).broadcast();
}

// A chain towards the root rather than reduce-scatter and gather: each link carries the message
// once, where gathering the shards would bring it to the root's link a second time.
Plan ring_reduce(const Shape& shape, Rank rank) {
  return TreePlan(shape, rank, Algorithm::kRing, chain).reduce();
}

}  // namespace ringcomm
