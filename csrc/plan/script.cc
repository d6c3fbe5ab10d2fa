#include "plan/script.h"

#include <bit>

#include "plan/builder.h"

namespace ringcomm {
namespace {

enum Word { kMove, kSignal, kWait, kAcquire, kRelease };
enum Place { kInputChunk, kOutputChunk, kMessageSlot };

class Words {
 public:
  explicit Words(const std::vector<int64_t>& words) : words_(words) {}

  int64_t next(int64_t end = INT32_MAX) {
    RINGCOMM_CHECK(at_ < words_.size(), "a script ends too early");
    const int64_t word = words_[at_++];
    RINGCOMM_CHECK(word >= 0 && word < end, "a script has ", word, " where less than ", end,
                   " is possible");
    return word;
  }
  uint64_t count() { return static_cast<uint64_t>(next()); }
  size_t at() const { return at_; }
  void back_to(size_t at) { at_ = at; }
  bool over() const { return at_ == words_.size(); }

 private:
  const std::vector<int64_t>& words_;
  size_t at_ = 0;
};

// A feed of the script, which has its messages in every pass.
struct ScriptFeed : Feed {
  std::vector<bool> needs_credit;  // by message of a pass

  uint64_t message(uint64_t in_pass, uint64_t number) const { return in_pass * pass + number; }
};

class ScriptPlan {
 public:
  ScriptPlan(const Shape& shape, Rank rank, Algorithm algorithm, const Script& script,
             std::vector<uint32_t>* origins)
      : shape_(shape), plan_(shape_, algorithm, rank), words_(script.words), origins_(origins) {
    parts_ = static_cast<int>(words_.next(1 << 16));
    const auto slots = static_cast<uint64_t>(words_.next(1 << 15));
    RINGCOMM_CHECK(std::has_single_bit(slots) && slots > 1, "a script with ", slots, " slots");
    shape_.geometry.slots = slots;
    const uint64_t pieces = words_.count();
    RINGCOMM_CHECK(parts_ > 0 && pieces > 0, "a script without parts or pieces");
    chunks_ = parts_ * (shards() ? shape_.size : 1);
    const uint64_t fit = shape_.align(shape_.slot_bytes() / pieces);
    RINGCOMM_CHECK(fit > 0, "a message of ", pieces, " chunks has no room in a slot of ",
                   shape_.slot_bytes(), " bytes: send fewer in one");
    uint64_t longest = 0;
    for (int chunk = 0; chunk < chunks_; ++chunk) longest = std::max(longest, length(chunk));
    unit_ = std::max(shape_.element, std::min(fit, longest));
    passes_ = Segments{longest, unit_}.count();
    read_feeds();
  }

  Plan build() {
    section(0);
    const size_t body = words_.at();
    plan_.repeat({passes_, unit_, edges()}, [&](uint64_t pass) {
      words_.back_to(body);
      first_ = before_body_;
      section(pass);
    });
    section(0);
    RINGCOMM_CHECK(words_.over(), "a script goes on after its end");
    return plan_.finish();
  }

 private:
  bool split() const { return shape_.collective == Collective::kAllToAll; }
  bool shards() const { return split() || sharded(shape_.collective); }
  const std::vector<uint64_t>& parts_of(bool input) const {
    return !split() ? shape_.shards : input ? shape_.send : shape_.recv;
  }

  uint64_t length(int chunk) const { return extent(chunk, true).bytes; }
  // Returns a chunk's place in this rank's input or output.
  Extent extent(int chunk, bool input) const {
    const auto of = [&](uint64_t total, int part, uint64_t base) -> Extent {
      const uint64_t at = shape_.cut(total, part, parts_);
      return {base + at, shape_.cut(total, part + 1, parts_) - at};
    };
    if (!shards()) return of(shape_.bytes, chunk, 0);
    const Rank owner = chunk / parts_;
    using enum Collective;
    const Collective what = shape_.collective;
    const bool whole = split() || (input ? what == kReduceScatter || what == kScatter
                                         : what == kAllGather || what == kGather);
    const std::vector<uint64_t>& all = parts_of(input);
    return of(all[static_cast<size_t>(owner)], chunk % parts_, whole ? offset_of(all, owner) : 0);
  }

  void read_feeds() {
    const auto count = static_cast<size_t>(words_.count());
    for (size_t i = 0; i < count; ++i) {
      ScriptFeed feed;
      feed.from = static_cast<Rank>(words_.next(shape_.size));
      feed.to = static_cast<Rank>(words_.next(shape_.size));
      const uint64_t pieces = words_.count();
      feed.pass = words_.count();
      for (uint64_t m = 0; m < feed.pass; ++m) feed.needs_credit.push_back(words_.next(2) != 0);
      feed.messages = passes_ * feed.pass;
      feed.slot_bytes = shape_.slot_bytes();
      feed.line = feed.messages == 1 && pieces * unit_ <= shape_.geometry.line_bytes;
      feeds_.push_back(std::move(feed));
    }
  }

