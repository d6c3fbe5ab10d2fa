// Collectives with a root, along a tree that grows from it, in segments through the inboxes. Three
// trees: binomial, log2 n deep, for short messages (Thakur, Rabenseifner, Gropp, "Optimization of
// Collective Communication Operations in MPICH", 2005); a chain, where a rank has one child, which
// moves long messages over every link once: the pipelined ring without its closing edge; and a
// star.
//
// In scatter and gather each link carries the shards of all ranks beyond it, a segment of each in
// turn, so that none starves. The star is for them; the chain is for fabrics where only neighbours
// reach each other well. Bytes that pass through a rank are staged in its own window, to give
// the inbox slot back at once.
#include <bit>

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
class TreePlan {
 public:
  TreePlan(const Shape& shape, Rank rank, Algorithm algorithm, Grow grow)
      : plan_(shape, algorithm, rank),
        grow_(grow),
        node_(grow(shape, rank)),
        rank_(rank),
        root_(shape.root),
        shards_(sharded(shape.collective)),
        unit_(shape.slot_bytes()) {
    if (shards_) {  // it is to fit into the window as well, as often as there are slots
      const uint64_t room = shape.geometry.inbox_offset(0) / std::max<uint64_t>(plan_.slots(), 4);
      unit_ = std::min(unit_, shape.align(room));
    }
    for (Rank r = 0; r < shape.size; ++r) {
      if (r != root_) most_ = std::max(most_, part(r).total);
    }
    count_ = Segments{most_, unit_}.count();
    for (const Rank child : node_.children) children_.push_back(branch(child, rank_));
    if (rank_ != root_) up_ = branch(rank_, node_.parent);
    for (const Branch& child : children_) widest_ = std::max(widest_, child.parts.size());
  }

  Plan build() { return away() ? away_from_root() : to_root(); }

 private:
  Plan away_from_root() {
    if (rank_ != root_ && called(rank_)) plan_.signal(root_, kCredit);
    plan_.repeat(passes(), [&](uint64_t c) { rank_ == root_ ? send(c) : pass_down(c); });
    if (rank_ == root_ && shards_) plan_.copy(plan_.output(0), whole(rank_, 0), part(rank_).total);
    return plan_.finish();
  }

  Plan to_root() {
    if (rank_ == root_ && shards_) plan_.copy(whole(rank_, 0), plan_.input(0), part(rank_).total);
    plan_.repeat(passes(), [&](uint64_t c) { rank_ == root_ ? collect(c) : pass_up(c); });
    if (rank_ != root_ && called(rank_)) plan_.wait(root_, kCredit);
    return plan_.finish();
  }

  // A link, and whose shards pass over it, in the order of their segments in a pass; in broadcast
  // and reduce there is one part, everybody's.
  struct Branch {
    Rank peer;
    Link link;
    std::vector<Rank> parts;
    bool has(size_t i) const { return i < parts.size(); }
    uint64_t message(uint64_t c, size_t i) const { return c * parts.size() + i; }
  };

  bool away() const {
    return plan_.shape().collective == Collective::kBroadcast ||
           plan_.shape().collective == Collective::kScatter;
  }
  bool called(Rank r) {
    const uint64_t depth = grow_(plan_.shape(), r).depth;
    if (shards_ && grow_ == chain) return called_in_chain(static_cast<int>(depth));
    return plan_.shape().meets && count_ <= plan_.slots() * depth;
  }

