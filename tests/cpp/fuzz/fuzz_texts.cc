// Fuzz target: texts that processes exchange through the store. A text is refused with the error
// that says so, or means something that can be told again.
#include "fuzz_driver.h"
#include "net/network.h"
#include "transport/host.h"
#include "transport/members.h"
#include "transport/roster.h"

namespace ringcomm::testing {
namespace {

void check_contact(const std::string& text) {
  Contact contact;
  try {
    contact = Contact::from_text(text);
  } catch (const UsageError&) {
    return;
  }
  Contact again = Contact::from_text(contact.to_text());
  if (without("last_byte")) again.key.back() = 0;
  require(again.id == contact.id && again.key == contact.key, "another process");
  require(again.addresses == contact.addresses, "other addresses");
}

void check_address(const std::string& text) {
  try {
    const Address address = Address::from_text(text);
    require(Address::from_text(address.to_text()) == address, "another address");
    require(!address.host().empty() && address.host().find(' ') == std::string::npos, "a host");
  } catch (const UsageError&) {
    return;
  }
}

void check_card(const std::string& text) {
  Card card;
  try {
    card = Card::from_text(text, 3);
  } catch (const PeerError& error) {
    return require(error.rank() == 3, "another rank");
  }
  const Card again = Card::from_text(card.to_text(), 3);
  const auto fields = [](const Card& filled) {
    return str(filled.host, ' ', filled.boot_id, ' ', filled.network, ' ', filled.socket, ' ',
               filled.pid, ' ', filled.user);
  };
  require(fields(again) == fields(card) && again.nonce == card.nonce, "another card");
  require(card.socket.size() <= 100, "a name that is no socket's");
}

void check_members(const std::string& text) {
  const Members members = Members::from_text(text);
  if (members.ranks.empty()) return;
  const Members again = Members::from_text(members.to_text());
  require(again.ranks == members.ranks && again.number() == members.number(), "other members");
  require(again.world == members.world && again.id == members.id, "another rank's");
}

void check_roster(const std::string& text) {
  constexpr int kRanks = 5;
  Roster roster;
  try {
    roster = Roster::from_text(text, kRanks);
  } catch (const PeerError& error) {
    return require(error.rank() == 0, "another rank");
  }
  const Roster again = Roster::from_text(roster.to_text(), kRanks);
  require(again.host_of == roster.host_of && again.names == roster.names, "other hosts");
  require(again.pids == roster.pids && roster.pids.size() == kRanks, "other processes");
  for (Rank rank = 0; rank < kRanks; ++rank) {
    require(roster.host(rank) < roster.hosts() && !roster.text(rank).empty(), "nowhere");
  }
}

Bytes input_of(uint8_t kind, const std::string& text) {
  Bytes bytes(1, kind);
  bytes.insert(bytes.end(), text.begin(), text.end());
  return bytes;
}

}  // namespace

std::vector<std::string> rules() { return {"last_byte"}; }

std::vector<Bytes> corpus() {
  Contact contact;
  contact.id.fill(0x1a);
  contact.key.fill(0xb2);
  contact.tls = "by-secret";
  for (const auto* text : {"10.0.0.1:4000", "[fd00::1]:65535", "[fe80::1%lo]:1"}) {
    contact.addresses.push_back(Address::from_text(text));
  }
  Card card;
  card.host = "node-1";
  card.boot_id = "0b5c8a3e-1f0e-4b5c-9d2f-6a7b8c9d0e1f";
  card.network = "4:4026531840";
  card.socket = "ringcomm-0123456789abcdef";
  card.pid = 4711;
  card.user = 1000;
  card.nonce = {UINT64_MAX, 1};
  return {
      input_of(0, contact.to_text()),
      input_of(1, contact.addresses[0].to_text()),
      input_of(1, "[::ffff:10.0.0.1]:7"),
      input_of(1, "[fe80::1%lo]:4000"),
      input_of(2, card.to_text()),
      input_of(3, "2 7 5-9 - 0-2,5,9-4000"),
      input_of(3, "0 7 5-9 - 2147483647"),
      input_of(4, "5 77 ring 2 a b 0 2 1 3 700 1 -1 9223372036854775807 9223372036854775807\n")};
}

}  // namespace ringcomm::testing

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t bytes) {
  using namespace ringcomm::testing;
  Input input(data, bytes);
  const auto kind = input.below(5);
  const auto left = input.take_bytes(input.size());
  const std::string text(left.begin(), left.end());
  constexpr std::array checks = {&check_contact, &check_address, &check_card, &check_members,
                                 &check_roster};
  checks.at(kind)(text);
  return 0;
}
