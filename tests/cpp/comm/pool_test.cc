// Several workers: they drive side by side, each another group, and no thread of theirs stays awake
// for nothing. Ranks are threads of one process, which share its workers.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <future>

#include "comm/communicator.h"
#include "cpp/world.h"

namespace ringcomm::testing {
namespace {

using Members = std::vector<std::shared_ptr<Communicator>>;
using Error = const std::exception_ptr&;

constexpr auto kHang = std::chrono::seconds(60);

struct Sum {
  explicit Sum(size_t elements = 1000) : data(elements, 1) {}
  Operation operation() {
    Operation what;
    what.collective = Collective::kAllReduce;
    what.dtype = DType::kInt32;
    what.bytes = 4 * data.size();
    what.input = {{reinterpret_cast<std::byte*>(data.data()), what.bytes}};
    what.output = what.input;
    return what;
  }
  std::vector<int32_t> data;
};

void await(std::promise<void>& event, const std::string& what) {
  require(event.get_future().wait_for(kHang) == std::future_status::ready, what, " hangs");
}

// The groups of both ranks, made one after the other: [rank][group].
template <typename Kind = Transport>
struct Pair {
  explicit Pair(size_t count) {
    for (size_t i = 0; i < count; ++i) {
      worlds.push_back(std::make_unique<World>(2, tiny(2)));
      for (const Rank rank : {0, 1}) of[rank].push_back(worlds.back()->join<Kind>(rank));
    }
  }
  ~Pair() {
    for (size_t i = 0; i < worlds.size(); ++i) {
      std::thread other([&] { of[1][i]->shutdown(); });
      of[0][i]->shutdown();
      other.join();
    }
  }
  std::vector<std::unique_ptr<World>> worlds;
  Members of[2];
};

// ---- side by side

// How many threads are in signal() at once: of all groups, and of one rank of one.
struct Crowd {
  std::atomic<int> now{0}, most{0};  // partners: each other's threads
  void come() {
    const int here = 1 + now.fetch_add(1);
    for (int seen = most; seen < here && !most.compare_exchange_weak(seen, here);) {
    }
  }
  void go() { now.fetch_sub(1); }
};
Crowd all;

// Its steps take as long as those of long messages do.
class SlowTransport final : public Transport {
 public:
  using Transport::Transport;
  void signal(Rank to, int lane, int half, uint64_t stamp) override {
    all.come();
    own_.come();
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    Transport::signal(to, lane, half, stamp);
    own_.go();
    all.go();
    if (own_.most > 1) std::terminate();  // two threads drive one group
  }

