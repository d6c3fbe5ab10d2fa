// Two ends of a connection by TLS, and between them a wire that the test carries, byte by byte: it
// sees all, and may keep, change, repeat or make up what it likes.
#pragma once

#include <sys/socket.h>

#include <array>
#include <memory>
#include <string>

#include "cpp/harness.h"
#include "net/frame.h"
#include "net/tls.h"

namespace ringcomm::testing {

inline ProcessConfig by_secret(const std::string& secret) {
  ProcessConfig config;
  config.tls = "on";
  config.secret = secret;
  return config;
}

// Makes a non-blocking pair: each can read the other's bytes.
inline std::array<Fd, 2> connected_sockets() {
  int both[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, both) != 0) {
    throw SystemError("socketpair");
  }
  return {Fd(both[0]), Fd(both[1])};
}

class TlsEnd {
 public:
  TlsEnd(const ProcessConfig& config, bool accepting)
      : settings_(config), sockets_(connected_sockets()), tls_(settings_, sockets_[0], accepting) {}

  // Sends as much of `unsent` and reads as much as it can. An error ends it, and is its `refusal`.
  void step() {
    if (!refusal.empty()) return;
    try {
      std::array<std::byte, 5000> buffer;
      for (ssize_t bytes = 1; bytes > 0;) {
        bytes = tls_.read(buffer);
        if (bytes > 0) got.append(reinterpret_cast<const char*>(buffer.data()), size_t(bytes));
        is_over = is_over || bytes == 0;
      }
      for (ssize_t bytes = 1; bytes > 0 && !unsent.empty();) {
        const iovec part{unsent.data(), unsent.size()};
        bytes = tls_.write({&part, 1});
        if (bytes > 0) unsent.erase(0, static_cast<size_t>(bytes));
      }
    } catch (const ChangedError& error) {
      refusal = str("changed: ", error.what());
    } catch (const FlowError& error) {
      refusal = error.what();
    }
  }
  // Takes the bytes that this end has put on the wire.
  std::string take_from_wire() {
    std::string all(1 << 20, '\0');
    const ssize_t bytes = ::recv(sockets_[1].get(), all.data(), all.size(), 0);
    all.resize(static_cast<size_t>(std::max<ssize_t>(bytes, 0)));
    return all;
  }
  void put_on_wire(const std::string& bytes) {
    size_t sent = 0;
    while (sent < bytes.size()) {
      const ssize_t more =
          ::send(sockets_[1].get(), bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
      if (more <= 0) step();  // it makes room
      if (!refusal.empty()) return;
      sent += static_cast<size_t>(std::max<ssize_t>(more, 0));
    }
    step();
  }
  std::string binding() const { return tls_.binding(); }

  std::string unsent, got, refusal;
  bool is_over = false;

 private:
  const TlsSettings settings_;
  const std::array<Fd, 2> sockets_;
  Tls tls_;
};

struct TlsPair {
  TlsPair(const ProcessConfig& caller, const ProcessConfig& acceptor)
      : ends{std::make_unique<TlsEnd>(caller, false), std::make_unique<TlsEnd>(acceptor, true)} {}

  // Until nothing moves any more. `on_wire(from, bytes)` is what arrives of them.
  void run(const std::function<std::string(int, std::string)>& on_wire) {
    for (int quiet = 0; quiet < 2;) {
      ++quiet;
      for (const int from : {0, 1}) {
        ends[static_cast<size_t>(from)]->step();
        const std::string bytes = ends[static_cast<size_t>(from)]->take_from_wire();
        if (bytes.empty()) continue;
        quiet = 0;
        said[static_cast<size_t>(from)] += bytes;
        ends[static_cast<size_t>(1 - from)]->put_on_wire(on_wire(from, bytes));
      }
    }
  }
  void run() {
    run([](int, std::string bytes) { return bytes; });
  }

  std::array<std::unique_ptr<TlsEnd>, 2> ends;  // who called, and who accepted
  std::array<std::string, 2> said;              // by each, as the wire saw it
};

}  // namespace ringcomm::testing
