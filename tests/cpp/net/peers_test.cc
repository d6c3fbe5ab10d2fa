// A network whose peers become known late, sleep, and are forgotten: the costs of many of them.
#include <malloc.h>
#include <poll.h>
#include <sys/resource.h>

#include "cpp/net/network_place.h"

namespace ringcomm::testing {
namespace {

constexpr uint64_t kChannel = 7, kNobodys = 8;

// A group's other ranks, and the frames from each.
class Members final : public Directory {
 public:
  void add(const Contact& contact) {
    contacts_[contact.id] = contact;
    counters[contact.id];
  }
  std::optional<Contact> contact_of(const ProcessId& id) override {
    ++asked;
    const auto contact = contacts_.find(id);
    return contact == contacts_.end() ? std::nullopt : std::optional(contact->second);
  }
  Receiver* receiver(const ProcessId& id, Wire& wire) override {
    if (!contacts_.contains(id)) return nullptr;
    wires[id] = &wire;
    ++opened;
    return &counters.at(id);
  }

  std::atomic<int> asked{0}, opened{0};
  std::map<ProcessId, Counter> counters;
  std::map<ProcessId, Wire*> wires;

 private:
  std::map<ProcessId, Contact> contacts_;
};

// A process as a rank of one group after another.
struct Member {
  explicit Member(const NetworkOptions& options = {}) : place(options) {}
  ~Member() {
    if (members) leave();
  }
  const Contact& contact() const { return place.network.contact(); }
  void enter(uint64_t group, const std::vector<const Member*>& others) {
    channel = group;
    members = std::make_unique<Members>();
    for (const Member* other : others) {
      if (other != this) members->add(other->contact());
    }
    place.network.enter(channel, *members);
  }
  void leave() {
    place.network.leave(channel);
    for (auto& [id, wire] : members->wires) wire->close(channel);
    members.reset();
  }
  Wire& reach(const Member& other) { return place.network.reach(other.contact(), channel); }
  Counter& from(const Member& other) { return members->counters.at(other.contact().id); }
  Network::Counts counts() { return place.network.counts(); }

  Place place;
  uint64_t channel = 0;
  std::unique_ptr<Members> members;
};

// Two processes and a group of both, which only the first has begun to talk in.
struct Two {
  explicit Two(const NetworkOptions& options = {}) : here(options), there(options) {
    enter(kChannel);
  }
  void enter(uint64_t channel) {
    here.enter(channel, {&there});
    there.enter(channel, {&here});
  }
  Wire& reach() { return here.reach(there); }

