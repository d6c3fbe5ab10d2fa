// A network on the real interfaces: many processes connect to it at once, or say that they are one.
#include <poll.h>

#include <fstream>
#include <set>

#include "cpp/net/network_place.h"

namespace ringcomm::testing {
namespace {

constexpr int kPeers = 60;

// Each connects to all addresses at once and greets over one: the other connections say nothing.
void many_at_once() {
  Place self;
  Contact contact = self.network.contact();
  if (contact.addresses.size() < 2) contact.addresses.push_back(contact.addresses[0]);
  std::vector<std::unique_ptr<Place>> others;
  std::vector<Wire*> wires;
  for (int i = 0; i < kPeers; ++i) {
    others.push_back(std::make_unique<Place>());
    self.network.reach(others.back()->network.contact());
  }
  self.network.before_fork();  // holds its lock: all of them come before it looks
  for (const auto& other : others) {
    wires.push_back(&other->network.reach(contact));
    wires.back()->need();
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  self.network.after_fork();
  const Deadline deadline(std::chrono::seconds(5) * slack());
  const auto is_missing = [](Wire* wire) { return wire->condition() != "alive"; };
  while (std::ranges::any_of(wires, is_missing)) {
    require(!deadline.passed(), std::ranges::count_if(wires, is_missing), " of ", kPeers,
            " are not connected");
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

// A stranger that knows the id of a peer, and not its key, fills neither memory nor its place.
void liars() {
  Place self, peer;
  const Contact& contact = self.network.contact();
  self.network.reach(peer.network.contact());
  Liar liar;
  std::vector<Fd> sockets;
  for (int i = 0; i < 100; ++i) {
    sockets.push_back(connect_tcp(contact.addresses[0]));
    pollfd entry{sockets.back().get(), POLLOUT, 0};
    require(::poll(&entry, 1, 5000) == 1, "no connection");
    const auto hello = Handshake(peer.network.contact().id, contact.id, 0, liar).output();
    require(::send(sockets.back().get(), hello.data(), hello.size(), 0) > 0, "no greeting");
  }
  const Deadline deadline(std::chrono::seconds(2) * slack());  // less than a greeting may take
  while (std::ranges::count_if(sockets, is_open) > 8) {
    require(!deadline.passed(), std::ranges::count_if(sockets, is_open), " of 100 are kept");
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  Wire& wire = peer.network.reach(contact);
  wire.need();
  while (wire.condition() != "alive") {
    require(!deadline.passed(), "the peer is kept out");
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

// Its host takes the connections to all addresses, and the process dies before it answers one. When
// it is tried again, nobody who leaves waits for it.
void dies_unanswered() {
  NetworkOptions options;
  options.resume = std::chrono::seconds(10);
  Place self(options);
  Contact contact{random_id(), random_key(), "off", {}};
  std::vector<Fd> listeners;
  for (int i = 0; i < 2; ++i) {
    listeners.push_back(listen_tcp(Address::from_text("127.0.0.1:0"), 0, 0, 8));
    contact.addresses.push_back(local_address(listeners.back()));
  }
  Wire& wire = self.network.reach(contact);
  wire.need();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // it greets over one of two
  listeners.clear();
  while (!wire.lost()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  const std::string why = wire.condition();
  require(why.find("nobody listens any more") != std::string::npos, why);
  wire.open(1, nullptr);
  wire.post({.type = FrameType::kState, .channel = 1}, Payload(std::vector(8, std::byte{1})));
  require(!wire.lost() && wire.undelivered() == 0, "it is waited for");
  wire.close(1);
}

NetworkOptions by_secret(const std::string& secret) {
  NetworkOptions options;
  options.tls = "on";
  options.secret = secret;
  options.resume = std::chrono::seconds(2);
  return options;
}

// This host's ports with a connection to that one.
void note_callers(uint16_t port, std::set<unsigned>& callers) {
  std::ifstream table("/proc/self/net/tcp");
  std::string line;
  while (std::getline(table, line)) {
    unsigned slot = 0, here = 0, there = 0, state = 0;
    const int read =
        std::sscanf(line.c_str(), "%u: %*[^:]:%x %*[^:]:%x %x", &slot, &here, &there, &state);
    if (read == 4 && there == port && state == 1) callers.insert(here);
  }
}

// A key that has sealed enough is replaced, with its connection: no frame is lost, or comes twice.
void keys_wear_out() {
  constexpr uint64_t kFrames = 4000, kChannel = 7;
  NetworkOptions options = by_secret("bees");
  options.tls_records = 200;
  options.places.addresses = {"127.0.0.1"};
  Place self(options), other(options);
  Counter counter, nobody;
  Wire& there = other.network.reach(self.network.contact());
  Wire& here = self.network.reach(other.network.contact());
  there.open(kChannel, &counter);
  here.open(kChannel, &nobody);
  std::set<unsigned> callers;
  const Deadline deadline(std::chrono::seconds(60));
  for (uint64_t posted = 0; counter.came < kFrames;) {
    require(!deadline.passed(), counter.came, " frames have come: ", here.condition());
    for (int more = 0; more < 20 && posted < kFrames; ++more) {
      post(here, kChannel, ++posted, 3000);
    }
    here.flush();
    for (const Place* place : {&self, &other}) {
      note_callers(place->network.contact().addresses[0].port(), callers);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  require(counter.exact, "frames came twice, changed, or in another order");
  require(callers.size() >= 3, callers.size(), " connections: none was replaced");
  // The end that is behind in reading may not know yet that its key is worn.
  require(here.broken() + there.broken() < callers.size() - 1,
          "connections that were replaced count as broken");
  there.close(kChannel);
  here.close(kChannel);
}

// Nothing is known of the pair's key before TLS is through: so this is what its ends are told.
void another_secret() {
  Place self(by_secret("bees")), other(by_secret("wasps"));
  Wire& wire = self.network.reach(other.network.contact());
  other.network.reach(self.network.contact());
  wire.need();
  const Deadline deadline(std::chrono::seconds(20));
  while (!wire.lost()) {
    require(!deadline.passed(), "it waits on: ", wire.condition());
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  const std::string said = wire.condition();
  require(said.find("it does not know the secret of this job") != said.npos, said);
}

void one_is_off() {
  Place self(by_secret("bees")), other;
  for (const auto& [from, to] : {std::pair(&self, &other), std::pair(&other, &self)}) {
    std::string said = "nothing";
    try {
      from->network.reach(to->network.contact());
    } catch (const UsageError& error) {
      said = error.what();
    }
    require(said.find("set RINGCOMM_TLS and its files alike on every rank") != said.npos, said);
  }
}

// Keeps the thread that delivers to it, until open().
class Gate final : public Receiver {
 public:
  ~Gate() override {
    open();
    while (passed < waiting) std::this_thread::yield();
  }
  std::byte* place(const Frame&) override { return nullptr; }
  void deliver(const Frame&, std::span<const std::byte>) override {
    ++waiting;
    opened_.wait(false);
    ++passed;
  }
  void open() {
    opened_ = true;
    opened_.notify_all();
  }
  std::atomic<int> waiting{0}, passed{0};

 private:
  std::atomic<bool> opened_{false};
};

// While one thread reads from one peer, other threads read from another and write to it.
void side_by_side() {
  constexpr uint64_t kChannel = 7;
  Place self, slow, quick;
  Gate gate;
  Counter here, there;
  const auto join = [&](Place& from, Place& to, Receiver* receiver) -> Wire& {
    Wire& wire = from.network.reach(to.network.contact());
    wire.open(kChannel, receiver);
    return wire;
  };
  join(self, slow, &gate);
  Wire &to_quick = join(self, quick, &here), &from_slow = join(slow, self, &there),
       &from_quick = join(quick, self, &there);
  post(from_slow, kChannel, 1, 10);
  from_slow.flush();
  wait_until([&] { return gate.waiting == 1; }, [&] { return from_slow.condition(); });
  post(from_quick, kChannel, 1, 10);
  from_quick.flush();
  const auto driven = [&](const Counter& counter) {
    self.network.progress();
    return counter.came == 1;
  };
  wait_until([&] { return driven(here); }, [] { return "one peer's frame waits for another's"; });
  post(to_quick, kChannel, 1, 10);
  to_quick.flush();
  wait_until([&] { return driven(there); }, [] { return "a frame waits for another peer's"; });
  require(gate.passed == 0, "the gate was open");
  gate.open();
  wait_until([&] { return from_slow.undelivered() == 0; }, [&] { return from_slow.condition(); });
}

// Several threads drive one network, and its peers are looked at, parked and connected again.
void many_drivers() {
  constexpr uint64_t kChannel = 7, kFrames = 300;
  constexpr size_t kOthers = 6;
  NetworkOptions few;
  few.most_connections = 2;
  Place self(few);
  std::vector<std::unique_ptr<Place>> others;
  std::vector<Counter> here(kOthers), there(kOthers);
  std::vector<Wire*> out, back;
  for (size_t i = 0; i < kOthers; ++i) {
    others.push_back(std::make_unique<Place>(few));
    out.push_back(&self.network.reach(others[i]->network.contact()));
    back.push_back(&others[i]->network.reach(self.network.contact()));
    out[i]->open(kChannel, &here[i]);
    back[i]->open(kChannel, &there[i]);
  }
  std::atomic<bool> stop{false};
  std::vector<std::jthread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      self.network.begin_driving();
      while (!stop) self.network.progress();
      self.network.end_driving(false);
    });
  }
  for (size_t i = 0; i < kOthers; ++i) {
    for (Wire* wire : {out[i], back[i]}) {
      threads.emplace_back([wire] {
        for (uint64_t number = 1; number <= kFrames; ++number) {
          post(*wire, kChannel, number, 3000);
          wire->flush();
          if (number % 100 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(150));
        }
      });
    }
  }
  const auto all = [&](const Counter& counter) { return counter.came == kFrames; };
  wait_until(
      [&] { return std::ranges::all_of(here, all) && std::ranges::all_of(there, all); },
      [&] { return str(here[0].came, " and ", there[0].came, " came: ", out[0]->condition()); });
  stop = true;
  threads.clear();
  wait_until([&] { return std::ranges::any_of(out, &Wire::parked); }, [] { return "none parks"; });
  for (size_t i = 0; i < kOthers; ++i) {
    require(here[i].exact && there[i].exact, "a frame came twice, changed, or out of order");
    out[i]->close(kChannel);
    back[i]->close(kChannel);
  }
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  using namespace ringcomm::testing;
  return run_checks({{"many at once", many_at_once},
                     {"liars", liars},
                     {"dies unanswered", dies_unanswered},
                     {"keys wear out", keys_wear_out},
                     {"another secret", another_secret},
                     {"one is off", one_is_off},
                     {"side by side", side_by_side},
                     {"many drivers", many_drivers}},
                    argc, argv);
}
