// A network in virtual time: the next events, and how long bytes take between hosts. A message of
// m bytes arrives after alpha + m beta (Hockney), if nothing else is on the adapters of both hosts.
#pragma once

#include <list>

#include "session_net.h"
#include "wide_heap.h"

namespace ringcomm::testing {

// Future events, ordered by time, and at equal times by the order of the calls.
class Timeline {
 public:
  Clock::time_point now() const { return now_; }
  void at(Clock::time_point when, std::function<void()> act) {
    events_.push_back({when, order_++, std::move(act)});
    std::ranges::push_heap(events_, Later());
  }
  void after(Clock::duration delay, std::function<void()> act) { at(now_ + delay, std::move(act)); }
  // The next event happens. False: there is none.
  bool step() {
    if (events_.empty()) return false;
    std::ranges::pop_heap(events_, Later());
    const Event next = std::move(events_.back());
    events_.pop_back();
    now_ = next.when;
    next.act();
    return true;
  }

 private:
  struct Event {
    Clock::time_point when;
    uint64_t order;
    std::function<void()> act;
  };
  struct Later {
    bool operator()(const Event& a, const Event& b) const {
      return std::tie(a.when, a.order) > std::tie(b.when, b.order);
    }
  };

  Clock::time_point now_{std::chrono::hours(1)};
  uint64_t order_ = 0;
  std::vector<Event> events_;  // a heap
};

// A host's network adapter: it carries one byte at a time in each direction.
struct Adapter {
  Clock::time_point sends_until, receives_until;
};

// The parts that all pairs of one network share.
struct Fabric {
  Timeline timeline;
  Costs costs;
  std::function<void(Rank)> arrived;  // bytes for that rank
  bool open = true;                   // false: it is being taken down

  Clock::duration alpha() const { return seconds(costs.alpha); }
  Clock::duration beta(size_t bytes) const {
    return seconds(costs.beta * static_cast<double>(bytes));
  }
  static Clock::duration seconds(double count) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(count));
  }
};

// A pair of ranks on two hosts, connected when one of them has something to say. One flow.
class WidePair final : public Pair {
 public:
  WidePair(Fabric& fabric, std::array<Rank, 2> ranks, std::array<Adapter*, 2> adapters)
      : Pair(1, SessionRules()), ranks(ranks), fabric_(fabric), adapters_(adapters) {
    for (const int side : {0, 1}) ends[at(side)].flushed = [this, side] { pump(side); };
  }

  bool up() const { return ends[0].connections[0] && ends[1].connections[0]; }
  bool used() const { return ends[0].session.posted() > 0 || ends[1].session.posted() > 0; }

  // Sends this side's bytes; connects it for that.
  void pump(int side) {
    if (!fabric_.open) return;
    const ForRank scope(ranks[at(side)]);
    End& end = ends[at(side)];
    const auto connection = end.connections[0];
    if (!connection) {
      if (end.session.posted() > end.session.acknowledged()) reconnect(side);
      return;
    }
    std::array<iovec, 16> parts;
    while (const size_t count = end.session.gather(0, parts)) {
      const ForRank simulation(-1);  // as the kernel's buffers
      std::vector<std::byte> bytes;
      for (const iovec& part : std::span(parts).first(count)) {
        const auto* data = static_cast<const std::byte*>(part.iov_base);
        bytes.insert(bytes.end(), data, data + part.iov_len);
      }
      end.session.wrote(0, bytes.size());
      sent[at(side)] += bytes.size();
      if (!connection->to[at(1 - side)].cut) send(1 - side, std::move(bytes));
    }
  }

  // TCP's handshake and the session's take six ways.
  void reconnect(int side) {
    if (dead_ || pending[0] || ends[at(side)].connections[0]) return;
    connect(0, side);
    fabric_.timeline.after(2 * fabric_.alpha(), [this, life = life_] { shake(life); });
  }

  // Cuts the connection: bytes under way are lost, except for a part of the first ones in one
  // direction. One side sees that at once, and the other later.
  void cut(Random& random) {
    if (!up()) return;
    ++cuts;
    const int first = static_cast<int>(random.below(2));
    if (!flying_[at(first)].empty()) {
      std::vector<std::byte>& bytes = flying_[at(first)].front();
      bytes.resize(random.below(bytes.size() + 1));
      take(first);
    }
    part();
    for (const int side : {0, 1}) ends[at(side)].connections[0]->to[at(1 - side)].cut = true;
    lose(first);
    const uint64_t late = 1 + random.below(6);
    const auto& other = ends[at(1 - first)].connections[0];
    fabric_.timeline.after(late * fabric_.alpha(), [this, first, &other, old = other] {
      if (other == old) lose(1 - first);
    });
  }

  // The process on that side ends: it is known on the other one when nobody answers any more.
  void die(int side) {
    part();
    pending[0] = nullptr;
    dead_ = true;
    for (const int end : {0, 1}) detach(end, 0);
    ends[at(side)].flushed = nullptr;
  }

  const std::array<Rank, 2> ranks;
  std::array<uint64_t, 2> sent{};  // bytes with headers, by sending side

 private:
  // Bytes of an earlier connection arrive nowhere.
  void part() {
    ++life_;
    for (auto& flying : flying_) flying.clear();
  }
  void lose(int side) {
    detach(side, 0);
    if (!pending[0]) reconnect(side);
  }

  void shake(uint64_t life) {
    if (life != life_ || !pending[0]) return;
    shake_hands(0, fabric_.timeline.now());
    if (pending[0]) {
      fabric_.timeline.after(fabric_.alpha(), [this, life] { shake(life); });
    } else {
      for (const int side : {0, 1}) pump(side);
    }
  }

  // First come, first served, at the sender's adapter and at the receiver's.
  void send(int to, std::vector<std::byte> bytes) {
    Timeline& timeline = fabric_.timeline;
    const Clock::duration takes = fabric_.beta(bytes.size());
    Adapter& from = *adapters_[at(1 - to)];
    const auto begins = std::max(timeline.now(), from.sends_until);
    from.sends_until = begins + takes;
    flying_[at(to)].push_back(std::move(bytes));
    timeline.at(begins + fabric_.alpha(), [this, to, takes, life = life_] {
      if (life != life_) return;
      Clock::time_point& until = adapters_[at(to)]->receives_until;
      until = std::max(fabric_.timeline.now(), until) + takes;
      fabric_.timeline.at(until, [this, to, life] {
        if (life != life_) return;
        take(to);
        pump(to);
        fabric_.arrived(ranks[at(to)]);
      });
    });
  }

  void take(int to) {
    const ForRank scope(ranks[at(to)]);
    const std::vector<std::byte> bytes = std::move(flying_[at(to)].front());
    flying_[at(to)].pop_front();
    ends[at(to)].session.read(0, bytes, fabric_.timeline.now());
  }

  Fabric& fabric_;
  const std::array<Adapter*, 2> adapters_;
  std::array<std::list<std::vector<std::byte>>, 2> flying_;  // by receiving side
  uint64_t life_ = 0;                                        // of the connection
  bool dead_ = false;
};

}  // namespace ringcomm::testing