  Member here, there;
};

// Posts, and waits until the other side has told that it came.
void send(Wire& wire, uint64_t channel, uint64_t first, uint64_t last) {
  for (uint64_t number = first; number <= last; ++number) post(wire, channel, number, 1000);
  wire.flush();
  wait_until([&] { return wire.undelivered() == 0; }, [&] { return wire.condition(); });
}

// The second has not reached the first when its frames come.
void known_late() {
  Two two;
  Wire& wire = two.reach();
  require(&wire == &two.reach(), "another wire to the same process");
  for (uint64_t number = 1; number <= 100; ++number) {
    post(wire, kNobodys, number, 10);
    post(wire, kChannel, number, 1000);
  }
  wire.flush();
  wait_until([&] { return wire.undelivered() == 0; }, [&] { return wire.condition(); });
  require(two.there.from(two.here).came == 100 && two.there.from(two.here).exact,
          two.there.from(two.here).came, " of 100 came");
  require(two.here.members->opened == 1 && two.there.members->opened == 1,
          "a receiver was asked for twice");
}

// A process of no group is turned away; and so is one of a group that has been left.
void of_no_group() {
  Two two;
  Place other;
  Wire& stranger = other.network.reach(two.there.contact());
  stranger.need();
  wait_until([&] { return two.there.members->asked > 0; }, [] { return "it never knocked"; });
  require(two.there.counts().peers == 0, "a stranger is a peer");
  two.there.place.network.leave(kChannel);
  const int before = two.there.members->asked;
  Wire& wire = two.reach();
  post(wire, kChannel, 1, 10);
  wire.flush();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  require(two.there.members->asked == before && two.there.members->opened == 0,
          "asked after leave()");
  require(stranger.condition() != "alive" && wire.condition() != "alive", "turned away, it is not");
  two.there.place.network.enter(kChannel, *two.there.members);
  wait_until([&] { return two.there.from(two.here).came == 1; }, [&] { return wire.condition(); });
}

// A stranger that knows the ids of a large group, and no key, makes no peers that stay.
void liars_by_many_names() {
  constexpr size_t kLiars = 300, kStrangers = 64;
  Place self, honest;
  Members members;
  const Contact& contact = self.network.contact();
  std::vector<Contact> names(kLiars, honest.network.contact());
  for (Contact& name : names) members.add((name.id = random_id(), name));
  members.add(honest.network.contact());
  self.network.enter(kChannel, members);
  Liar liar;
  std::vector<Fd> sockets;
  for (const Contact& name : names) {
    sockets.push_back(connect_tcp(contact.addresses[0]));
    pollfd entry{sockets.back().get(), POLLOUT, 0};
    require(::poll(&entry, 1, 5000) == 1, "no connection");
    const auto hello = Handshake(name.id, contact.id, 0, liar).output();
    require(::send(sockets.back().get(), hello.data(), hello.size(), 0) > 0, "no greeting");
  }
  const auto asked = [&] { return str(members.asked, " of ", kLiars, " were looked for"); };
  wait_until([&] { return members.asked == kLiars; }, asked);
  // One more may be open that was looked for a moment ago: the oldest is about to go.
  const size_t open = self.network.counts().sockets;
  require(open <= kStrangers + 1, str(open, " connections are open"));
  Wire& wire = honest.network.reach(contact);
  wire.need();
  wait_until([&] { return wire.condition() == "alive"; },
             [] { return "an honest one is kept out"; });
  sockets.clear();
  wait_until([&] { return self.network.counts().peers == 1; },
             [&] { return str(self.network.counts().peers, " peers are kept"); });
  self.network.leave(kChannel);
}

// No group needs the peer any more: its connection goes, and all but a few bytes of it. What one
// side still says to the group that the other one has left is taken, and dropped. In the next group
// all frames come once.
void forgotten() {
  Two two;
  for (uint64_t group = 1; group <= 3; ++group) {
    const uint64_t channel = 10 * group;
    two.here.leave();
    two.there.leave();
    two.enter(channel);
    send(two.reach(), channel, 1, 20);
    require(two.there.from(two.here).came == 20 && two.there.from(two.here).exact,
            "lost, or twice");
    two.here.leave();
    const auto gone = [&] {
      const auto counts = two.here.counts();
      return counts.peers == 0 && counts.sockets == 0 && counts.awake == 0 && counts.resting == 1;
    };
    const auto what = [&] {
      const auto counts = two.here.counts();
      return str(counts.peers, " peers, ", counts.sockets, " sockets, ", counts.resting, " rest");
    };
    wait_until(gone, what);
    require(two.there.counts().peers == 1, "its group is not over, and the peer is forgotten");
    Wire& back = two.there.reach(two.here);
    require(!back.lost(), back.condition());
    send(back, channel, 1, 20);
    require(back.broken() == 0, "a connection that was parked counts as broken");
    wait_until(gone, what);
    two.here.enter(channel + 1, {&two.there});
  }
}

// Many peers, few connections: nothing is lost, whichever side speaks first, and the dead are
// found.
void few_connections(const std::string& tls) {
  constexpr size_t kOthers = 24, kMost = 6;
  NetworkOptions options;
  options.tls = tls;
  options.secret = "bees";
  options.most_connections = kMost;
  options.flows = 1;
  Member self(options);
  std::vector<std::unique_ptr<Member>> others;
  std::vector<const Member*> all{&self};
  for (size_t i = 0; i < kOthers; ++i) {
    others.push_back(std::make_unique<Member>(options));
    all.push_back(others.back().get());
  }
  self.enter(kChannel, all);
  for (auto& other : others) other->enter(kChannel, all);
  Random random(7);
  std::vector<std::array<uint64_t, 2>> posted(kOthers);
  for (int round = 0; round < 400; ++round) {
    const size_t i = random.below(kOthers);
    const bool back = random.below(2) == 0;
    Wire& wire = back ? others[i]->reach(self) : self.reach(*others[i]);
    for (uint64_t more = random.below(3); more < 3; ++more) {
      post(wire, kChannel, ++posted[i][back ? 1 : 0], 1 + random.below(kKeptPayload));
    }
    wire.flush();
    if (random.below(10) == 0) std::this_thread::sleep_for(std::chrono::milliseconds(40));
  }
  const auto came = [&](size_t i) {
    const Counter &there = others[i]->from(self), &here = self.from(*others[i]);
    require(there.exact && here.exact, "frames came twice, changed, or in another order");
    return there.came == posted[i][0] && here.came == posted[i][1];
  };
  const auto all_came = [&] {
    size_t count = 0;
    for (size_t i = 0; i < kOthers; ++i) count += came(i) ? 1 : 0;
    return count == kOthers;
  };
  const auto missing = [&] {
    std::string text = "missing:";
    for (size_t i = 0; i < kOthers; ++i) {
      if (came(i)) continue;
      Wire &there = self.reach(*others[i]), &back = others[i]->reach(self);
      text += str(" ", i, ": ", others[i]->from(self).came.load(), " of ", posted[i][0], ", ",
                  there.condition(), "; ", self.from(*others[i]).came.load(), " of ", posted[i][1],
                  ", ", back.condition());
    }
    return text;
  };
  wait_until(all_came, missing);
  const auto few = [&] { return self.counts().sockets <= kMost; };
  wait_until(few, [&] { return str(self.counts().sockets, " connections are open"); });
  for (auto& other : others) require(!self.reach(*other).lost(), "a parked peer is lost");
  Wire& dead = self.reach(*others[0]);
  others[0].reset();
  const auto noticed = [&] {
    dead.need();
    return dead.lost();
  };
  wait_until(noticed, [&] { return dead.condition(); });
  for (size_t i = 1; i < kOthers; ++i) require(!self.reach(*others[i]).lost(), "another is lost");
}

size_t allocated() { return ::mallinfo2().uordblks; }

// Measures the cost of a peer that is never used, one that was used, and one that is forgotten.
void costs() {
  constexpr size_t kMany = 10'000, kUsed = 20;
  Member self;
  std::vector<std::unique_ptr<Member>> others;
  std::vector<const Member*> all;
  for (size_t i = 0; i < kUsed; ++i) all.push_back(others.emplace_back(new Member).get());
  self.enter(kChannel, all);
  for (auto& other : others) other->enter(kChannel, {&self});
  Contact contact = others[0]->contact();
  std::vector<Contact> contacts(kMany, contact);
  for (Contact& peer : contacts) self.members->add((peer.id = random_id(), peer));
  std::vector<Wire*> wires;
  wires.reserve(kMany);
  size_t before = allocated();
  for (const Contact& peer : contacts) wires.push_back(&self.place.network.reach(peer, kChannel));
  const size_t never = (allocated() - before) / kMany;
  const auto asleep = [&] { return self.counts().awake == 0; };
  wait_until(asleep, [&] { return str(self.counts().awake, " peers are awake"); });
  rusage usage{}, later{};
  const Deadline second(std::chrono::seconds(1));
  ::getrusage(RUSAGE_SELF, &usage);
  std::this_thread::sleep_for(std::chrono::seconds(1));
  ::getrusage(RUSAGE_SELF, &later);
  const auto wakes = static_cast<double>(later.ru_nvcsw - usage.ru_nvcsw);
  const double wake_rate = wakes / second.elapsed_seconds() / static_cast<double>(kUsed + 1);
  before = allocated();
  for (auto& other : others) send(self.reach(*other), kChannel, 1, 1);
  const size_t used = (allocated() - before) / (2 * kUsed);
  for (auto& other : others) other->leave();
  self.leave();
  const auto over = [&] {
    bool all_over = self.counts().peers == 0;
    for (auto& other : others) all_over = all_over && other->counts().peers == 0;
    return all_over;
  };
  wait_until(over, [&] { return str(self.counts().peers, " peers are left"); });
  const size_t rest = self.counts().resting;
  std::printf(
      "a peer that is never used: %zu bytes; used: %zu bytes; %zu of %zu rest; "
      "%.1f wake-ups a second of an idle network\n",
      never, used, rest, kMany + kUsed, wake_rate);
  require(never < 4096 && used < 16'384, "a peer costs more than it should");
  require(rest == kUsed, "peers rest that never were used");
  require(wake_rate < 10, "an idle network wakes up");
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  using namespace ringcomm::testing;
  return run_checks({{"known late", known_late},
                     {"of no group", of_no_group},
                     {"liars by many names", liars_by_many_names},
                     {"forgotten", forgotten},
                     {"few connections", [] { few_connections("off"); }},
                     {"few connections with TLS", [] { few_connections("on"); }},
                     {"costs", costs}},
                    argc, argv);
}
