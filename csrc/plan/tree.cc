// Collectives with a root, along a tree that grows from it, in segments through the inboxes. Three
// trees: binomial, log2 n deep, for short messages (Thakur, Rabenseifner, Gropp, "Optimization of
// Collective Communication Operations in MPICH", 2005); a chain, where a rank has one child, which
// moves long messages over every link once: the pipelined ring without its closing edge; and a
// star for scatter and gather, whose shards would only take a longer way through other ranks.
#include <bit>
#include <ranges>

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

Node star(const Shape& shape, Rank rank) {
  if (rank != shape.root) return {shape.root, {}, 1};
  Node node;
  for (int i = 1; i < shape.size; ++i) node.children.push_back(shape.after(rank, i));
  return node;
}

// The common part of both directions. Data tells only part of the tree that all have begun, so
// there is a roll call over the root, see direct.cc. Credits run behind by as many messages on each
// level as there are slots. If a message is so long that they come to tell the root of a rank, that
// rank needs no roll call.
//
// The root calls all ranks itself where they are few. Else the calls go along a binomial tree, and
// all take part or none. Where that has an edge of the data's tree, calls share the credits' lane:
// they come before the first credit, or after the last one.
class TreePlan {
 public:
  TreePlan(const Shape& shape, Rank rank, Algorithm algorithm, Grow grow)
      : plan_(shape, algorithm, rank),
        grow_(grow),
        node_(grow(shape, rank)),
        rank_(rank),
        root_(shape.root),
        shards_(sharded(shape.collective)),
        wide_(shape.size > kFewEnds && grow != star),
        chunks_(shape.chunks()),
        calls_((wide_ ? binomial : star)(shape, rank)) {
    uint64_t most = 0;
    for (Rank r = 0; r < shape.size; ++r) {
      if (r != root_) most = std::max(most, part(r).total);
    }
    count_ = Segments{most, shape.slot_bytes()}.count();
    const auto feed = [&](Rank child, Rank parent) {
      return plan_.feed(away() ? parent : child, away() ? child : parent, most);
    };
    for (const Rank child : node_.children) children_.push_back(feed(child, rank_));
    if (rank_ != root_) up_ = feed(rank_, node_.parent);
    if (away())
      call_at_ = (wide_ ? std::min(count_, plan_.slots()) : count_) - 1;
    else
      call_at_ = wide_ ? count_ - 1 : 0;
  }

  Plan build() { return away() ? away_from_root() : to_root(); }

 private:
  Plan away_from_root() {
    if (rank_ != root_ && called(rank_)) {
      roll_call([&](Rank r) { plan_.wait(r, kCredit); });
      plan_.signal(calls_.parent, kCredit);
    }
    plan_.repeat(passes(), [&](uint64_t c) { rank_ == root_ ? send(c) : pass_down(c); });
    if (rank_ == root_ && shards_) plan_.copy(plan_.output(0), whole(rank_, 0), part(rank_).total);
    return plan_.finish();
  }

  Plan to_root() {
    if (rank_ == root_ && shards_) plan_.copy(whole(rank_, 0), plan_.input(0), part(rank_).total);
    plan_.repeat(passes(), [&](uint64_t c) { rank_ == root_ ? collect(c) : pass_up(c); });
    if (rank_ != root_ && called(rank_)) {
      plan_.wait(calls_.parent, kCredit);
      roll_call([&](Rank r) { plan_.signal(r, kCredit); });
    }
    return plan_.finish();
  }

  bool away() const {
    return plan_.shape().collective == Collective::kBroadcast ||
           plan_.shape().collective == Collective::kScatter;
  }
  bool called(Rank r) const {
    const Shape& shape = plan_.shape();
    const unsigned size = static_cast<unsigned>(shape.size);
    const uint64_t deepest = grow_ == chain ? size - 1 : std::bit_width(size) - 1;
    return shape.meets && count_ <= plan_.slots() * (wide_ ? deepest : grow_(shape, r).depth);
  }