  // The same for links that carry shards. A position's own messages tell it of all ranks on the way
  // to the root. It must hear of p, beyond it, from its own credits or with the last message that
  // it gets. That message tells of the credits of ranks on its way, or of the root's roll call. One
  // look at the chain serves all positions, because a roll call asks for each.
  bool called_in_chain(int p) {
    const int size = plan_.shape().size;
    if (known_.empty()) {
      known_.push_back(size);  // to those before the root: nobody
      for (int q = 0; q < size - 1; ++q) known_.push_back(std::min(known_.back(), known_to(q)));
    }
    return known_[static_cast<size_t>(p)] < p;
  }
  int known_to(int q) const {
    int known = reach(q, count_ * shards_beyond(q) - 1);
    for (int v = 0; v < q && known < plan_.shape().size - 1; ++v) {
      known = std::max(known, reach(v, (count_ - 1) * shards_beyond(v) + shards_beyond(q)));
    }
    return known;
  }
  // The farthest position that `position` knows to have begun once it may send this message on:
  // credit j of a link was given when its reader had the credit for its own latest message, and
  // so on along the chain.
  int reach(int position, uint64_t message) const {
    while (position + 1 < plan_.shape().size && message >= plan_.slots()) {
      const uint64_t credit = message - plan_.slots(), beyond = shards_beyond(position++);
      if (beyond == 1) break;
      message = credit / beyond * (beyond - 1) + std::min(credit % beyond, beyond - 2);
    }
    return position;
  }
  uint64_t shards_beyond(int position) const {
    return static_cast<uint64_t>(plan_.shape().size - 1 - position);
  }

  // From the root, the farthest goes first, so that all links are soon busy. To the root, it goes
  // last.
  std::vector<Rank> parts_beyond(Rank r) const {
    std::vector<Rank> parts = {r};
    if (!shards_) return parts;
    for (const Rank child : grow_(plan_.shape(), r).children) {
      const std::vector<Rank> more = parts_beyond(child);
      parts.insert(away() ? parts.begin() : parts.end(), more.begin(), more.end());
    }
    return parts;
  }
  // The link between `child` and its parent. I am one of the two, and the other is the peer.
  Branch branch(Rank child, Rank parent) const {
    Branch made{child == rank_ ? parent : child, {}, parts_beyond(child)};
    const uint64_t messages = count_ * made.parts.size();
    const bool line = messages == 1 && most_ <= plan_.shape().geometry.line_bytes;
    made.link = {away() ? parent : child, away() ? child : parent, messages, unit_, line};
    made.link.pass = made.parts.size();
    return made;
  }

  // The bytes that travel between the root and rank r: a shard, or the whole message.
  Segments part(Rank r) const {
    return {shards_ ? plan_.shape().shard(r) : plan_.shape().bytes, unit_};
  }
  Stretch bytes(Rank r, uint64_t c) const { return part(r).stretch(c); }
  // Segment c of that in the root's memory.
  Ref whole(Rank r, uint64_t c) {
    const uint64_t at = part(r).offset(c) + (shards_ ? plan_.shape().shard_offset(r) : 0);
    return away() ? plan_.input(at) : plan_.output(at);
  }
  Ref input(uint64_t c) { return plan_.input(part(rank_).offset(c)); }
  Ref output(uint64_t c) { return plan_.output(part(rank_).offset(c)); }
  // A window slot is free when the credit for the message that leaves it has come. Then the last
  // put from it has arrived.
  Ref staged(const Link& leaves, uint64_t message) {
    return plan_.in_turn(plan_.window(rank_, 0), {unit_, plan_.slots(), leaves.pass}, message);
  }

  Passes passes() const {
    const uint64_t slots = plan_.slots();
    std::vector<uint64_t> edges = {1, count_ - 1};  // roll calls; then first and last credits
    const auto add = [&](const Branch& branch) {
      for (const uint64_t beyond : {uint64_t{0}, branch.parts.size() - 1}) {
        const uint64_t passes = (slots + beyond) / branch.parts.size();
        edges.insert(edges.end(), {passes, minus(count_, passes)});
      }
    };
    std::ranges::for_each(children_, add);
    if (rank_ != root_) add(up_);
    return {count_, unit_, edges};
  }
  template <typename Call>
  void roll_call(Call call) {
    for (int i = 1; i < plan_.shape().size; ++i) {
      if (called(plan_.peer(i))) call(plan_.peer(i));
    }
  }

