// Times each layer between a socket and a group by itself: two processes exchange
// messages, and one of them obeys stdin.
//
//   net_ladder SPIN_US [NAMESPACE0 NAMESPACE1]    over loopback, or each in its network namespace
//
// A line "RUNG PATTERN BYTES CALLS" is answered with the median seconds of a call, and the seconds
// of user and of system time that both processes spent on all calls together.
//
// Rungs: blocking, socket, session (numbers, frames, acknowledgements; no checksum of payloads),
// checksum, network (its thread, the lock, epoll). All but the first wait alike: they poll for
// SPIN_US, then sleep. `ping`: half of there and back. `stream`: there, again and
// again, and one word back at the end. `connect` (socket, handshake, network): until the first
// answer, with a new connection each time.
#include "net_ladder.h"

#include <fcntl.h>
#include <ifaddrs.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <iostream>

namespace ringcomm::testing {
namespace {

// ---- patterns

struct Usage {
  double user = 0, system = 0;
  static Usage now() {
    rusage usage{};
    ::getrusage(RUSAGE_SELF, &usage);
    const auto of = [](const timeval& time) {
      return static_cast<double>(time.tv_sec) + 1e-6 * static_cast<double>(time.tv_usec);
    };
    return {of(usage.ru_utime), of(usage.ru_stime)};
  }
};

struct Order {
  std::string rung, pattern;
  size_t bytes = 0;
  int calls = 0;
};

using Times = std::vector<double>;

void there_and_back(Rung& rung, int rank, size_t bytes, size_t back) {
  if (rank == 0) rung.send(bytes);
  rung.receive(rank == 0 ? back : bytes);
  if (rank == 1) rung.send(back);
}

// Both ways once, with bytes that are this order's.
void verify(Rung& rung, const Order& order, int rank) {
  const auto value = [&](int sender, size_t i) {
    return static_cast<std::byte>((i * 31 + i / 251 + order.bytes + static_cast<size_t>(sender)));
  };
  for (size_t i = 0; i < rung.out.size(); ++i) rung.out[i] = value(rank, i);
  there_and_back(rung, rank, order.bytes, order.bytes);
  for (size_t i = 0; i < rung.in.size(); ++i) {
    require(rung.in[i] == value(1 - rank, i), order.rung, ": byte ", i, " came wrong");
  }
}

Times ping(Rung& rung, const Order& order, int rank) {
  Times times;
  for (int i = 0; i < order.calls; ++i) {
    const auto began = Clock::now();
    there_and_back(rung, rank, order.bytes, order.bytes);
    times.push_back(seconds(Clock::now() - began) / 2);
  }
  return times;
}

Times stream(Rung& rung, const Order& order, int rank) {
  const auto began = Clock::now();
  for (int i = 1; i < order.calls; ++i) {
    rank == 0 ? rung.send(order.bytes) : rung.receive(order.bytes);
  }
  there_and_back(rung, rank, order.bytes, 1);
  return {seconds(Clock::now() - began) / order.calls};
}

// ---- connect

struct Nobody final : Party {
  const Key& key() const override { return key_; }
  int flows() const override { return 1; }
  uint64_t generation(int /*flow*/) const override { return 0; }
  Cursor fence(int /*flow*/) override { return {}; }
  Key key_{};
};

void shake_hands(const Fd& socket, Waiter& waiter, int rank) {
  Nobody party;
  const ProcessId self = {static_cast<uint64_t>(rank)}, peer = {static_cast<uint64_t>(1 - rank)};
  Handshake handshake = rank == 0 ? Handshake(self, peer, 0, party) : Handshake(self);
  const auto say = [&] {
    const auto reply = handshake.output();
    send_all(socket, waiter, reply.data(), reply.size());
  };
  say();
  while (!handshake.done()) {
    std::byte message[Handshake::kMostBytes];
    receive_all(socket, waiter, message, handshake.wanted());
    const bool hello = rank == 1 && !handshake.caller();
    handshake.take(message);
    if (hello) handshake.with(party);
    say();
  }
}

double connect_socket(Place& place, const Meeting& meeting, bool handshake) {
  const auto began = Clock::now();
  const Fd socket = meeting.connect();
  Waiter waiter(socket, place.patience());
  std::byte word{};
  if (handshake) {
    shake_hands(socket, waiter, place.rank);
  } else if (place.rank == 0) {
    send_all(socket, waiter, &word, 1);
    receive_all(socket, waiter, &word, 1);
  } else {
    receive_all(socket, waiter, &word, 1);
    send_all(socket, waiter, &word, 1);
  }
  const double took = seconds(Clock::now() - began);
  place.control.meet();
  return took;
}

Times connect(Place& place, const Order& order) {
  Times times;
  std::optional<Meeting> meeting;
  if (order.rung != "network") meeting.emplace(place);
  for (int i = 0; i < order.calls; ++i) {
    if (meeting) {
      times.push_back(connect_socket(place, *meeting, order.rung == "handshake"));
      continue;
    }
    NetworkRung rung(place, 1);
    const auto began = Clock::now();
    there_and_back(rung, place.rank, 1, 1);
    times.push_back(seconds(Clock::now() - began));
    place.control.meet();
  }
  return times;
}

// ---- the two processes

struct Answer {
  double median = 0, user = 0, system = 0;
};

// To a core of one's own; the kernel is free to move us from there. Waking up, both may find
// themselves on one core and stay together for a while.
void spread(int rank) {
  cpu_set_t all, own;
  if (::sched_getaffinity(0, sizeof all, &all) != 0) throw SystemError("sched_getaffinity");
  int skip = rank % CPU_COUNT(&all), core = 0;
  while (!CPU_ISSET(core, &all) || skip-- > 0) ++core;
  CPU_ZERO(&own);
  CPU_SET(core, &own);
  ::sched_setaffinity(0, sizeof own, &own);
  ::sched_setaffinity(0, sizeof all, &all);
}

Answer obey(const Order& order, Place& place) {
  spread(place.rank);
  Times times;
  Usage before = Usage::now();
  if (order.pattern == "connect") {
    times = connect(place, order);
  } else {
    require(order.pattern == "ping" || order.pattern == "stream", "no pattern ", order.pattern);
    const auto rung = make_rung(order.rung, place, order.bytes);
    verify(*rung, order, place.rank);
    before = Usage::now();
    times = (order.pattern == "ping" ? ping : stream)(*rung, order, place.rank);
    place.control.meet();  // the first to close could cut off the other
  }
  const Usage after = Usage::now();
  std::sort(times.begin(), times.end());
  return {times[times.size() / 2], after.user - before.user, after.system - before.system};
}

Order parse(const std::string& line) {
  Order order;
  std::istringstream in(line);
  in >> order.rung >> order.pattern >> order.bytes >> order.calls;
  require(!in.fail() && order.calls > 0 && order.bytes > 0, "RUNG PATTERN BYTES CALLS, not ", line);
  return order;
}

void lead(Place& place) {
  for (std::string line; std::getline(std::cin, line);) {
    const Order order = parse(line);
    place.control.say(line);
    const Answer answer = obey(order, place);
    double user = 0, system = 0;
    std::istringstream(place.control.hear()) >> user >> system;
    std::cout << answer.median << ' ' << answer.user + user << ' ' << answer.system + system
              << std::endl;
  }
  place.control.say("");
}

void follow(Place& place) {
  for (std::string line = place.control.hear(); !line.empty(); line = place.control.hear()) {
    const Answer answer = obey(parse(line), place);
    place.control.say(str(answer.user, ' ', answer.system));
  }
}

void enter(const char* name) {
  const Fd space(::open(str("/run/netns/", name).c_str(), O_RDONLY | O_CLOEXEC));
  if (!space || ::setns(space.get(), CLONE_NEWNET) != 0) throw SystemError(str("netns ", name));
}

// The first IPv4 address of an interface.
Address address_of(const std::string& name) {
  ifaddrs* list = nullptr;
  require(::getifaddrs(&list) == 0, "getifaddrs");
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(list, &::freeifaddrs);
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr != nullptr && entry->ifa_addr->sa_family == AF_INET &&
        name == entry->ifa_name) {
      return Address(entry->ifa_addr);
    }
  }
  throw Failure("no address of " + name);
}

int be(int rank, Fd socket, int argc, char** argv) {
  try {
    const bool alone = argc < 4;
    if (!alone) enter(argv[2 + rank]);
    const Address address = address_of(alone ? "lo" : "eth0");
    Control control(std::move(socket));
    Place place{rank, control, std::chrono::microseconds(std::stoi(argv[1])), address, alone};
    rank == 0 ? lead(place) : follow(place);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "net_ladder, process %d: %s\n", rank, error.what());
    return 1;
  }
  return 0;
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  using namespace ringcomm;
  if (argc != 2 && argc != 4) {
    std::fprintf(stderr, "net_ladder SPIN_US [NAMESPACE0 NAMESPACE1]\n");
    return 2;
  }
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) return 1;
  Fd first(ends[0]), second(ends[1]);
  const pid_t child = ::fork();
  if (child < 0) return 1;
  if (child == 0) {
    first.reset();
    return testing::be(1, std::move(second), argc, argv);
  }
  second.reset();
  const int status = testing::be(0, std::move(first), argc, argv);
  int other = 0;
  ::waitpid(child, &other, 0);
  return status != 0 || other != 0 ? 1 : 0;
}
