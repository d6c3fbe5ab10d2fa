// Measures the cost of encryption: bytes that one core seals and sends, and receives and opens, in
// a second of its time. Both ends are on this thread, with a socket between, so that the copies of
// the kernel count, and its network does not. Beside it the same without TLS.
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <vector>

#include "net/frame.h"
#include "net/tls.h"

namespace ringcomm {
namespace {

constexpr size_t kPiece = 256 << 10;        // of a frame, at most
constexpr size_t kTotal = size_t{1} << 30;  // bytes in a round
constexpr int kRounds = 5;

double cpu_seconds() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

struct Ends {
  explicit Ends(const TlsSettings& settings) {
    int both[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, both) != 0) {
      throw SystemError("socketpair");
    }
    sockets = {Fd(both[0]), Fd(both[1])};
    if (!settings.on()) return;
    for (size_t i = 0; i < 2; ++i) tls[i] = std::make_unique<Tls>(settings, sockets[i], i == 1);
  }
  ssize_t write(iovec part) {
    return tls[0] ? tls[0]->write({&part, 1}) : ::writev(sockets[0].get(), &part, 1);
  }
  ssize_t read(std::vector<std::byte>& to) {
    return tls[1] ? tls[1]->read(to) : ::read(sockets[1].get(), to.data(), to.size());
  }
  std::array<Fd, 2> sockets;
  std::array<std::unique_ptr<Tls>, 2> tls;
};

// Gigabytes a second of processor time: of the sender, and of the receiver.
std::array<double, 2> round(const TlsSettings& settings) {
  Ends ends(settings);
  std::vector<std::byte> from(kPiece), to(kPiece);
  for (size_t i = 0; i < kPiece; ++i) from[i] = static_cast<std::byte>(i * 31);
  if (ends.tls[0]) {  // the handshake
    for (int turn = 0; turn < 4; ++turn) ends.tls[0]->read(to), ends.tls[1]->read(to);
  }
  size_t sent = 0, got = 0;
  double sending = 0, receiving = 0;
  while (got < kTotal) {
    const double begin = cpu_seconds();
    for (ssize_t bytes = 1; bytes > 0 && sent < kTotal;) {
      const size_t at = sent % kPiece;
      bytes = ends.write({from.data() + at, kPiece - at});
      sent += static_cast<size_t>(std::max<ssize_t>(bytes, 0));
    }
    const double middle = cpu_seconds();
    for (ssize_t bytes = 1; bytes > 0;) {
      bytes = ends.read(to);
      got += static_cast<size_t>(std::max<ssize_t>(bytes, 0));
    }
    sending += middle - begin;
    receiving += cpu_seconds() - middle;
  }
  const double gigabytes = 1e-9 * static_cast<double>(got);
  return {gigabytes / sending, gigabytes / receiving};
}

}  // namespace
}  // namespace ringcomm

int main() {
  using namespace ringcomm;
  ProcessConfig config;
  config.secret = "of this benchmark";
  const TlsSettings off(config);
  config.tls = "on";
  const TlsSettings on(config);
  std::array<std::vector<double>, 4> measured;
  for (int i = 0; i < kRounds; ++i) {
    for (size_t way = 0; way < 2; ++way) {
      const auto rates = round(way == 0 ? off : on);
      for (size_t side = 0; side < 2; ++side) measured[2 * way + side].push_back(rates[side]);
    }
  }
  constexpr const char* kNames[] = {"sends in clear", "receives in clear", "seals and sends",
                                    "receives and opens"};
  for (size_t i = 0; i < measured.size(); ++i) {
    std::ranges::sort(measured[i]);
    std::printf("%-18s %5.2f GB/s a core (%.2f to %.2f)\n", kNames[i], measured[i][kRounds / 2],
                measured[i].front(), measured[i].back());
  }
  return 0;
}