 private:
  Crowd own_;
};

// So many workers drive, no more, and never two of them one group. The callbacks of a group come in
// order and one at a time.
void side_by_side(int workers) {
  Workers::get().set_most(workers);
  all.most = 0;
  Pair<SlowTransport> pair(6);
  const Deadline hang(kHang);
  for (int round = 0; round < 5 || (all.most < workers && !hang.passed()); ++round) {
    std::atomic<int> left{0};
    std::promise<void> over;
    std::vector<std::unique_ptr<Sum>> sums;
    std::atomic<int> next[2][6] = {};
    std::atomic<bool> inside[2][6] = {}, wrong{false};
    constexpr int kCalls = 5;
    left = 2 * 6 * kCalls;
    for (int call = 0; call < kCalls; ++call) {
      for (size_t i = 0; i < 6; ++i) {
        for (const Rank rank : {0, 1}) {
          sums.push_back(std::make_unique<Sum>());
          pair.of[rank][i]->host().submit(
              sums.back()->operation(), [&, rank, i, call](Error error) {
                wrong = wrong || error || inside[rank][i].exchange(true);
                wrong = wrong || next[rank][i]++ != call;
                if (call == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
                inside[rank][i] = false;
                if (--left == 0) over.set_value();
              });
        }
      }
    }
    await(over, "a round");
    require(!wrong, "callbacks out of order, beside one another, or with an error");
    for (const auto& sum : sums) require(sum->data.back() == 2, "sum ", sum->data.back());
  }
  require(all.most == workers, all.most, " drove at once, not ", workers);
}

// ---- without a free worker

// The only worker is in code that blocks and does not step down. The ranks wait in different
// orders, so each must move the operation that the other one waits for.
void waits_help() {
  Workers::get().set_most(1);
  Pair<> busy(1), pair(10);
  std::promise<void> held, release;
  Sum mine, theirs;
  busy.of[0][0]->host().submit(mine.operation(), [&](Error) {
    held.set_value();
    release.get_future().wait_for(kHang);
  });
  busy.of[1][0]->host().submit(theirs.operation());
  await(held, "the worker");
  std::atomic<int> called{0};
  run_threads(2, [&](Rank rank) {
    std::vector<Sum> sums(10);
    std::vector<TaskPtr> tasks(10);
    const auto at = [&](size_t i) { return rank == 0 ? i : 9 - i; };
    for (size_t i = 0; i < 10; ++i) {
      tasks[at(i)] =
          pair.of[rank][at(i)]->host().submit(sums[at(i)].operation(), [&](Error) { ++called; });
    }
    for (size_t i = 0; i < 10; ++i) {
      require(pair.of[rank][at(i)]->wait(*tasks[at(i)], kHang), "rank ", rank, " hangs at ", i);
      require(sums[at(i)].data[0] == 2, "sum ", sums[at(i)].data[0]);
    }
  });
  release.set_value();
  require(called == 20, called, " callbacks");
}

// A thread that waits moves another group, whose callback is not its own to run: that may block.
void callbacks_stay_out_of_waits() {
  Workers::get().set_most(1);
  Pair<> busy(1), pair(2);
  std::promise<void> held, release, called;
  Sum mine, theirs;
  busy.of[0][0]->host().submit(mine.operation(), [&](Error) {
    held.set_value();
    release.get_future().wait_for(kHang);
  });
  busy.of[1][0]->host().submit(theirs.operation());
  await(held, "the worker");
  std::thread::id caller;
  Sum first[2], second[2];
  pair.of[0][1]->host().submit(second[0].operation(), [&](Error) {
    caller = std::this_thread::get_id();
    called.set_value();
  });
  const TaskPtr last = pair.of[1][1]->host().submit(second[1].operation());
  const TaskPtr awaited = pair.of[0][0]->host().submit(first[0].operation());
  std::thread other([&] {
    require(pair.of[1][1]->wait(*last, kHang), "nobody moves rank 0's side");
    const TaskPtr task = pair.of[1][0]->host().submit(first[1].operation());
    require(pair.of[1][0]->wait(*task, kHang), "the first group hangs");
  });
  require(pair.of[0][0]->wait(*awaited, kHang), "the wait hangs");
  other.join();
  require(caller == std::thread::id(), "a callback in another group's wait");
  release.set_value();
  await(called, "the callback");
  require(caller != std::this_thread::get_id(), "a callback on the waiting thread");
}

// A callback that blocks, as the user's do, holds up no other group.
void blocked_callback(int workers) {
  Workers::get().set_most(workers);
  Pair<> pair(4);
  std::promise<void> release, back, over;
  Sum outer[2];
  pair.of[0][0]->host().submit(outer[0].operation(), [&](Error) {
    Progress::call_out([&] { release.get_future().wait_for(kHang); });
    back.set_value();
  });
  pair.of[1][0]->host().submit(outer[1].operation());
  for (int round = 0; round < 20; ++round) {
    std::promise<void> done;
    std::atomic<int> left{8};
    std::vector<Sum> sums(8);
    for (size_t i = 0; i < 8; ++i) {  // the blocked one's group as well
      const auto end = [&](Error) {
        if (--left == 0) done.set_value();
      };
      pair.of[i % 2][i / 2]->host().submit(sums[i].operation(), end);
    }
    await(done, "another group");
  }
  release.set_value();
  await(back, "the callback");
}

// ---- the process

// Voluntary context switches of all threads but this one.
uint64_t switches() {
  uint64_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    if (entry.path().filename() == std::to_string(::gettid())) continue;
    std::ifstream status(entry.path() / "status");
    for (std::string word; status >> word;) {
      uint64_t value = 0;
      if (word == "voluntary_ctxt_switches:" && status >> value) count += value;
    }
  }
  return count;
}

// 10,000 groups that were used, and are idle: no thread wakes up in a second.
[[maybe_unused]] void idle_groups() {
  Workers::get().set_most(4);
  constexpr size_t kGroups = 10'000;
  World world(1, tiny(1));
  Members groups;
  std::atomic<size_t> left{kGroups};
  std::promise<void> over;
  Sum sum(1);
  for (size_t i = 0; i < kGroups; ++i) {
    groups.push_back(world.join<Transport>(0));
    groups.back()->host().submit(sum.operation(), [&](Error) {
      if (--left == 0) over.set_value();
    });
  }
  await(over, "an operation");
  const Deadline hang(kHang);
  uint64_t woken = 1;
  while (woken > 0 && !hang.passed()) {
    const uint64_t before = switches();
    std::this_thread::sleep_for(std::chrono::seconds(1));
    woken = switches() - before;
  }
  require(woken == 0, woken, " voluntary context switches in a second");
}

// Runs it in a forked process, to whose end it must come in time.
void in_child(const std::function<void()>& body) {
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child < 0) throw SystemError("fork");
  if (child == 0) {
    ::alarm(60);
    try {
      body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "in the child: %s\n", error.what());
      ::_exit(1);
    }
    std::exit(0);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  require(status == 0, "the child ended with status ", status);
}

// Calls one another again, so that workers never rest.
struct Busy {
  explicit Busy(size_t count) : pair(count), sums(2 * count) {
    for (size_t i = 0; i < sums.size(); ++i) go_on(i);
  }
  ~Busy() {
    stop = true;
    for (const auto& group : pair.of[0]) group->abort("the check is over");  // one may be ahead
    while (under_way > 0) std::this_thread::yield();
  }
  void go_on(size_t i) {
    ++under_way;
    try {
      pair.of[i % 2][i / 2]->host().submit(sums[i].operation(), [this, i](Error error) {
        if (!stop && !error) go_on(i);
        --under_way;
        ++ended;
      });
    } catch (const std::exception&) {  // the program ends
      --under_way;
    }
  }
  std::atomic<bool> stop{false};
  std::atomic<int> under_way{0}, ended{0};
  Pair<SlowTransport> pair;
  std::vector<Sum> sums;
};

// A child has no workers; it makes its own, and its parent's go on.
[[maybe_unused]] void forks() {
  Workers::get().set_most(3);
  Busy busy(4);
  for (int i = 0; i < 20; ++i) {
    in_child([&] {
      bool refused = false;
      try {
        busy.pair.of[0][0]->host().submit(Sum().operation());
      } catch (const PeerError&) {
        refused = true;
      }
      require(refused, "a group of the parent's takes calls");
      World world(1, tiny(1));
      const auto group = world.join<Transport>(0);
      std::promise<void> over;
      Sum sum;
      group->host().submit(sum.operation(), [&](Error) { over.set_value(); });
      await(over, "the child's operation");
      ::_exit(0);
    });
    const int before = busy.ended;
    const Deadline hang(kHang);
    while (busy.ended == before && !hang.passed()) std::this_thread::yield();
    require(busy.ended != before, "the parent's workers hang");
  }
}

// The program ends while workers drive, and one is in a callback that never returns.
[[maybe_unused]] void ends_while_busy() {
  for (int i = 0; i < 10; ++i) {
    in_child([] {
      Workers::get().set_most(3);
      auto* const busy = new Busy(4);
      auto* const stuck = new Pair<>(1);
      auto* const sums = new Sum[2];
      std::promise<void> held;
      stuck->of[0][0]->host().submit(sums[0].operation(), [&](Error) {
        Progress::call_out([&] {
          held.set_value();
          while (true) ::pause();
        });
      });
      stuck->of[1][0]->host().submit(sums[1].operation());
      await(held, "the callback");
      while (busy->ended < 50) std::this_thread::yield();
      const auto calling = Groups::close_all(std::chrono::milliseconds(50), "");
      require(calling.size() == 1, calling.size(), " threads are in callbacks");
    });
  }
}

std::vector<Check> all_checks() {
  std::vector<Check> checks;
#if !defined(__SANITIZE_THREAD__)  // no threads after such forks, and minutes for the groups
  checks.push_back({"ends_while_busy", ends_while_busy});  // forks while there are no threads
  checks.push_back({"idle_groups", idle_groups});
#endif
  for (const int workers : {1, 2, 4}) {
    checks.push_back({str("side_by_side/", workers), [=] { side_by_side(workers); }});
    checks.push_back({str("blocked_callback/", workers), [=] { blocked_callback(workers); }});
  }
  checks.push_back({"waits_help", waits_help});
  checks.push_back({"callbacks_stay_out_of_waits", callbacks_stay_out_of_waits});
#if !defined(__SANITIZE_THREAD__)
  checks.push_back({"forks", forks});
#endif
  return checks;
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  return ringcomm::testing::run_checks(ringcomm::testing::all_checks(), argc, argv);
}
