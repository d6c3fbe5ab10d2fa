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
  explicit Address(const sockaddr* native);  // no address for other families
  // Reads "10.0.0.1:4000", "[fd00::1]:4000" or "[fe80::1%eth0]:4000". Throws UsageError.
  static Address from_text(const std::string& text);
  // Reads "10.0.0.1" or "fd00::1", without a port. Returns nothing for a name.
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
  bool same_host(const Address& other) const { return Address(other).set_port(port()) == *this; }

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

// Tells people the address from which packets to that host leave, or that there is no route.
std::string way_to(const Address& host);

// Sockets do not block, send at once, and fail 5 s after the peer's last acknowledgement. Accepted
// sockets have the same options, except that accept4 must be told SOCK_NONBLOCK.

// Listens on the first free port of the range, 0 for any; the port in `on` does not matter. Throws
// SystemError.
Fd listen_tcp(const Address& on, uint16_t first, uint16_t last, int backlog);
// Begins to connect: when writable, pending_error says how it went. Throws SystemError when it
// fails at once, as loopback does.
Fd connect_tcp(const Address& to);

// Sets the congestion control, by its name. Throws SystemError where the kernel has no such, or
// does not allow it.
void set_congestion(const Fd& socket, const std::string& name);

Address local_address(const Fd& socket);
int pending_error(const Fd& socket);                   // an errno, told once; 0: none so far
void set_low_water(const Fd& socket, size_t bytes);    // fewer do not make it readable
void set_most_unsent(const Fd& socket, size_t bytes);  // more are refused: another may be faster

}  // namespace ringcomm
