// Addresses of hosts, which of them a rank tells the others, and TCP sockets on them.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/fd.h"

namespace ringcomm {

// An IPv4 or IPv6 address and a port. IPv4 in IPv6's clothes (::ffff:10.0.0.1) is IPv4 here.
class Address {
 public:
  Address() = default;
  explicit Address(const sockaddr* native);  // of other families: none
  // "10.0.0.1:4000", "[fd00::1]:4000", "[fe80::1%eth0]:4000". Throws UsageError.
  static Address from_text(const std::string& text);
  // "10.0.0.1", "fd00::1": without a port, and no name.
  static std::optional<Address> from_number(const std::string& text);

  std::string to_text() const { return text(true); }
  std::string host() const { return text(false); }
  int family() const { return at_.any.sa_family; }  // AF_UNSPEC: none
  uint16_t port() const { return ntohs(at_.v4.sin_port); }
  Address& set_port(uint16_t port) {
    at_.v4.sin_port = htons(port);
    return *this;
  }
  bool is_loopback() const;
  bool is_link_local() const;
  bool same_host(const Address& other) const { return Address(other).set_port(port()) == *this; }
  bool in_network(const Address& network, int prefix) const;

  bool operator==(const Address& other) const { return to_text() == other.to_text(); }

  const sockaddr* native() const { return &at_.any; }
  socklen_t length() const { return family() == AF_INET ? sizeof at_.v4 : sizeof at_.v6; }
  std::span<const uint8_t> bytes() const&;  // 4 or 16, in the order of the network
  void bytes() const&& = delete;

 private:
  explicit Address(const sockaddr_in& v4) { at_.v4 = v4; }
  explicit Address(const sockaddr_in6& v6);
  std::string text(bool with_port) const;

  union {
    sockaddr_in6 v6{};
    sockaddr_in v4;  // its port lies where v6's does
    sockaddr any;
  } at_;
};

// One address of an interface.
struct Interface {
  std::string name;
  Address address;
  bool up = false;
  bool loopback = false;
  bool virtual_bridge = false;  // of containers or virtual machines; every host may have the same
};

std::vector<Interface> list_interfaces();

// RINGCOMM_IFNAME: names or their beginnings ("eth"), networks ("10.0.0.0/8", "fd00::/16") and
// addresses, separated by commas. As in NCCL, "=" makes the names from there on exact, and "^"
// excludes all from there on: "=eth0,eth1", "^docker0,lo", "eth,^eth3". The empty text wants all.
class InterfaceFilter {
 public:
  InterfaceFilter() = default;
  explicit InterfaceFilter(const std::string& text);  // throws UsageError

  // Which item asks for this interface; nullopt when it is not wanted.
  std::optional<size_t> place(const Interface& interface) const;
  bool selects() const { return selects_; }  // has items that ask, not only such that exclude
  const std::string& text() const { return text_; }

 private:
  struct Item {
    std::string name;
    bool exact = false;
    bool exclude = false;
    std::optional<Address> network;
    int prefix = 0;
  };
  static bool matches(const Item& item, const Interface& interface);

  std::string text_;
  std::vector<Item> items_;
  bool selects_ = false;
};

// The local address, port 0, from which packets to that host leave; nullopt when it has no address
// or there is no route. May ask a name server. A loopback address says nothing to other hosts:
// many a host's own name is 127.0.1.1 in its /etc/hosts.
std::optional<Address> source_towards(const std::string& host, uint16_t port);

// For people: the interface by which packets to that host leave, "10.0.0.1 (eth0)", or that there
// is no route.
std::string way_to(const Address& host);

// The addresses that a rank tells other hosts, best first, at most four. The filter's order comes
// first, then the routed one (source_towards the store), then real interfaces before virtual
// bridges. Interfaces that are down are left out. So are IPv6 link-local addresses, which mean
// nothing elsewhere, and IPv4 link-local ones that were not asked for. Loopback is the answer where
// nothing else is: on a single machine without a network, or when asked for. Never give it to
// another host. Throws UsageError when the filter leaves nothing.
std::vector<Address> choose_addresses(const std::vector<Interface>& interfaces,
                                      const InterfaceFilter& filter,
                                      const std::optional<Address>& routed);

// RINGCOMM_PORTS: "40000-40100", or one port. Empty or 0: whatever the kernel gives.
struct PortRange {
  uint16_t first = 0, last = 0;
  static PortRange parse(const std::string& text);  // throws UsageError
};

// Sockets do not block, send at once, and fail 5 s after the peer's last acknowledgement. Accepted
// sockets have the same options, except that accept4 must be told SOCK_NONBLOCK.

// On the first free port of the range; the port in `on` does not matter. Throws SystemError.
Fd listen_tcp(const Address& on, PortRange range, int backlog);
// Begins to connect: when writable, pending_error says how it went. Throws SystemError when it
// fails at once, as loopback does.
Fd connect_tcp(const Address& to);

Address local_address(const Fd& socket);
int pending_error(const Fd& socket);                   // an errno, told once; 0: none so far
void set_low_water(const Fd& socket, size_t bytes);    // fewer do not make it readable
void set_most_unsent(const Fd& socket, size_t bytes);  // more are refused: another may be faster

}  // namespace ringcomm
