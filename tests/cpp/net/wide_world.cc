#include "wide_world.h"

namespace ringcomm::testing {
namespace {

constexpr uint64_t kMailboxBytes = 4096;  // no messages here
constexpr uint64_t kChannel = 1;
constexpr size_t kMostPairs = 200'000;  // each takes up to 100 KiB of memory

}  // namespace

// The ranks at distances of 1, 2, 4 and so on are told of failures, by ranks that talk with nobody
// else.
WideWorld::WideWorld(const WideSetup& setup, const std::vector<WideCall>& calls)
    : setup_(setup),
      random_(setup.seed),
      geometry_(Geometry::across_hosts(setup.ranks, 0, setup.local)),
      layout_{setup.local, geometry_.window_room(), geometry_.inbox_bytes, kMailboxBytes},
      pair_layout_{1, 0, geometry_.inbox_bytes, kMailboxBytes},
      adapters_(at(setup.ranks / setup.local)),
      needed_(at(setup.ranks)),
      members_(at(setup.ranks)) {
  require(setup.ranks % setup.local == 0, "hosts of ", setup.local, " ranks: ", setup.ranks);
  fabric_.costs = setup.costs;
  fabric_.arrived = [this](Rank rank) { wake(rank); };
  for (Rank rank = 0; rank < size(); ++rank) host_of_.push_back(rank / setup.local);
  Topology topology;
  topology.costs = topology.near = topology.far = setup.costs;
  reach_ = reach_of(topology, host_of_, {});
  for (const WideCall& call : calls) find_pairs(call);
  for (Rank rank = 0; rank < size(); ++rank) {
    for (int step = 1; step < size(); step *= 2) needed_[at(rank)].insert((rank + step) % size());
    segments_.emplace_back(layout_.bytes());
  }
  make_pairs();
  for (Rank rank = 0; rank < size(); ++rank) make_member(rank);
}

WideWorld::~WideWorld() {
  fabric_.open = false;
  for (Member& member : members_) {
    if (member.group) member.group->shutdown(std::chrono::seconds(0), false);
  }
  members_.clear();
}

// ---- the group

Shape WideWorld::shape_of(const WideCall& call) const {
  std::vector<int32_t> none;
  Shape shape = make_shape(call.operation(none, none), geometry_);
  static_cast<Levels&>(shape) = reach_;
  return shape;
}

Algorithm WideWorld::algorithm_of(const Shape& shape) const {
  return setup_.algorithm.value_or(select(shape, reach_.mapped));
}

void WideWorld::find_pairs(const WideCall& call) {
  const Shape shape = shape_of(call);
  for (Rank rank = 0; rank < size(); ++rank) {
    const Plan plan = make_plan(shape, rank, algorithm_of(shape));
    for (const Step& step : plan.steps) {
      if (step.peer >= 0) needed_[at(rank)].insert(step.peer);
    }
  }
}

void WideWorld::make_pairs() {
  size_t count = 0;
  for (const auto& needed : needed_) count += needed.size();
  if (count > 2 * kMostPairs) throw TooManyPeers(count / at(size()));
  for (Rank rank = 0; rank < size(); ++rank) {
    for (const Rank peer : needed_[at(rank)]) {
      if (share_host(rank, peer) || (peer < rank && needed_[at(peer)].contains(rank))) continue;
      const int64_t before = heap_of(-1).now;
      const std::array adapters = {&adapters_[at(host_of_[at(rank)])],
                                   &adapters_[at(host_of_[at(peer)])]};
      auto pair = std::make_unique<WidePair>(fabric_, std::array{rank, peer}, adapters);
      shared_bytes_ = static_cast<uint64_t>(heap_of(-1).now - before);
      for (const Rank owner : {rank, peer}) members_[at(owner)].pairs.push_back(pair.get());
      pairs_.push_back(std::move(pair));
    }
  }
}

void WideWorld::make_member(Rank rank) {
  const ForRank scope(rank);
  Member& self = member(rank);
  std::vector<ShmPeer> here;
  const Segment own(segments_[at(rank)].mapping.data(), layout_);
  const Rank first = rank / setup_.local * setup_.local;
  for (Rank mate = first; mate < first + setup_.local; ++mate) {
    ShmPeer& there = here.emplace_back();
    there.rank = mate;
    there.segment = Segment(segments_[at(mate)].mapping.data(), layout_);
    there.place = mate - first;
    there.doorbell = Doorbell(&bell_);
  }
  auto remote_ranks = std::make_unique<RemoteRanks>(size());
  for (WidePair* pair : self.pairs) {
    const int side = WideWorld::side(*pair, rank);
    const RemotePeer::Ends ends{pair->ranks[at(1 - side)], &own.header(), pair_layout_,
                                remote_ranks.get()};
    self.remotes.push_back(new RemotePeer(pair->ends[at(side)], kChannel, ends));
    remote_ranks->add(std::unique_ptr<RemotePeer>(self.remotes.back()));
  }
  CommunicatorOptions options;
  options.rank = rank;
  options.size = size();
  options.timeout = std::chrono::hours(1);
  if (setup_.algorithm) options.algorithm = Rules(to_string(*setup_.algorithm));
  MappedGroup memory;
  memory.host_of = host_of_;
  memory.costs_text = str(std::scientific, "alpha ", setup_.costs.alpha, " beta ",
                          setup_.costs.beta, " gamma ", setup_.costs.gamma);

  // Wakes the rank of the same host that gets a signal: a doorbell would wake a thread.
  class Local final : public Transport {
   public:
    Local(Rank rank, std::vector<ShmPeer> here, std::unique_ptr<RemoteRanks> remote_ranks,
          WideWorld& world)
        : Transport(rank, std::move(here), std::move(remote_ranks)), world_(world) {}
    void signal(Rank to, int lane, int half, uint64_t stamp) override {
      Transport::signal(to, lane, half, stamp);
      if (!is_remote(to)) world_.wake(to);
    }

   private:
    WideWorld& world_;
  };
  self.group = std::make_shared<Communicator>(
      std::make_unique<Local>(rank, std::move(here), std::move(remote_ranks), *this), geometry_,
      options, std::make_shared<MappedGroup>(std::move(memory)));
  self.group->state().kick = [] {};  // no worker: this thread drives all ranks
}

uint64_t WideWorld::memory(Rank rank) {
  const Member& self = member(rank);
  uint64_t bytes = static_cast<uint64_t>(heap_of(rank).most);
  bytes += self.pairs.size() * shared_bytes_ / 2;
  const WidePages& own = segments_[at(rank)];
  bytes += touched(own.mapping.data(), own.bytes);
  for (RemotePeer* remote : self.remotes) {
    for (const LateSegment* segment : {&remote->shadow(), &remote->received()}) {
      if (const Segment* made = segment->find())
        bytes += touched(made->at(0), pair_layout_.bytes());
    }
  }
  return bytes;
}

// ---- calls

double WideWorld::run(const WideCall& call) {
  const auto began = timeline().now();
  begin(call);
  while (!over()) require(timeline().step(), "stuck: ", pending_, " ranks wait");
  auto last = began;
  for (const Member& self : members_) last = std::max(last, self.ended);
  check(call);
  for (const auto& pair : pairs_) {  // as the network does now and then: acknowledges the last
    for (const int side : {0, 1}) {
      pair->ends[at(side)].session.tick(timeline().now(), {});
      pair->pump(side);
    }
  }
  while (timeline().step()) {
  }
  return std::chrono::duration<double>(last - began).count();
}

void WideWorld::begin(const WideCall& call) {
  pending_ = size();
  for (Rank rank = 0; rank < size(); ++rank) {
    const auto late = random_.below(1 + static_cast<uint64_t>(setup_.skew.count()));
    timeline().after(std::chrono::nanoseconds(late), [this, rank, &call] { start(rank, call); });
  }
  if (cut_every_ > Clock::duration()) timeline().after(cut_every_, [this] { cut_one(); });
}

void WideWorld::start(Rank rank, const WideCall& call) {
  Member& self = member(rank);
  if (self.dead || self.group->state().failed()) return;
  self.input = call.input(rank);
  self.output.assign(call.expected(rank).size(), -1);
  const ForRank scope(rank);
  self.task = self.group->host().submit(call.operation(self.input, self.output),
                                        [this, rank](const std::exception_ptr&) {
                                          member(rank).ended = timeline().now();
                                          --pending_;
                                        });
  drive(rank);
}

void WideWorld::wake(Rank rank) {
  Member& self = member(rank);
  if (self.awake || self.dead || deaf) return;
  self.awake = true;
  timeline().after({}, [this, rank] {
    member(rank).awake = false;
    drive(rank);
  });
}

void WideWorld::drive(Rank rank) {
  Member& self = member(rank);
  if (self.dead) return;
  const ForRank scope(rank);
  while (self.group->progress().drive()) {
  }
  if (after_drive) after_drive(rank);
}

void WideWorld::check_peers(Rank rank) {
  const ForRank scope(rank);
  member(rank).group->state().check();
  drive(rank);
}

void WideWorld::stop(Rank rank) {
  member(rank).dead = true;
  for (WidePair* pair : member(rank).pairs) pair->die(side(*pair, rank));
}

void WideWorld::check(const WideCall& call) {
  for (Rank rank = 0; rank < size(); ++rank) {
    Member& self = member(rank);
    if (self.task->error) std::rethrow_exception(self.task->error);
    const auto want = call.expected(rank);
    for (size_t i = 0; i < want.size(); ++i) {
      require(self.output[i] == want[i], to_string(call.collective()), " of ", call.bytes(),
              " B, rank ", rank, ": element ", i, " is ", self.output[i], ", not ", want[i]);
    }
    require(self.input == call.input(rank), "the input was changed");
    // The memory is the caller's again: a late reader would read this.
    std::ranges::fill(self.input, -77777);
    std::ranges::fill(self.output, -77777);
  }
}

// ---- connections

void WideWorld::connect_all() {
  for (const auto& pair : pairs_) pair->reconnect(0);
  while (timeline().step()) {
  }
}

void WideWorld::cut_one() {
  if (over()) return;
  pairs_[random_.below(pairs_.size())]->cut(random_);
  timeline().after(cut_every_, [this] { cut_one(); });
}

}  // namespace ringcomm::testing
