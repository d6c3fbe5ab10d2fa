// A network whose peers become known late, sleep, and are forgotten: what many of them cost.
#include <poll.h>

#include "cpp/net/network_place.h"

namespace ringcomm::testing {
namespace {

constexpr uint64_t kChannel = 7, kNobodys = 8;

// A group's other ranks, and what comes of each.
class Members final : public Directory {
 public:
  void add(const Contact& contact) { contacts_[contact.id] = contact; }
  std::optional<Contact> contact_of(const ProcessId& id) override {
    ++asked;
    const auto found = contacts_.find(id);
    return found == contacts_.end() ? std::nullopt : std::optional(found->second);
  }
  Receiver* receiver(const ProcessId& id, Wire& wire) override {
    if (!contacts_.contains(id)) return nullptr;
    wires[id] = &wire;
    ++opened;
    return &counters[id];
  }

  std::atomic<int> asked{0}, opened{0};
  std::map<ProcessId, Counter> counters;
  std::map<ProcessId, Wire*> wires;

 private:
  std::map<ProcessId, Contact> contacts_;
};

// Two processes and a group of both, which only the first has begun to talk in.
struct Two {
  explicit Two(const NetworkOptions& options = {}) : here(options), there(options) {
    ours.add(there.network.contact());
    theirs.add(here.network.contact());
    here.network.enter(kChannel, ours);
    there.network.enter(kChannel, theirs);
  }
  ~Two() {
    here.network.leave(kChannel);
    there.network.leave(kChannel);
    for (Members* members : {&ours, &theirs}) {
      for (auto& [id, wire] : members->wires) wire->close(kChannel);
    }
  }
  Wire& reach() { return here.network.reach(there.network.contact(), kChannel); }
  Counter& counter() { return theirs.counters[here.network.contact().id]; }

  Place here, there;
  Members ours, theirs;
};

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
  require(two.counter().came == 100 && two.counter().exact, two.counter().came, " of 100 came");
  require(two.ours.opened == 1 && two.theirs.opened == 1, "a receiver was asked for twice");
}

// A process of no group is turned away; and so is one of a group that has been left.
void of_no_group() {
  Two two;
  Place other;
  Wire& stranger = other.network.reach(two.there.network.contact());
  stranger.need();
  wait_until([&] { return two.theirs.asked > 0; }, [] { return "it never knocked"; });
  require(two.there.network.counts().peers == 0, "a stranger is a peer");
  two.there.network.leave(kChannel);
  const int before = two.theirs.asked;
  Wire& wire = two.reach();
  post(wire, kChannel, 1, 10);
  wire.flush();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  require(two.theirs.asked == before && two.theirs.opened == 0, "asked after leave()");
  require(stranger.condition() != "alive" && wire.condition() != "alive", "turned away, it is not");
  two.there.network.enter(kChannel, two.theirs);
  wait_until([&] { return two.counter().came == 1; }, [&] { return wire.condition(); });
}

// Who knows the ids of a large group, and no key, makes no peers that stay.
void liars_by_many_names() {
  constexpr size_t kLiars = 300, kStrangers = 64;
  Place one, honest;
  Members members;
  const Contact& contact = one.network.contact();
  std::vector<Contact> names(kLiars, honest.network.contact());
  for (Contact& name : names) members.add((name.id = random_id(), name));
  members.add(honest.network.contact());
  one.network.enter(kChannel, members);
  Liar liar;
  std::vector<Fd> sockets;
  for (const Contact& name : names) {
    sockets.push_back(connect_tcp(contact.addresses[0]));
    pollfd entry{sockets.back().get(), POLLOUT, 0};
    require(::poll(&entry, 1, 5000) == 1, "no connection");
    const auto hello = Handshake(name.id, contact.id, 0, liar).output();
    require(::send(sockets.back().get(), hello.data(), hello.size(), 0) > 0, "no greeting");
  }
  const auto bounded = [&] {
    const Network::Counts counts = one.network.counts();
    return counts.peers <= kStrangers && counts.sockets <= kStrangers;
  };
  const auto many = [&] { return str(one.network.counts().peers, " peers are kept"); };
  wait_until([&] { return members.asked == kLiars && bounded(); }, many);
  Wire& wire = honest.network.reach(contact);
  wire.need();
  wait_until([&] { return wire.condition() == "alive"; },
             [] { return "an honest one is kept out"; });
  sockets.clear();
  wait_until([&] { return one.network.counts().peers == 1; }, many);
  one.network.leave(kChannel);
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  using namespace ringcomm::testing;
  return run_checks({{"known late", known_late},
                     {"of no group", of_no_group},
                     {"liars by many names", liars_by_many_names}},
                    argc, argv);
}
