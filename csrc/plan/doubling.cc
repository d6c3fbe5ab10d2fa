// Recursive doubling: in round k, ranks that differ in bit k exchange all they have added up so
// far, so that an all-reduce takes log2 n hops (Thakur, Rabenseifner, Gropp 2005). Ranks beyond a
// power of two hand theirs to one within it and get the result back (Rabenseifner, Traeff, "More
// Efficient Reduction Algorithms for Non-Power-of-Two Number of Processors", 2004). Both partners
// add the lower ranks' sum first, so all results are bitwise equal.
#include <bit>

#include "plan/builder.h"
#include "plan/planners.h"

namespace ringcomm {
namespace {

// Stage k of a segment ends round k - 1 and begins round k. Segments follow one another: stage k
// runs `lag` segments behind stage k - 1. So half the slots are under way, and a partner's next
// message says that it has consumed those before: there are no credits. For the ranks beyond,
// which see the last stage only, all lags together must be less than the slots.
class Doubling {
 public:
  Doubling(const Shape& shape, Rank rank)
      : plan_(shape, Algorithm::kDoubling, rank),
        rank_(rank),
        within_(static_cast<int>(std::bit_floor(static_cast<unsigned>(shape.size)))),
        rounds_(std::countr_zero(static_cast<unsigned>(within_))),
        segments_{shape.bytes, shape.slot_bytes()},
        lag_(std::min(plan_.slots() / 2 - 1, (plan_.slots() - 1) / behind(1, rounds_))) {
    if (rank >= within_) beyond_ = rank - within_;
    if (rank < shape.size - within_) beyond_ = rank + within_;
  }

  Plan build() {
    const uint64_t count = segments_.count();
    std::vector<uint64_t> edges;
    for (int k = 0; k <= rounds_; ++k) {
      const uint64_t late = behind(lag_, k);
      edges.insert(edges.end(), {late, late + count});
    }
    const Passes passes{count + behind(lag_, rounds_), segments_.unit, edges};
    plan_.repeat(passes, [&](uint64_t pass) {
      for (int k = 0; k <= rounds_; ++k) {
        segment_ = pass - behind(lag_, k);
        if (pass < behind(lag_, k) || segment_ >= count) continue;
        rank_ < within_ ? stage(k) : stage_beyond(k);
      }
    });
    return plan_.finish();
  }

 private:
  static uint64_t behind(uint64_t lag, int stages) { return lag * static_cast<uint64_t>(stages); }
  Feed feed(Rank from, Rank to) const { return plan_.feed(from, to, segments_.total); }
  Ref arrived(Rank from) { return plan_.slot(feed(from, rank_), segment_); }
  Ref input() { return plan_.input(segments_.offset(segment_)); }
  Ref output() { return plan_.output(segments_.offset(segment_)); }
  Stretch bytes() const { return segments_.stretch(segment_); }

  void stage(int k) {
    std::vector<Ref> from = {k <= 1 && beyond_ < 0 ? input() : output()};
    if (k > 0) {
      const Rank partner = rank_ ^ 1 << (k - 1);
      plan_.wait(partner);
      from.insert(rank_ < partner ? from.end() : from.begin(), arrived(partner));
    } else if (beyond_ >= 0) {
      plan_.wait(beyond_);
      from = {input(), arrived(beyond_)};
    }
    if (k < rounds_) return pass_on(rank_ ^ 1 << k, from);
    plan_.reduce({output()}, from, bytes(), true);
    if (beyond_ >= 0) plan_.put(feed(rank_, beyond_), segment_, output(), bytes());
  }

  // A reduction, even of one source, because a copy's source would have to stay as it is until the
  // partner has consumed it, and in place the output is next written before that is known.
  void pass_on(Rank partner, const std::vector<Ref>& from) {
    std::vector<Ref> to = {plan_.slot(feed(rank_, partner), segment_)};
    if (from.size() > 1) to.push_back(output());
    plan_.reduce(to, from, bytes(), false);
    plan_.signal(partner);
  }

  void stage_beyond(int k) {
    if (k == 0) plan_.put(feed(rank_, beyond_), segment_, input(), bytes());
    if (k < rounds_) return;
    plan_.wait(beyond_);
    plan_.copy(output(), arrived(beyond_), bytes());
  }

  PlanBuilder plan_;
  const Rank rank_;
  const int within_;  // the largest power of two of ranks
  const int rounds_;  // its logarithm
  Rank beyond_ = -1;  // the rank beyond it that I stand for, or the one that stands for me
  const Segments segments_;
  const uint64_t lag_;
  uint64_t segment_ = 0;
};

}  // namespace

Plan doubling_all_reduce(const Shape& shape, Rank rank) { return Doubling(shape, rank).build(); }

}  // namespace ringcomm
