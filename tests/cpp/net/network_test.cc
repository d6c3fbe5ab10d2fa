// A network on the real interfaces: many processes connect to it at once, or say that they are one.
#include "net/network.h"

#include <poll.h>

#include <algorithm>

#include "cpp/harness.h"

namespace ringcomm::testing {
namespace {

constexpr int kPeers = 60;

struct Place {
  DoorbellPage page{};
  Network network;
  explicit Place(std::chrono::milliseconds resume = NetworkOptions().resume)
      : network(options_with(page, resume)) {}
  static NetworkOptions options_with(DoorbellPage& page, std::chrono::milliseconds resume) {
    NetworkOptions options;
    options.resume = resume;
    options.bell = Doorbell(&page);
    return options;
  }
};

// Each connects to all addresses at once and greets over one: the other connections say nothing.
void many_at_once() {
  Place one;
  Contact contact = one.network.contact();
  if (contact.addresses.size() < 2) contact.addresses.push_back(contact.addresses[0]);
  std::vector<std::unique_ptr<Place>> others;
  std::vector<Wire*> wires;
  for (int i = 0; i < kPeers; ++i) {
    others.push_back(std::make_unique<Place>());
    one.network.reach(others.back()->network.contact());
  }
  one.network.before_fork();  // holds its lock: all of them come before it looks
  for (const auto& other : others) {
    wires.push_back(&other->network.reach(contact));
    wires.back()->need();
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  one.network.after_fork();
  const Deadline deadline(std::chrono::seconds(5));
  const auto is_missing = [](Wire* wire) { return wire->condition() != "alive"; };
  while (std::ranges::any_of(wires, is_missing)) {
    require(!deadline.passed(), std::ranges::count_if(wires, is_missing), " of ", kPeers,
            " are not connected after 5 s");
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

class Liar final : public Party {
 public:
  const Key& key() const override { return key_; }
  int flows() const override { return NetworkOptions().flows; }
  uint64_t generation(int) const override { return 0; }
  Cursor fence(int) override { return {}; }

 private:
  const Key key_ = random_key();
};

bool is_open(const Fd& socket) {
  std::array<std::byte, 4096> challenge;
  ssize_t got = 1;
  while (got > 0) got = ::recv(socket.get(), challenge.data(), challenge.size(), MSG_DONTWAIT);
  return got < 0 && errno == EAGAIN;
}

// Who knows the id of a peer, and not its key, fills neither memory nor the peer's place.
void liars() {
  Place one, peer;
  const Contact& contact = one.network.contact();
  one.network.reach(peer.network.contact());
  Liar liar;
  std::vector<Fd> sockets;
  for (int i = 0; i < 100; ++i) {
    sockets.push_back(connect_tcp(contact.addresses[0]));
    pollfd entry{sockets.back().get(), POLLOUT, 0};
    require(::poll(&entry, 1, 5000) == 1, "no connection");
    const auto hello = Handshake(peer.network.contact().id, contact.id, 0, liar).output();
    require(::send(sockets.back().get(), hello.data(), hello.size(), 0) > 0, "no greeting");
  }
  const Deadline deadline(std::chrono::seconds(2));  // less than a greeting may take
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

// Its host takes the connections to all addresses, and the process dies before it answers one.
void dies_unanswered() {
  Place one(std::chrono::seconds(10));
  Contact contact{random_id(), random_key(), "off", {}};
  std::vector<Fd> listeners;
  for (int i = 0; i < 2; ++i) {
    listeners.push_back(listen_tcp(Address::from_text("127.0.0.1:0"), 0, 0, 8));
    contact.addresses.push_back(local_address(listeners.back()));
  }
  Wire& wire = one.network.reach(contact);
  wire.need();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // it greets over one of two
  listeners.clear();
  while (!wire.lost()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  require(wire.refused().has_value(), wire.condition());
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  using namespace ringcomm::testing;
  return run_checks(
      {{"many at once", many_at_once}, {"liars", liars}, {"dies unanswered", dies_unanswered}},
      argc, argv);
}
