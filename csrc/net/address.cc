#include "net/address.h"

#include <arpa/inet.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/tcp.h>

#include <algorithm>
#include <charconv>
#include <string_view>

namespace ringcomm {
namespace {

// All of `text` as a number up to `most`.
std::optional<int> parse_number(std::string_view text, int most) {
  int value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  if (value < 0 || value > most) return std::nullopt;
  return value;
}

void set_option(const Fd& socket, int level, int option, int value) {
  if (::setsockopt(socket.get(), level, option, &value, sizeof value) != 0) {
    throw SystemError(str("setsockopt(", level, ", ", option, ", ", value, ")"));
  }
}

Fd make_tcp(int family) {
  Fd fd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) throw SystemError("socket(TCP)");
  set_option(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  set_option(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, 5000);
  set_option(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPIDLE, 5);
  set_option(fd, IPPROTO_TCP, TCP_KEEPINTVL, 1);
  set_option(fd, IPPROTO_TCP, TCP_KEEPCNT, 5);
  if (family == AF_INET6) set_option(fd, IPPROTO_IPV6, IPV6_V6ONLY, 1);
  return fd;
}

}  // namespace

Address::Address(const sockaddr_in6& v6) {
  at_.v6 = v6;
  if (!IN6_IS_ADDR_V4MAPPED(&v6.sin6_addr)) return;
  sockaddr_in v4{AF_INET, v6.sin6_port, {}, {}};
  std::memcpy(&v4.sin_addr, v6.sin6_addr.s6_addr + 12, sizeof v4.sin_addr);
  *this = Address(v4);
}

Address::Address(const sockaddr* native) {
  if (native->sa_family == AF_INET) *this = Address(*reinterpret_cast<const sockaddr_in*>(native));
  if (native->sa_family == AF_INET6) {
    *this = Address(*reinterpret_cast<const sockaddr_in6*>(native));
  }
}

std::optional<Address> Address::from_number(const std::string& text) {
  sockaddr_in v4{AF_INET, 0, {}, {}};
  if (::inet_pton(AF_INET, text.c_str(), &v4.sin_addr) == 1) return Address(v4);
  sockaddr_in6 v6{};
  v6.sin6_family = AF_INET6;
  const size_t percent = text.find('%');
  const std::string number = text.substr(0, percent);
  if (::inet_pton(AF_INET6, number.c_str(), &v6.sin6_addr) != 1) return std::nullopt;
  if (percent != text.npos) {
    v6.sin6_scope_id = ::if_nametoindex(text.substr(percent + 1).c_str());
    if (v6.sin6_scope_id == 0 || !IN6_IS_ADDR_LINKLOCAL(&v6.sin6_addr)) return std::nullopt;
  }
  return Address(v6);
}

Address Address::from_text(const std::string& text) {
  const size_t colon = text.rfind(':');
  std::string host = text.substr(0, colon);
  const bool brackets = host.starts_with('[') && host.ends_with(']');
  if (brackets) host = host.substr(1, host.size() - 2);
  // Without brackets nobody could say where an IPv6 address ends.
  auto address = brackets == (host.find(':') != host.npos) ? from_number(host) : std::nullopt;
  const auto port = colon == text.npos ? std::nullopt : parse_number(text.substr(colon + 1), 65535);
  RINGCOMM_CHECK(address && port, "'", text.substr(0, 80),
                 "' is not an address with a port, as 10.0.0.1:4000 or [fd00::1]:4000");
  return address->set_port(static_cast<uint16_t>(*port));
}

std::string Address::text(bool with_port) const {
  if (family() == AF_UNSPEC) return "no address";
  char host[NI_MAXHOST] = {};
  // Not inet_ntop: this one appends the interface of a link-local address.
  ::getnameinfo(native(), length(), host, sizeof host, nullptr, 0, NI_NUMERICHOST);
  if (!with_port) return host;
  return family() == AF_INET6 ? str("[", host, "]:", port()) : str(host, ":", port());
}

std::span<const uint8_t> Address::bytes() const& {
  if (family() == AF_INET6) return at_.v6.sin6_addr.s6_addr;
  return {reinterpret_cast<const uint8_t*>(&at_.v4.sin_addr), family() == AF_INET ? 4U : 0U};
}

bool Address::is_loopback() const {
  if (family() == AF_INET6) return IN6_IS_ADDR_LOOPBACK(&at_.v6.sin6_addr);
  return family() == AF_INET && bytes()[0] == 127;
}

std::string way_to(const Address& host) {
  const Fd fd(::socket(host.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
  // Sends nothing: the kernel looks the route up and chooses the source.
  if (!fd || ::connect(fd.get(), host.native(), host.length()) != 0) {
    return "this host, which has no route to it,";
  }
  return local_address(fd).host();
}

Fd listen_tcp(const Address& on, uint16_t first, uint16_t last, int backlog) {
  int code = 0;
  for (int port = first; port <= last; ++port) {
    const Address at = Address(on).set_port(static_cast<uint16_t>(port));
    Fd fd = make_tcp(on.family());
    set_option(fd, SOL_SOCKET, SO_REUSEADDR, 1);  // connections of a former life do not matter
    // Two may bind one port before either listens: then the second learns it here.
    if (::bind(fd.get(), at.native(), at.length()) == 0 && ::listen(fd.get(), backlog) == 0) {
      return fd;
    }
    code = errno;
    if (code != EADDRINUSE) break;
  }
  const char* remedy = code == EADDRINUSE
                           ? "give RINGCOMM_PORTS a free port for each rank of this host"
                           : "choose another interface with RINGCOMM_IFNAME, or other ports with "
                             "RINGCOMM_PORTS";
  throw SystemError(
      str("cannot listen on ", on.host(), " at ports ", first, "-", last, " (", remedy, ")"), code);
}

Fd connect_tcp(const Address& to) {
  Fd fd = make_tcp(to.family());
  while (::connect(fd.get(), to.native(), to.length()) != 0) {
    if (errno == EINPROGRESS || errno == EALREADY) break;
    if (errno != EINTR) throw SystemError(str("cannot connect to ", to.to_text()));
  }
  return fd;
}

void set_congestion(const Fd& socket, const std::string& name) {
  if (name.empty()) return;
  const auto length = static_cast<socklen_t>(name.size());
  if (::setsockopt(socket.get(), IPPROTO_TCP, TCP_CONGESTION, name.data(), length) == 0) return;
  throw SystemError(str("RINGCOMM_CONGESTION=", name,
                        " (`sysctl net.ipv4.tcp_allowed_congestion_control` lists what this host "
                        "allows)"));
}

Address local_address(const Fd& socket) {
  sockaddr_storage name{};
  socklen_t length = sizeof name;
  auto* native = reinterpret_cast<sockaddr*>(&name);
  if (::getsockname(socket.get(), native, &length) != 0) throw SystemError("getsockname");
  return Address(native);
}

int pending_error(const Fd& socket) {
  int error = 0;
  socklen_t length = sizeof error;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length) != 0) return errno;
  return error;
}

void set_low_water(const Fd& socket, size_t bytes) {
  set_option(socket, SOL_SOCKET, SO_RCVLOWAT, static_cast<int>(bytes));
}

void set_most_unsent(const Fd& socket, size_t bytes) {
  set_option(socket, IPPROTO_TCP, TCP_NOTSENT_LOWAT, static_cast<int>(bytes));
}

}  // namespace ringcomm
