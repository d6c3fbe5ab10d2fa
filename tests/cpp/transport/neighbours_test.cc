// Processes of a host and all their groups, and groups that meet through the store when something
// is wrong.
#include "transport/neighbours.h"

#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include <csignal>
#include <filesystem>

#include "cpp/processes.h"
#include "meeting.h"
#include "transport/roster.h"

// How often this program looks at sockets: these stand in front of the C library's.
namespace {
std::atomic<int> looks{0}, yields{0};
std::function<int(int socket)> before_send = [](int) { return 0; };  // its error, or 0
}  // namespace
extern "C" ssize_t sendmsg(int socket, const msghdr* message, int flags) {
  if (const int error = before_send(socket)) return errno = error, -1;
  return ::syscall(SYS_sendmsg, socket, message, flags);
}
extern "C" int sched_yield() noexcept {
  ++yields;
  return static_cast<int>(::syscall(SYS_sched_yield));
}
extern "C" int epoll_wait(int epoll, epoll_event* events, int most, int timeout) {
  ++looks;
  return static_cast<int>(
      ::syscall(SYS_epoll_pwait, epoll, events, most, timeout, nullptr, sizeof(uint64_t)));
}
extern "C" ssize_t recv(int socket, void* data, size_t bytes, int flags) {
  ++looks;
  return ::recvfrom(socket, data, bytes, flags, nullptr, nullptr);
}

