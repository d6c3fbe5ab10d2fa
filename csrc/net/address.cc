#include "net/address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/tcp.h>

#include <algorithm>
#include <charconv>
#include <memory>
#include <string_view>

namespace ringcomm {
namespace {

constexpr size_t kMostAddresses = 4;

// All of `text` as a number up to `most`.
std::optional<int> parse_number(std::string_view text, int most) {
  int value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  if (value < 0 || value > most) return std::nullopt;
  return value;
}

// Bridges and pairs that container engines, cluster networks and hypervisors make by themselves.
bool is_virtual(const std::string& name) {
  static constexpr std::string_view known[] = {
      "docker", "br-",     "virbr", "vnet", "veth",  "lxc",    "lxdbr",   "podman",
      "cni",    "flannel", "cali",  "kube", "weave", "cilium", "nerdctl", "tunl"};
  return std::ranges::any_of(known,
                             [&](std::string_view start) { return name.starts_with(start); });
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

[[noreturn]] void nothing_left(const std::vector<Interface>& interfaces,
                               const InterfaceFilter& filter) {
  const std::string there = joined(interfaces, [](const Interface& one) {
    return str(one.name, " ", one.address.host(), one.up ? "" : " (down)");
  });
  throw UsageError(str("RINGCOMM_IFNAME=", filter.text(),
                       " leaves no address that other hosts can reach: this host has ",
                       there.empty() ? "none" : there));
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

bool Address::is_link_local() const {
  if (family() == AF_INET6) return IN6_IS_ADDR_LINKLOCAL(&at_.v6.sin6_addr);
  return family() == AF_INET && bytes()[0] == 169 && bytes()[1] == 254;
}

bool Address::in_network(const Address& network, int prefix) const {
  if (family() != network.family()) return false;
  for (size_t i = 0; i < bytes().size() && prefix > 0; ++i, prefix -= 8) {
    const int differ = bytes()[i] ^ network.bytes()[i];
    if ((differ >> std::max(0, 8 - prefix)) != 0) return false;
  }
  return true;
}

std::vector<Interface> list_interfaces() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) throw SystemError("getifaddrs");
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(list, &::freeifaddrs);
  std::vector<Interface> interfaces;
  for (const ifaddrs* one = list; one != nullptr; one = one->ifa_next) {
    const Address address = one->ifa_addr == nullptr ? Address() : Address(one->ifa_addr);
    if (address.family() == AF_UNSPEC) continue;
    const auto has = [&](unsigned flags) { return (one->ifa_flags & flags) == flags; };
    interfaces.push_back({one->ifa_name, address, has(IFF_UP | IFF_RUNNING), has(IFF_LOOPBACK),
                          is_virtual(one->ifa_name)});
  }
  return interfaces;
}

InterfaceFilter::InterfaceFilter(const std::string& text) : text_(text) {
  if (text.empty()) return;
  Item item;
  std::istringstream parts(text + ",");
  while (std::getline(parts, item.name, ',')) {
    std::string& name = item.name;
    for (; name.starts_with('^') || name.starts_with('='); name.erase(0, 1)) {
      (name[0] == '^' ? item.exclude : item.exact) = true;  // stays so
    }
    const size_t slash = std::min(name.find('/'), name.size());
    item.network = Address::from_number(name.substr(0, slash));
    const int most = item.network && item.network->family() == AF_INET ? 32 : 128;
    const auto prefix = slash == name.size() ? most : parse_number(name.substr(slash + 1), most);
    const bool named = slash == name.size() && name.find_first_of(" \t") == name.npos;
    RINGCOMM_CHECK(!name.empty() && prefix && (item.network || named), "RINGCOMM_IFNAME=", text,
                   ": '", name,
                   "' is none of eth (a name or its beginning), =eth0 (exactly) and "
                   "10.0.0.0/8 (a network); commas separate them, ^ excludes what follows");
    item.prefix = *prefix;
    items_.push_back(item);
    selects_ = selects_ || !item.exclude;
  }
}

bool InterfaceFilter::matches(const Item& item, const Interface& one) {
  if (item.network) return one.address.in_network(*item.network, item.prefix);
  return item.exact ? one.name == item.name : one.name.starts_with(item.name);
}

std::optional<size_t> InterfaceFilter::place(const Interface& interface) const {
  std::optional<size_t> found = selects_ ? std::nullopt : std::optional<size_t>(0);
  for (size_t i = items_.size(); i-- > 0;) {
    if (!matches(items_[i], interface)) continue;
    if (items_[i].exclude) return std::nullopt;
    found = i;
  }
  return found;
}

std::optional<Address> source_towards(const std::string& host, uint16_t port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  hints.ai_flags = AI_ADDRCONFIG;
  addrinfo* list = nullptr;
  if (::getaddrinfo(host.c_str(), nullptr, &hints, &list) != 0) return std::nullopt;
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(list, &::freeaddrinfo);
  for (const addrinfo* one = list; one != nullptr; one = one->ai_next) {
    const Address to = Address(one->ai_addr).set_port(port);
    const Fd fd(::socket(to.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
    // Sends nothing: the kernel looks the route up and chooses the source.
    if (!fd || ::connect(fd.get(), to.native(), to.length()) != 0) continue;
    return local_address(fd).set_port(0);
  }
  return std::nullopt;
}

std::string way_to(const Address& host) {
  const auto source = source_towards(host.host(), host.port());
  if (!source) return "this host, which has no route to it,";
  for (const Interface& one : list_interfaces()) {
    if (one.address.same_host(*source)) return str(source->host(), " (", one.name, ')');
  }
  return source->host();
}

std::vector<Address> choose_addresses(const std::vector<Interface>& interfaces,
                                      const InterfaceFilter& filter,
                                      const std::optional<Address>& routed) {
  using Order = std::tuple<size_t, bool, bool>;
  std::vector<std::pair<Order, Address>> found;
  std::vector<Address> chosen, loopback;
  const auto look = [&](const Interface& one) {
    const bool is_routed = routed && routed->same_host(one.address);
    const auto place = filter.place(one);
    if (!place || !one.up) return;
    if (one.address.is_loopback()) return loopback.push_back(one.address);
    const bool asked = one.address.family() == AF_INET && (is_routed || filter.selects());
    if (one.address.is_link_local() && !asked) return;
    // An address on lo may be the host's own in a routed network, or one that a balancer shares.
    const Order order{*place, !is_routed, one.virtual_bridge || one.loopback};
    found.emplace_back(order, Address(one.address).set_port(0));
  };
  for (const Interface& one : interfaces) look(one);
  const auto same = [&](const auto& one) { return routed && routed->same_host(one.address); };
  if (routed && std::ranges::none_of(interfaces, same)) {
    look({"", *routed, true, routed->is_loopback(), false});
  }
  std::ranges::stable_sort(found, [](const auto& a, const auto& b) { return a.first < b.first; });
  for (const auto& [order, address] : found) {
    const bool known = std::ranges::find(chosen, address) != chosen.end();
    if (!known && chosen.size() < kMostAddresses) chosen.push_back(address);
  }
  if (chosen.empty()) chosen = loopback;
  if (chosen.empty() && !filter.text().empty()) nothing_left(interfaces, filter);
  return chosen;
}

PortRange PortRange::parse(const std::string& text) {
  if (text.empty()) return {};
  const size_t dash = std::min(text.find('-'), text.size());
  const auto first = parse_number(text.substr(0, dash), 65535);
  const auto last = dash == text.size() ? first : parse_number(text.substr(dash + 1), 65535);
  RINGCOMM_CHECK(first && last && *first <= *last && (*first > 0 || *last == 0),
                 "RINGCOMM_PORTS=", text,
                 " is neither a port nor a range of ports, as 40000 or 40000-40100");
  return {static_cast<uint16_t>(*first), static_cast<uint16_t>(*last)};
}

Fd listen_tcp(const Address& on, PortRange range, int backlog) {
  int code = 0;
  for (int port = range.first; port <= range.last; ++port) {
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
  throw SystemError(str("cannot listen on ", on.host(), " at ports ", range.first, "-", range.last,
                        " (", remedy, ")"),
                    code);
}

Fd connect_tcp(const Address& to) {
  Fd fd = make_tcp(to.family());
  while (::connect(fd.get(), to.native(), to.length()) != 0) {
    if (errno == EINPROGRESS || errno == EALREADY) break;
    if (errno != EINTR) throw SystemError(str("cannot connect to ", to.to_text()));
  }
  return fd;
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