  // The bytes that travel between the root and rank r: a shard, or the whole message.
  Segments part(Rank r) const {
    const Shape& shape = plan_.shape();
    return {shards_ ? shape.shard(r) : shape.bytes, shape.slot_bytes()};
  }
  Stretch bytes(Rank r, uint64_t c) const { return part(r).stretch(c); }
  // Segment c of that in the root's memory.
  Ref whole(Rank r, uint64_t c) {
    const uint64_t at = part(r).offset(c) + (shards_ ? chunks_[static_cast<size_t>(r)].offset : 0);
    return away() ? plan_.input(at) : plan_.output(at);
  }
  Ref input(uint64_t c) { return plan_.input(part(rank_).offset(c)); }
  Ref output(uint64_t c) { return plan_.output(part(rank_).offset(c)); }

  Passes passes() const {  // edges: roll calls; first and last credits
    const uint64_t slots = plan_.slots();
    return {count_,
            plan_.shape().slot_bytes(),
            {1, count_ - 1, slots, minus(count_, slots), call_at_, call_at_ + 1}};
  }
  template <typename Call>
  void roll_call(Call call) {
    for (const Rank r : calls_.children) {
      if (called(r)) call(r);
    }
  }

  void send(uint64_t c) {
    for (const Feed& child : children_) plan_.acquire(child, c);
    if (c == call_at_) roll_call([&](Rank r) { plan_.wait(r, kCredit); });
    for (const Feed& child : children_) {
      plan_.put(child, c, whole(child.to, c), bytes(child.to, c));
    }
    if (!shards_) plan_.copy(output(c), input(c), bytes(rank_, c));
  }

  void pass_down(uint64_t c) {
    for (const Feed& child : children_) plan_.acquire(child, c);
    plan_.wait(up_.from);
    plan_.copy(output(c), plan_.slot(up_, c), bytes(rank_, c));
    plan_.release(up_, c);
    for (const Feed& child : children_) plan_.put(child, c, output(c), bytes(rank_, c));
  }

  // The shallowest first: it is there first.
  void wait_for_children() {
    for (const Feed& child : std::views::reverse(children_)) plan_.wait(child.from);
  }
  // Adds up my own segment and the children's, into `to`.
  void add_up(uint64_t c, Ref to, bool final) {
    std::vector<Ref> from = {input(c)};
    for (const Feed& child : std::views::reverse(children_)) from.push_back(plan_.slot(child, c));
    plan_.reduce({to}, from, bytes(rank_, c), final);
  }

  void collect(uint64_t c) {
    wait_for_children();
    if (c == call_at_) roll_call([&](Rank r) { plan_.signal(r, kCredit); });
    if (!shards_) add_up(c, output(c), true);
    for (const Feed& child : children_) {
      if (shards_) plan_.copy(whole(child.from, c), plan_.slot(child, c), bytes(child.from, c));
      plan_.release(child, c);
    }
  }

  void pass_up(uint64_t c) {
    plan_.acquire(up_, c);
    if (children_.empty()) return plan_.put(up_, c, input(c), bytes(rank_, c));
    wait_for_children();
    add_up(c, plan_.slot(up_, c), false);
    plan_.signal(up_.to);
    for (const Feed& child : children_) plan_.release(child, c);
  }

  PlanBuilder plan_;
  const Grow grow_;
  const Node node_;
  const Rank rank_, root_;
  const bool shards_, wide_;
  const std::vector<Extent> chunks_;
  const Node calls_;
  uint64_t count_ = 0;    // of segments of the largest part that travels
  uint64_t call_at_ = 0;  // the segment before or after which the root calls
  std::vector<Feed> children_;
  Feed up_{};
};

}  // namespace

Plan tree_plan(const Shape& shape, Rank rank) {
  return TreePlan(shape, rank, Algorithm::kTree, binomial).build();
}

// A chain towards the root rather than reduce-scatter and gather: each link carries the message
// once, where gathering the shards would bring it to the root's link a second time.
Plan chain_plan(const Shape& shape, Rank rank) {
  return TreePlan(shape, rank, Algorithm::kRing, chain).build();
}

Plan star_plan(const Shape& shape, Rank rank) {
  return TreePlan(shape, rank, Algorithm::kDirect, star).build();
}

}  // namespace ringcomm