  // The passes that differ from the one before: the first and the last with a credit on some link.
  std::vector<uint64_t> edges() const {
    std::vector<uint64_t> edges;
    for (const ScriptFeed& feed : feeds_) {
      const uint64_t per_pass = feed.pass, slots = plan_.slots();
      for (uint64_t i = 0; i < per_pass; ++i) {
        edges.push_back((minus(slots, i) + per_pass - 1) / per_pass);
        edges.push_back(minus(passes_, (slots + i) / per_pass));
      }
    }
    return edges;
  }

  void section(uint64_t pass) {
    pass_ = pass;
    const uint64_t count = words_.count();
    for (uint64_t i = 0; i < count; ++i) {
      operation();
      if (origins_ != nullptr) origins_->resize(plan_.steps(), static_cast<uint32_t>(first_ + i));
    }
    first_ += count;
    if (before_body_ == UINT64_MAX) before_body_ = first_;
  }

  void operation() {
    const auto word = words_.next(kRelease + 1);
    switch (word) {
      case kMove:
        return move();
      case kSignal: {
        const Rank peer = static_cast<Rank>(words_.next(shape_.size));
        return plan_.signal(peer, static_cast<Lane>(words_.next(kLanes)));
      }
      case kWait: {
        const Rank peer = static_cast<Rank>(words_.next(shape_.size));
        return plan_.wait(peer, static_cast<Lane>(words_.next(kLanes)));
      }
      default: {  // a credit is for the message that takes the slot again
        const ScriptFeed& feed = this->feed();
        const uint64_t number = message_of(feed), message = feed.message(pass_, number);
        const uint64_t next = word == kAcquire ? number : (number + plan_.slots()) % feed.pass;
        if (!feed.needs_credit[next]) return;
        return word == kAcquire ? plan_.acquire(feed, message) : plan_.release(feed, message);
      }
    }
  }

  const ScriptFeed& feed() { return feeds_[static_cast<size_t>(words_.next(std::ssize(feeds_)))]; }

  uint64_t message_of(const ScriptFeed& feed) {
    return static_cast<uint64_t>(words_.next(static_cast<int64_t>(feed.pass)));
  }

  void move() {
    const int chunk = static_cast<int>(words_.next(chunks_));
    const bool final = words_.next(2) != 0, adds = words_.next(2) != 0;
    const auto targets = static_cast<uint64_t>(words_.next(UINT8_MAX + 1));  // as Step counts them
    const auto sources = static_cast<uint64_t>(words_.next(UINT16_MAX + 1));
    const Stretch stretch{unit_, pass_ * unit_, length(chunk)};
    std::vector<Ref> dst, src;
    for (uint64_t i = 0; i < targets; ++i) dst.push_back(operand());
    for (uint64_t i = 0; i < sources; ++i) src.push_back(operand());
    RINGCOMM_CHECK(!dst.empty() && !src.empty() && (adds || sources * targets == 1),
                   "a script copies ", sources, " chunks to ", targets);
    adds ? plan_.reduce(dst, src, stretch, final) : plan_.copy(dst[0], src[0], stretch);
  }

  Ref operand() {
    const int64_t space = words_.next(kMessageSlot + 1);
    if (space != kMessageSlot) {
      const int chunk = static_cast<int>(words_.next(chunks_));
      words_.next(), words_.next();
      const uint64_t at = extent(chunk, space == kInputChunk).offset + pass_ * unit_;
      return space == kInputChunk ? plan_.input(at) : plan_.output(at);
    }
    const ScriptFeed& feed = this->feed();
    const uint64_t number = message_of(feed);
    Ref slot = plan_.slot(feed, feed.message(pass_, number));
    slot.offset += static_cast<uint64_t>(words_.next()) * unit_;
    return slot;
  }

  Shape shape_;
  PlanBuilder plan_;
  Words words_;
  std::vector<uint32_t>* const origins_;
  int parts_ = 1, chunks_ = 1;
  uint64_t unit_ = 0, passes_ = 1;  // so much of every chunk in a pass
  std::vector<ScriptFeed> feeds_;
  uint64_t pass_ = 0;
  uint64_t first_ = 0, before_body_ = UINT64_MAX;  // operations before those of the section
};

}  // namespace

Plan scripted_plan(const Shape& shape, Rank rank, Algorithm algorithm, const Script& script,
                   std::vector<uint32_t>* origins) {
  Plan plan = ScriptPlan(shape, rank, algorithm, script, origins).build();
  plan.code = script.code;
  return plan;
}

bool same_on_all_ranks(const Shape& shape) {
  if (shape.collective != Collective::kAllToAll) return true;
  const auto even = [](const std::vector<uint64_t>& parts) {
    return std::ranges::adjacent_find(parts, std::not_equal_to()) == parts.end();
  };
  return even(shape.send) && even(shape.recv);
}

}  // namespace ringcomm