namespace ringcomm::testing {
namespace {

int system_calls() { return looks.load(); }

int open_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<int>(std::distance(begin(all), end(all)));
}

// Many groups of the same processes need no more descriptors than one, and no more system calls to
// see who lives. A group that ends takes none of the others with it; a death is known to all.
void many_groups() {
  SharedStore store;
  const int size = 8, groups = 40;
  const auto statuses = run_processes(size, [&](Rank rank) {
    Process process;
    const int before = open_descriptors();
    std::vector<std::unique_ptr<Group>> all;
    const auto make = [&] {
      all.push_back(std::make_unique<Group>(process, store, options_of(rank, size),
                                            std::chrono::seconds(60)));
    };
    make();
    const int first = open_descriptors();
    require(first - before <= size - 1 + 4, first - before, " descriptors for the first group");
    while (all.size() < groups) make();
    require(open_descriptors() <= first, open_descriptors(), " descriptors, ", first, " at first");
    const auto meet_all = [&](Transport& t, int lane, uint64_t count) {
      for (Rank peer = 0; peer < size; ++peer) {
        if (peer != rank) t.signal(peer, lane, 0, 0);
      }
      for (Rank peer = 0; peer < size; ++peer) {
        if (peer != rank) await_signal(t, peer, lane, 0, count);
      }
    };
    for (const auto& group : all) meet_all(*group->transport, 0, 1);

    all[1]->transport->leave();
    Transport& t = *all[0]->transport;
    meet_all(t, 1, 1);
    for (Rank peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      require(all[1]->transport->connection_lost(peer), "rank ", peer, " has left this one");
      require(!t.connection_lost(peer), "rank ", peer, " has not left this one");
    }
    const int asked = system_calls();
    for (int look = 0; look < 20; ++look) {
      ::usleep(1500);
      for (Rank peer = 0; peer < size; ++peer) t.connection_lost(peer);
    }
    require(system_calls() - asked <= 20, system_calls() - asked, " calls for 20 looks");

    meet_all(t, 0, 2);
    if (rank == 0) ::kill(::getpid(), SIGKILL);
    for (const auto& group : all) {
      await(*group->transport, [&] { return group->transport->connection_lost(0); });
      require(&group == &all[1] || !group->transport->state(0, Board::kHost).left, "no goodbye");
    }
  });
  for (Rank rank = 1; rank < size; ++rank) {
    require(statuses[static_cast<size_t>(rank)] == 0, "rank ", rank);
  }
}

// Threads of the same processes make groups at once, each rank in an order of its own.
void at_once() {
  SharedStore store;
  const int size = 3, groups = 6;
  require_all_zero(run_processes(size, [&](Rank rank) {
    Process process;
    run_threads(groups, [&](int thread) {
      Random random(static_cast<uint64_t>(rank * groups + thread));
      for (int round = 0; round < 5; ++round) {
        ::usleep(static_cast<useconds_t>(random.below(3000)));
        const Rank turned = (rank + thread) % size;  // another numbering in each group
        Group group(process, store, options_of(turned, size, str("group", thread)),
                    std::chrono::seconds(20));
        Transport& t = *group.transport;
        const Rank to = (turned + 1) % size, from = (turned + size - 1) % size;
        const auto word = static_cast<uint64_t>(thread * 100 + round);
        t.signal(to, 0, 0, word);
        await_signal(t, from, 0, 0, 1);
        require(t.stamp(from, 0, 0) == word, "of another group");
        t.signal(from, 1, 0, word);
        await_signal(t, to, 1, 0, 1);
      }
    });
  }));
}

// Many have connected and said their names before the listener looks: none is a stranger.
void all_come_at_once() {
  std::vector<std::unique_ptr<Process>> all;
  for (int i = 0; i < 110; ++i) all.push_back(std::make_unique<Process>());
  const auto name_of = [](const auto& process) { return process->neighbours.card().socket; };
  std::ranges::sort(all, {}, name_of);  // the lower one connects
  const auto listener = std::move(all.back());
  all.pop_back();
  const std::string name = name_of(listener);
  for (const auto& other : all) other->neighbours.reach(name);
  listener->neighbours.wait({}, 0);
  for (const auto& other : all) {
    other->neighbours.wait({}, 0);
    const auto reached = other->neighbours.reach(name);
    require(reached.neighbour && reached.apart.empty(), "refused: ", reached.apart);
    require(listener->neighbours.reach(name_of(other)).neighbour != nullptr, "it does not know it");
  }
}

// A rank has the other's memory when it loses the connection, before it has sent its own. It rings
// the doorbell that came over the next connection: the first one is unmapped.
void another_connection() {
  SharedStore store;
  require_all_zero(run_processes(2, [&](Rank rank) {
    Process process;
    store.set(str("name", rank), process.neighbours.card().socket);
    while (!store.has(str("name", 1 - rank))) ::usleep(1000);
    const bool connects = store.get(str("name", rank)) < store.get(str("name", 1 - rank));
    int sent = 0, left = 3;
    before_send = [&](int socket) {
      ++sent;  // the greeting, then the memory
      if (!connects && sent == 2) store.set("sent", "");
      if (!connects || sent == 1) return 0;
      if (left < 0) {
        for (int i = 0; i < 1000; ++i) {  // so that nothing is mapped in its place
          ::mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        }
        return 0;
      }
      if (!store.has("sent") || left-- > 0) return EAGAIN;
      ::shutdown(socket, SHUT_RDWR);
      return EPIPE;
    };
    Group group(process, store, options_of(rank, 2), std::chrono::seconds(20));
    require(!connects || left < 0, "the connection was not lost");
    group.transport->signal(1 - rank, 0, 0, 0);
    await_signal(*group.transport, 1 - rank, 0, 0, 1);
    group.transport->signal(1 - rank, 1, 0, 0);
    await_signal(*group.transport, 1 - rank, 1, 0, 1);
  }));
}

// A forked child keeps nothing open that would make its parent look alive, or harm it.
void forked_children() {
  SharedStore store;
  const int size = 2;
  const auto statuses = run_processes(size, [&](Rank rank) {
    Process process;
    Group group(process, store, options_of(rank, size), std::chrono::seconds(20));
    Transport& t = *group.transport;
    if (rank == 1) {
      await(t, [&] { return t.connection_lost(0); });
      return;
    }
    process.neighbours.before_fork();
    const pid_t child = ::fork();
    if (child == 0) {
      process.neighbours.forked();
      t.forget();
      ::alarm(20);
      while (!store.has("end")) ::usleep(1000);
      ::_exit(0);
    }
    process.neighbours.after_fork();
    require(!t.connection_lost(1), "it lives");
    ::kill(::getpid(), SIGKILL);
  });
  store.set("end", "now");
  require(statuses[1] == 0, "status ", statuses[1]);
}

// Returns once no more descriptors are closed: a meeting's may be, a little after it.
void await_closed_descriptors() {
  for (int before = 0, now = open_descriptors(); now != before; now = open_descriptors()) {
    before = now;
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
}

// A rank that runs out of descriptors says so, and the others say it of that rank: none is taken
// for dead, and either all have the group or none.
void no_descriptors(Rank victim, bool acquainted) {
  bool lacked = false;  // under load a descriptor may close just after it was counted
  for (int left = 0; left <= (acquainted ? 3 : 8); ++left) {
    SharedStore store;
    const int size = 3;
    for (const int status : run_processes(size, [&](Rank rank) {
           Process process;
           std::vector<std::unique_ptr<Group>> groups;
           const auto make = [&] {
             groups.push_back(std::make_unique<Group>(process, store, options_of(rank, size),
                                                      std::chrono::seconds(20)));
           };
           if (acquainted) make();
           if (rank == victim) {
             await_closed_descriptors();
             const rlimit few{256, 4096};
             require(::setrlimit(RLIMIT_NOFILE, &few) == 0, "setrlimit");
             int last = 0;  // the limit is one of numbers: fill the gaps, too
             for (int next = 0; (next = ::dup(0)) >= 0;) last = next;
             for (int i = 0; i < left; ++i) ::close(last - i);
           }
           const Deadline clock(std::chrono::hours(1));
           std::string text;
           try {
             make();
           } catch (const SystemError& error) {
             require(rank == victim && error.code() == EMFILE, error.what());
             text = error.what();
           } catch (const PeerError& error) {
             text = error.what();
             require(rank != victim && error.rank() == victim, text);
             require(text.find(str("rank ", victim, " failed: ")) == 0, text);
           }
           store.add(text.empty() ? "made" : "failed", 1);
           if (text.empty()) return;
           require(text.find("Too many open files") != std::string::npos &&
                       text.find("ulimit -n") != std::string::npos,
                   text);
           require(clock.elapsed_seconds() < 5 * slack(), "took ", clock.elapsed_seconds(), " s");
         })) {
      require(status == 0, left, " left: status ", status);
    }
    const int64_t failed = store.add("failed", 0);
    require(failed == 0 || failed == size, left, " left: ", failed, " failed");
    lacked = lacked || failed == size;
  }
  require(lacked, "none needs a descriptor");
}

// Those that were in a meeting that failed try again, and meet the late rank then, whenever it
// comes.
void once_more(Rank late, bool retries_first) {
  LocalStore store;
  const int size = 4;
  run_threads(size, [&](Rank rank) {
    if (rank == late) return;
    try {
      End end(store, rank, size, std::chrono::seconds(2));
    } catch (const TimeoutError& error) {
      const std::string text = error.what();
      return require(text.find(str("rank ", late, " of 4")) != std::string::npos, text);
    } catch (const PeerError&) {
      return;  // of one that gave up a moment before
    }
    throw Failure("there is no error");
  });
  std::atomic<int> there{0};
  run_threads(size, [&](Rank rank) {
    const int before = retries_first ? size - 1 : 1;
    if ((rank == late) == retries_first) {
      while (there < before) ::usleep(1000);
      ::usleep(10000);
    }
    ++there;
    End end(store, rank, size);
  });
}

// The words between ranks are the same in every locale of the program.
void any_locale() {
  struct Groups : std::numpunct<char> {
    char do_thousands_sep() const override { return ' '; }
    std::string do_grouping() const override { return "\1"; }
  };
  const std::locale before = std::locale::global({std::locale::classic(), new Groups});
  const std::string text = str(40000), word = make_card().to_text();
  std::string again;
  try {
    again = Card::from_text(word, 0).to_text();
  } catch (const PeerError& error) {
    again = error.what();
  }
  std::locale::global(before);
  require(text == "40000", text);
  require(again == word, word, " becomes ", again);
}

// Unknown equals nothing; a user and a network namespace are a host's.
void hosts() {
  const Card here = make_card();
  const auto like = [&](const std::function<void(Card&)>& change) {
    Card other = here;
    change(other);
    return other;
  };
  const Card other_boot = like([](Card& c) { c.boot_id = "another"; });
  const Card no_boot = like([](Card& c) { c.boot_id = Card::kUnknown; });
  const Card other_net = like([](Card& c) { c.network = "4:1"; });
  const Card no_net = like([](Card& c) { c.network = Card::kUnknown; });
  const Card other_user = like([](Card& c) { ++c.user; });
  const Card tcp = like([](Card& c) { c.tcp = true; });
  require(here.shares_host(like([](Card& c) { c.pid = 1; })), "it is the same");
  for (const Card& other : {other_boot, no_boot, other_net, no_net, other_user, tcp}) {
    require(!here.shares_host(other) && !other.shares_host(here), "it is another");
  }
  require(!no_boot.shares_host(no_boot) && !no_net.shares_host(no_net), "unknown equals nothing");
  for (const Card& other : {no_boot, no_net, other_user, tcp}) {
    require(here.may_share_network(other), "loopback may lead there");
  }
  require(!here.may_share_network(other_boot) && !here.may_share_network(other_net), "elsewhere");
  require(why_apart({here, other_boot}, 0, 1).empty(), "no surprise");
  require(why_apart({here, no_boot}, 0, 1).find("rank 1 cannot read") == 0, "boot id");
  require(why_apart({here, other_user}, 0, 1).find("runs as user") != std::string::npos, "user");
}

// Where the awaited rank is on this very core, it gets the core at once, for as long as that lasts.
void a_shared_core() {
  bool shared = false;
  Patience patience(SpinPolicy{std::chrono::nanoseconds(0), 4, 64}, [&] { return shared; });
  const auto polls_until_it_yields = [&] {
    int polls = 0;
    for (const int before = yields; yields == before; ++polls) patience.again();
    patience.reset();
    return polls;
  };
  require(polls_until_it_yields() == 65, "the rank may be about to come on its own core");
  shared = true;
  require(polls_until_it_yields() == 65, "nobody knew");
  for (int wait = 0; wait < 3; ++wait) {
    require(polls_until_it_yields() == 5, "nothing comes before the core is free");
  }
  shared = false;
  require(polls_until_it_yields() == 5, "that is found out in a wait");
  require(polls_until_it_yields() == 65, "it is on its own core again");
}

// A spin is half as long after one in vain, and twice as long where the news came soon after it.
void lengths_of_spins() {
  constexpr auto kSpin = std::chrono::microseconds(400), kNone = std::chrono::microseconds(0);
  SpinPolicy policy{kSpin, 0, 0};
  policy.least_spin = kSpin / 64;
  Patience patience(policy);
  const auto spin = [&](std::chrono::microseconds sleep) -> Clock::duration {
    const auto start = Clock::now();
    while (patience.again()) {
    }
    const auto spun = Clock::now() - start;
    if (sleep > kNone) std::this_thread::sleep_for(sleep);
    patience.reset();
    return spun;
  };
  require(spin(10 * kSpin) >= kSpin, "it has not been in vain yet");
  Clock::duration shortest = kSpin, longest = kNone;
  for (int wait = 0; wait < 10; ++wait) shortest = std::min(shortest, spin(10 * kSpin));
  require(shortest < kSpin / 2, "it has been in vain");
  for (int wait = 0; wait < 20; ++wait) longest = std::max(longest, spin(kNone));
  require(longest >= kSpin, "a little longer would have been enough each time");
}

// Rank 0 tells the others who is where: by its roster.
void roster() {
  std::vector<Card> cards(5, make_card());
  for (size_t rank = 0; rank < cards.size(); ++rank) cards[rank].pid = 700 - int64_t(rank) * 90;
  cards[1].boot_id = cards[2].boot_id = "elsewhere";
  cards[1].host = cards[2].host = "node1";
  Roster told;
  told.group_id = 7;
  told.find_hosts(cards, {});
  const Roster heard = Roster::from_text(told.to_text(), 5);
  require(heard.host_of == std::vector{0, 1, 1, 0, 0} && heard.hosts() == 2, "the hosts");
  require(heard.ranks_beside(4) == 3 && heard.most_ranks() == 3, "how many they are");
  require(heard.text(2) == "pid 520 on node1" && heard.pids[4] == 340, heard.text(2));
  const auto refused = [](const std::string& text) {
    try {
      return Roster::from_text(text, 5).hosts() == 0;
    } catch (const PeerError&) {
      return true;
    }
  };
  std::string text = told.to_text();
  while (text.find(' ') != std::string::npos) {
    text.resize(text.rfind(' '));
    require(refused(text), "a part of a roster is taken: ", text);
  }
}

std::vector<Check> all_checks() {
  std::vector<Check> checks;
  checks.push_back({"hosts", hosts});
  checks.push_back({"roster", roster});
  checks.push_back({"a shared core", a_shared_core});
  checks.push_back({"lengths of spins", lengths_of_spins});
  checks.push_back({"any_locale", any_locale});
  checks.push_back({"many_groups/processes", many_groups});
  checks.push_back({"at_once/processes", at_once});
  checks.push_back({"all_come_at_once", all_come_at_once});
  checks.push_back({"another_connection/processes", another_connection});
  checks.push_back({"forked_children/processes", forked_children});
  for (const Rank late : {0, 3}) {
    checks.push_back({str("once_more/first/", late), [=] { once_more(late, false); }});
    checks.push_back({str("once_more/retried/", late), [=] { once_more(late, true); }});
  }
  for (const Rank victim : {0, 1, 2}) {
    checks.push_back(
        {str("no_descriptors/first/", victim), [=] { no_descriptors(victim, false); }});
    checks.push_back({str("no_descriptors/later/", victim), [=] { no_descriptors(victim, true); }});
  }
  return checks;
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  return ringcomm::testing::run_checks(ringcomm::testing::all_checks(), argc, argv);
}