  void acquire_children(uint64_t c, size_t i) {
    for (const Branch& child : children_) {
      if (child.has(i)) plan_.acquire(child.link, child.message(c, i));
    }
  }
  template <typename Source>
  void put_to_children(uint64_t c, size_t i, Source source) {
    for (const Branch& child : children_) {
      if (!child.has(i)) continue;
      const Rank r = child.parts[i];
      plan_.put(child.link, child.message(c, i), source(r), bytes(r, c));
    }
  }

  void send(uint64_t c) {
    for (size_t i = 0; i < widest_; ++i) {
      acquire_children(c, i);
      if (i == 0 && c + 1 == count_) roll_call([&](Rank r) { plan_.wait(r, kCredit); });
      put_to_children(c, i, [&](Rank r) { return whole(r, c); });
    }
    if (!shards_) plan_.copy(output(c), input(c), bytes(rank_, c));
  }

  void take(const Branch& from, uint64_t c, size_t i, Ref to) {
    const uint64_t message = from.message(c, i);
    plan_.copy(to, plan_.slot(from.link, message), bytes(from.parts[i], c));
    plan_.release(from.link, message);
  }

  void pass_down(uint64_t c) {
    for (size_t i = 0; i < up_.parts.size(); ++i) {
      const bool mine = up_.parts[i] == rank_;
      const Ref to =
          mine ? output(c) : staged(children_.front().link, children_.front().message(c, i));
      acquire_children(c, i);
      plan_.wait(up_.peer);
      take(up_, c, i, to);
      put_to_children(c, i, [&](Rank) { return to; });
    }
  }

  // The shallowest first: it is there first.
  void wait_for_children(size_t i) {
    for (auto child = children_.rbegin(); child != children_.rend(); ++child) {
      if (child->has(i)) plan_.wait(child->peer);
    }
  }
  // Adds up my own segment and the children's, into `to`.
  void add_up(uint64_t c, Ref to, bool final) {
    std::vector<Ref> from = {input(c)};
    for (auto child = children_.rbegin(); child != children_.rend(); ++child) {
      from.push_back(plan_.slot(child->link, c));
    }
    plan_.reduce({to}, from, bytes(rank_, c), final);
  }
  void release_children(uint64_t c) {
    for (const Branch& child : children_) plan_.release(child.link, c);
  }

  void collect(uint64_t c) {
    for (size_t i = 0; i < widest_; ++i) {
      wait_for_children(i);
      if (c == 0 && i + 1 == widest_) roll_call([&](Rank r) { plan_.signal(r, kCredit); });
      for (const Branch& child : children_) {
        if (shards_ && child.has(i)) take(child, c, i, whole(child.parts[i], c));
      }
    }
    if (shards_) return;
    add_up(c, output(c), true);
    release_children(c);
  }

  void pass_up(uint64_t c) {
    plan_.acquire(up_.link, up_.message(c, 0));
    if (shards_ || children_.empty()) {
      plan_.put(up_.link, up_.message(c, 0), input(c), bytes(rank_, c));
      return pass_on(c);
    }
    wait_for_children(0);
    add_up(c, plan_.slot(up_.link, c), false);
    plan_.signal(up_.peer);
    release_children(c);
  }

  // Passes on the shards of the ranks beyond me, in a chain: my i-th one is the child's i - 1st.
  void pass_on(uint64_t c) {
    for (size_t i = 1; i < up_.parts.size(); ++i) {
      const uint64_t message = up_.message(c, i);
      plan_.acquire(up_.link, message);
      plan_.wait(children_.front().peer);
      take(children_.front(), c, i - 1, staged(up_.link, message));
      plan_.put(up_.link, message, staged(up_.link, message), bytes(up_.parts[i], c));
    }
  }

  PlanBuilder plan_;
  const Grow grow_;
  const Node node_;
  const Rank rank_, root_;
  const bool shards_;
  uint64_t unit_;                  // bytes of a segment
  uint64_t most_ = 0, count_ = 0;  // bytes of the largest part that travels, and its segments
  std::vector<Branch> children_;
  Branch up_{};
  size_t widest_ = 0;       // parts of the child that has most
  std::vector<int> known_;  // of a chain, by position: the least that any before it hears of
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
