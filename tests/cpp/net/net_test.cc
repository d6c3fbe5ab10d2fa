// Addresses, and TCP sockets on the real loopback.
#include <fcntl.h>
#include <net/if.h>
#include <netinet/tcp.h>
#include <poll.h>

#include <algorithm>

#include "cpp/harness.h"
#include "net/address.h"
#include "net/checksum.h"

namespace ringcomm {
uint32_t portable_checksum(const std::byte* data, size_t bytes);  // csrc/net/checksum.cc by tables
}

namespace ringcomm::testing {
namespace {

Address ip(const std::string& text) {
  const auto address = Address::from_number(text);
  require(address.has_value(), text, " is no address");
  return *address;
}

void equal(const std::string& got, const std::string& want) {
  require(got == want, "'", got, "', not '", want, "'");
}

// The text of the UsageError that `function` throws; it must hold `word`.
void refused(const std::function<void()>& function, const std::string& word) {
  try {
    function();
  } catch (const UsageError& error) {
    const std::string text = error.what();
    return require(text.find(word) != std::string::npos, "'", text, "' does not say ", word);
  }
  throw Failure("nothing was refused that should name " + word);
}

void texts() {
  for (const std::string text : {"10.0.0.1:4000", "[fd00::1]:4000", "0.0.0.0:0", "[::]:65535"}) {
    equal(Address::from_text(text).to_text(), text);
  }
  equal(Address::from_text("[::ffff:10.0.0.1]:7").to_text(), "10.0.0.1:7");
  equal(Address::from_text("[FD00:0::1]:7").to_text(), "[fd00::1]:7");
  equal(ip("fe80::1%lo").host(), "fe80::1%lo");
  equal(Address().to_text(), "no address");
  for (const std::string text :
       {"", ":", "10.0.0.1", "10.0.0.1:", "10.0.0.1:65536", "10.0.0.1:-1", "10.0.0.1:4 ", "10.1:4",
        "[10.0.0.1]:4", "fd00::1:4", "[fd00::1]", "[fd00::1:4", "[fe80::1%nowhere]:4", "host:4",
        "256.0.0.1:4", " 10.0.0.1:4", "10.0.0.1:0x4", "[]:4", "10.0.0.1:4:5"}) {
    refused([&] { Address::from_text(text); }, "'" + text + "' is not an address with a port");
  }
  for (const std::string text :
       {"10", "10.1", "", "eth0", "10.0.0.1:4", "fe80::1%nowhere", "fd00::1%lo"}) {
    require(!Address::from_number(text), text, " is taken for an address");
  }
}

void values() {
  require(ip("127.0.0.1").is_loopback() && ip("127.0.1.1").is_loopback(), "127.0.1.1");
  require(ip("::1").is_loopback() && !ip("10.0.0.1").is_loopback(), "::1");
  require(!Address().is_loopback(), "no address");
  const Address address = Address::from_text("10.0.0.1:4000");
  require(address.family() == AF_INET && address.port() == 4000, "family and port");
  require(address != ip("10.0.0.1") && address.same_host(ip("10.0.0.1")), "same host");
  require(!address.same_host(ip("10.0.0.2")) && !address.same_host(ip("::a00:1")), "another host");
}

int option(const Fd& socket, int level, int name) {
  int value = -1;
  socklen_t length = sizeof value;
  require(::getsockopt(socket.get(), level, name, &value, &length) == 0, "getsockopt");
  return value;
}

void has_options(const Fd& socket) {
  require(option(socket, IPPROTO_TCP, TCP_NODELAY) == 1, "TCP_NODELAY");
  require(option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT) == 5000, "TCP_USER_TIMEOUT");
  require(option(socket, SOL_SOCKET, SO_KEEPALIVE) == 1, "SO_KEEPALIVE");
  require(option(socket, IPPROTO_TCP, TCP_KEEPIDLE) == 5, "TCP_KEEPIDLE");
  require(option(socket, IPPROTO_TCP, TCP_KEEPINTVL) == 1, "TCP_KEEPINTVL");
  require(option(socket, IPPROTO_TCP, TCP_KEEPCNT) == 5, "TCP_KEEPCNT");
  require((::fcntl(socket.get(), F_GETFD) & FD_CLOEXEC) != 0, "CLOEXEC");
}

void wait_for(const Fd& fd, short events) {
  pollfd entry{fd.get(), events, 0};
  require(::poll(&entry, 1, 5000) == 1, "nothing within 5 s");
}

Address peer_address(const Fd& socket) {
  sockaddr_storage name{};
  socklen_t length = sizeof name;
  auto* native = reinterpret_cast<sockaddr*>(&name);
  require(::getpeername(socket.get(), native, &length) == 0, "getpeername");
  return Address(native);
}

// Connects to a listener there, and checks both ends' addresses and options.
void connects(const Address& here) {
  const Fd listener = listen_tcp(here, 0, 0, 8);
  const Address at = local_address(listener);
  require(at.same_host(here) && at.port() != 0, "listens on ", at.to_text());
  require((::fcntl(listener.get(), F_GETFL) & O_NONBLOCK) != 0, "the listener blocks");
  const Fd out = connect_tcp(at);
  require((::fcntl(out.get(), F_GETFL) & O_NONBLOCK) != 0, "the connection blocks");
  wait_for(out, POLLOUT);
  require(pending_error(out) == 0, "connect: ", std::strerror(pending_error(out)));
  wait_for(listener, POLLIN);
  const Fd in(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  require(static_cast<bool>(in), "accept");
  require(peer_address(out) == at && local_address(in) == at, "the listener's end");
  require(local_address(out) == peer_address(in), "the other end");
  has_options(out);
  has_options(in);
}

void connections() {
  connects(ip("127.0.0.1"));
  connects(ip("127.0.0.9"));
}

void ways() { equal(way_to(ip("127.0.0.1")), "127.0.0.1"); }

void connections_of_ipv6() {
  if (way_to(ip("::1")).find("::1") == std::string::npos)
    return std::printf("this machine has no IPv6\n"), void();
  connects(ip("::1"));
  // One port number, both families: the IPv6 listener does not take IPv4's.
  const Fd six = listen_tcp(ip("::"), 0, 0, 8);
  const uint16_t port = local_address(six).port();
  const Fd four = listen_tcp(ip("0.0.0.0"), port, port, 8);
}

// Returns the text of the SystemError, which must have that code.
std::string system_error(const std::function<void()>& function, int code) {
  try {
    function();
  } catch (const SystemError& error) {
    require(error.code() == code, "errno ", error.code(), ": ", error.what());
    return error.what();
  }
  throw Failure("nothing was thrown");
}

void port_range_exhausted() {
  const Address here = ip("127.0.0.1");
  const Fd any = listen_tcp(here, 0, 0, 1);
  const uint16_t port = local_address(any).port();
  const std::string full = system_error([&] { listen_tcp(here, port, port, 1); }, EADDRINUSE);
  equal(full, str("cannot listen on 127.0.0.1 at ports ", port, "-", port,
                  " (give RINGCOMM_PORTS a free port for each rank of this host): Address already "
                  "in use"));
  const auto last = static_cast<uint16_t>(std::min(port + 20, 65535));
  if (last == port) return;
  const Fd next = listen_tcp(here, port, last, 1);
  require(local_address(next).port() > port && local_address(next).port() <= last, "the next port");
  const std::string foreign =
      system_error([] { listen_tcp(ip("192.0.2.77"), 0, 0, 1); }, EADDRNOTAVAIL);
  require(foreign.find("192.0.2.77") != std::string::npos &&
              foreign.find("RINGCOMM_IFNAME") != std::string::npos,
          foreign);
}

void nobody_listens() {
  const Address here = ip("127.0.0.1");
  Fd listener = listen_tcp(here, 0, 0, 1);
  const Address at = local_address(listener);
  listener.reset();
  int code = 0;
  try {
    const Fd socket = connect_tcp(at);
    wait_for(socket, POLLOUT);
    code = pending_error(socket);
  } catch (const SystemError& error) {
    code = error.code();
    require(std::string(error.what()).find(at.to_text()) != std::string::npos, error.what());
  }
  require(code == ECONNREFUSED, "errno ", code);
}

// A rank that comes back after a crash gets its port again at once.
void a_port_again() {
  const Address here = ip("127.0.0.1");
  Fd listener = listen_tcp(here, 0, 0, 8);
  const Address at = local_address(listener);
  const Fd out = connect_tcp(at);
  wait_for(listener, POLLIN);
  Fd in(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
  in.reset();  // closes first: this side keeps the port in TIME_WAIT
  listener.reset();
  const Fd again = listen_tcp(here, at.port(), at.port(), 8);
}

void portable_checksums() {
  std::vector<std::byte> data(1000);
  uint32_t random = 1;
  for (std::byte& byte : data) {
    random = random * 1664525 + 1013904223;
    byte = static_cast<std::byte>(random >> 24);
  }
  for (size_t from = 0; from < 8; ++from) {
    for (size_t bytes = 0; from + bytes <= data.size(); ++bytes) {
      const uint32_t here = checksum(data.data() + from, bytes);
      const uint32_t tables = portable_checksum(data.data() + from, bytes);
      require(here == tables, bytes, " bytes from ", from, ": ", here, " and ", tables);
    }
  }
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  using namespace ringcomm::testing;
  return run_checks({{"texts", texts},
                     {"values", values},
                     {"ways", ways},
                     {"connections", connections},
                     {"connections of IPv6", connections_of_ipv6},
                     {"port range exhausted", port_range_exhausted},
                     {"nobody listens", nobody_listens},
                     {"a port again", a_port_again},
                     {"portable checksums", portable_checksums}},
                    argc, argv);
}
