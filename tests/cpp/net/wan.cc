// Long links, for kernels without netem: takes the place of the cables between hosts and their
// switch, all of them network namespaces (lab/hosts.py).
//
//   wan RATE_MBIT DELAY_MS LOSS_PERCENT QUEUE_MS MTU SWITCH HOST...
//
// Makes a device eth0 in each namespace HOST, and port0, port1, ... for them in SWITCH. What leaves
// a host goes at RATE and arrives DELAY later, unless it is lost, or the queue is full. What comes
// goes at once: it was delayed where it left. Says "ready", then the packets lost and dropped when
// its stdin ends. Who loses what depends on the program's seed, which is always the same.
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>

#include <deque>
#include <iostream>
#include <random>
#include <span>

#include "base/deadline.h"
#include "base/fd.h"
#include "cpp/harness.h"

namespace ringcomm::testing {
namespace {

using Seconds = std::chrono::duration<double>;
constexpr int kBurst = 64;  // packets that are read from one device before the others' turn

struct Packet {
  Clock::time_point arrives;
  std::vector<std::byte> bytes;
};

struct Path {
  Fd host, port;
  Clock::time_point busy;  // until then the link sends its queue
  std::deque<Packet> under_way;
};

struct Link {
  double bytes_per_second;
  Clock::duration delay, queue;
  double loss;
};

// A device that is a file here and a network card there.
Fd make_device(const std::string& space, const std::string& name, const std::string& mtu) {
  const Fd home(::open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC));
  const Fd there(::open(str("/run/netns/", space).c_str(), O_RDONLY | O_CLOEXEC));
  if (!there || ::setns(there.get(), CLONE_NEWNET) != 0) throw SystemError("namespace " + space);
  Fd device(::open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC));
  ifreq request{};
  request.ifr_flags = IFF_TAP | IFF_NO_PI;
  name.copy(request.ifr_name, IFNAMSIZ - 1);
  const bool made = device && ::ioctl(device.get(), TUNSETIFF, &request) == 0;
  const int error = errno;
  const std::string set = str("ip link set ", name, " mtu ", mtu, " txqueuelen 5000");
  const bool is_set = made && std::system(set.c_str()) == 0;
  if (::setns(home.get(), CLONE_NEWNET) != 0) throw SystemError("namespace of this process");
  if (!made) throw SystemError("/dev/net/tun", error);
  require(is_set, set, " failed");
  return device;
}

class Wan {
 public:
  Wan(const Link& link, std::vector<Path> paths) : link_(link), paths_(std::move(paths)) {}

  void run() {
    std::vector<pollfd> polled = {{0, POLLIN, 0}};
    for (const Path& path : paths_) {
      polled.push_back({path.host.get(), POLLIN, 0});
      polled.push_back({path.port.get(), POLLIN, 0});
    }
    std::cout << "ready" << std::endl;
    while ((polled[0].revents & (POLLIN | POLLHUP)) == 0) {
      const timespec pause = deliver(Clock::now());
      if (::ppoll(polled.data(), polled.size(), &pause, nullptr) < 0 && errno != EINTR) return;
      for (size_t i = 0; i < paths_.size(); ++i) {
        if ((polled[2 * i + 1].revents & POLLIN) != 0) send(paths_[i]);
        if ((polled[2 * i + 2].revents & POLLIN) != 0) receive(paths_[i]);
      }
    }
    std::cout << lost_ << " lost, " << dropped_ << " dropped" << std::endl;
  }

 private:
  // Returns how long nothing arrives after that.
  timespec deliver(Clock::time_point now) {
    Clock::duration next = std::chrono::seconds(1);
    for (Path& path : paths_) {
      while (!path.under_way.empty() && path.under_way.front().arrives <= now) {
        write(path.port, path.under_way.front().bytes);
        path.under_way.pop_front();
      }
      if (path.under_way.empty()) continue;
      next = std::min(next, path.under_way.front().arrives - now);
    }
    const auto ns = std::chrono::nanoseconds(next).count();
    return {ns / 1'000'000'000, ns % 1'000'000'000};
  }

  void send(Path& path) {
    for (int i = 0; i < kBurst; ++i) {
      const std::span<const std::byte> packet = read(path.host);
      if (packet.empty()) return;
      const auto now = Clock::now(), begin = std::max(path.busy, now);
      if (begin - now > link_.queue) {
        ++dropped_;
        continue;
      }
      const Seconds takes(static_cast<double>(packet.size()) / link_.bytes_per_second);
      path.busy = begin + std::chrono::duration_cast<Clock::duration>(takes);
      if (chance_(random_) < link_.loss) {
        ++lost_;
      } else {
        path.under_way.push_back({path.busy + link_.delay, {packet.begin(), packet.end()}});
      }
    }
  }

  void receive(const Path& path) {
    for (int i = 0; i < kBurst; ++i) {
      const std::span<const std::byte> packet = read(path.port);
      if (packet.empty()) return;
      write(path.host, packet);
    }
  }

  std::span<const std::byte> read(const Fd& device) {
    const ssize_t got = ::read(device.get(), buffer_.data(), buffer_.size());
    return {buffer_.data(), got > 0 ? static_cast<size_t>(got) : 0};
  }
  void write(const Fd& device, std::span<const std::byte> packet) {
    if (::write(device.get(), packet.data(), packet.size()) < 0) ++dropped_;  // it is down
  }

  const Link link_;
  std::vector<Path> paths_;
  std::vector<std::byte> buffer_ = std::vector<std::byte>(65536);
  std::mt19937_64 random_;
  std::uniform_real_distribution<double> chance_{0, 1};
  uint64_t lost_ = 0, dropped_ = 0;
};

Clock::duration milliseconds(const char* text) {
  return std::chrono::duration_cast<Clock::duration>(Seconds(std::stod(text) / 1e3));
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  using namespace ringcomm::testing;
  if (argc < 8) return 2;
  try {
    ::prctl(PR_SET_TIMERSLACK, 1000);
    std::vector<Path> paths;
    for (int i = 7; i < argc; ++i) {
      paths.push_back({make_device(argv[i], "eth0", argv[5]),
                       make_device(argv[6], ringcomm::str("port", i - 7), argv[5]),
                       {},
                       {}});
    }
    Wan({std::stod(argv[1]) * 1e6 / 8, milliseconds(argv[2]), milliseconds(argv[4]),
         std::stod(argv[3]) / 100},
        std::move(paths))
        .run();
  } catch (const std::exception& error) {
    std::cerr << "wan: " << error.what() << '\n';
    return 1;
  }
  return 0;
}
