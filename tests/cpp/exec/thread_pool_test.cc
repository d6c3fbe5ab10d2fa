// The pool of threads for long steps: every byte once, whatever the sizes, and the cases in which
// it must step aside. Then which number of threads follows from the cores of a host's ranks.
#include "exec/thread_pool.h"

#include <sched.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "base/cores.h"
#include "cpp/harness.h"
#include "group/per_process.h"

namespace ringcomm::testing {
namespace {

constexpr uint64_t kMost = 1 << 20;

Threads threads_like(int threads, bool spins = true) { return {threads, threads, spins}; }

// Counts the visits of each byte. Plain memory: a sanitizer sees what run() fails to order.
void every_byte_once() {
  ThreadPool& pool = PerProcess<ThreadPool>::get();
  std::vector<uint8_t> visits(kMost);
  Random random(7);
  for (int turn = 0; turn < 200; ++turn) {
    const uint64_t bytes =
        turn % 3 == 0 ? random.below(ThreadPool::kLeastBytes) : random.below(kMost);
    const int threads = 1 + static_cast<int>(random.below(6));
    std::fill_n(visits.begin(), bytes, uint8_t{0});
    std::atomic<bool> aligned{true};
    pool.run(threads_like(threads, turn % 2 == 0), bytes, [&](uint64_t begin, uint64_t end) {
      if (begin % 64 != 0 || end > bytes) aligned = false;
      for (uint64_t i = begin; i < end; ++i) ++visits[i];
    });
    const bool once = std::all_of(visits.begin(), visits.begin() + static_cast<ptrdiff_t>(bytes),
                                  [](uint8_t count) { return count == 1; });
    require(once && aligned, "turn ", turn, ": ", bytes, " bytes by ", threads, " threads");
  }
  require(pool.helpers() <= 5, pool.helpers(), " helpers of 6 threads");
}

// Every chunk waits until two threads are in the step at once: so helpers do take part.
void helpers_take_part() {
  ThreadPool& pool = *new ThreadPool;  // its helpers never end
  std::atomic<int> present{0};
  pool.run(threads_like(3), kMost, [&](uint64_t, uint64_t) {
    present.fetch_add(1);
    while (present.load() < 2) std::this_thread::yield();
  });
  require(present.load() > 2, "there was one chunk");
}

void nested_steps_run_alone() {
  ThreadPool& pool = *new ThreadPool;  // its helpers never end
  std::atomic<uint64_t> inner{0}, parts{0};
  pool.run(threads_like(3), kMost, [&](uint64_t begin, uint64_t end) {
    pool.run(threads_like(3), end - begin + kMost, [&](uint64_t first, uint64_t last) {
      inner += last - first;
      if (first != 0) parts += 1;
    });
    inner -= end - begin;
  });
  require(inner % kMost == 0 && inner > 0, inner.load(), " bytes");
  require(parts == 0, "a step inside another one was divided");
}

// A thread that finds the pool taken works alone, so all are right, and none waits.
void several_threads_at_once() {
  ThreadPool& pool = *new ThreadPool;  // its helpers never end
  run_threads(3, [&](Rank rank) {
    std::vector<uint32_t> numbers(kMost / 4);
    for (uint32_t turn = 0; turn < 40; ++turn) {
      pool.run(threads_like(2 + rank), kMost, [&](uint64_t begin, uint64_t end) {
        for (uint64_t i = begin / 4; i < end / 4; ++i) numbers[i] += turn;
      });
    }
    const bool right = std::ranges::all_of(numbers, [](uint32_t sum) { return sum == 780; });
    require(right, "rank ", rank, " has wrong sums");
  });
}

void what_a_part_throws_arrives() {
  ThreadPool& pool = *new ThreadPool;  // its helpers never end
  for (int turn = 0; turn < 50; ++turn) {
    std::string caught;
    try {
      pool.run(threads_like(1 + turn % 4), kMost, [](uint64_t begin, uint64_t end) {
        if (begin <= kMost / 2 && kMost / 2 < end) throw UsageError("the middle");
      });
    } catch (const UsageError& error) {
      caught = error.what();
    }
    require(caught == "the middle", "turn ", turn, ": caught '", caught, "'");
    uint64_t moved = 0;
    pool.run(threads_like(1), kMost, [&](uint64_t begin, uint64_t end) { moved += end - begin; });
    require(moved == kMost, "the pool is still taken");
  }
}

void a_thread_beside_computation_takes_fewer() {
  ThreadPool& pool = *new ThreadPool;  // its helpers never end
  std::thread([&] {
    ThreadPool::stay_beside();
    pool.run({4, 1, true}, kMost, [](uint64_t, uint64_t) {});
    require(pool.helpers() == 0, "it took helpers");
    pool.run({4, 2, true}, kMost, [](uint64_t, uint64_t) {});
    require(pool.helpers() == 1, "it took ", pool.helpers(), " helpers");
  }).join();
  pool.run({4, 1, true}, kMost, [](uint64_t, uint64_t) {});
  require(pool.helpers() == 3, "this thread has ", pool.helpers(), " helpers");
}

#if defined(__SANITIZE_THREAD__)
constexpr bool kForks = false;  // its runtime ends a child that starts threads
#else
constexpr bool kForks = true;
#endif

// A forked child has no helpers, and makes some; the parent keeps its own.
void a_child_makes_a_pool_of_its_own() {
  const auto moves = [] {
    std::atomic<uint64_t> moved{0};
    PerProcess<ThreadPool>::get().run(threads_like(3), kMost,
                                      [&](uint64_t begin, uint64_t end) { moved += end - begin; });
    return moved == kMost;
  };
  require(moves(), "the parent, before");
  if (!kForks) return;
  const pid_t child = ::fork();
  if (child == 0) {
    const bool fresh = PerProcess<ThreadPool>::get().helpers() == 0;
    ::_exit(fresh && moves() && moves() && PerProcess<ThreadPool>::get().helpers() == 2 ? 0 : 1);
  }
  require(moves(), "the parent, meanwhile");
  int status = -1;
  ::waitpid(child, &status, 0);
  require(status == 0, "the child ended with ", status);
}

void helpers_inherit_affinity_and_no_signals() {
  cpu_set_t before, one, seen;
  ::sched_getaffinity(0, sizeof before, &before);
  CPU_ZERO(&one);
  for (int cpu = 0; CPU_COUNT(&one) == 0; ++cpu) {
    if (CPU_ISSET(cpu, &before)) CPU_SET(cpu, &one);
  }
  ::sched_setaffinity(0, sizeof one, &one);
  ThreadPool& pool = *new ThreadPool;  // its helpers never end
  const auto caller = std::this_thread::get_id();
  std::atomic<bool> helped{false}, wide{false}, hears{false};
  pool.run(threads_like(2, false), kMost, [&](uint64_t, uint64_t) {
    if (std::this_thread::get_id() == caller) {
      while (!helped) std::this_thread::yield();
      return;
    }
    sigset_t blocked;
    ::pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
    ::sched_getaffinity(0, sizeof seen, &seen);
    wide = !CPU_EQUAL(&seen, &one);
    hears = sigismember(&blocked, SIGINT) == 0 || sigismember(&blocked, SIGPROF) == 0;
    helped = true;
  });
  ::sched_setaffinity(0, sizeof before, &before);
  require(!wide, "a helper left the affinity of its maker");
  require(!hears, "a helper would run the program's handlers");
}

// ---- how many threads fit

Cores cores_from(int first, int count) {
  Cores cores;
  for (int cpu = first; cpu < first + count; ++cpu) {
    cores.mask[static_cast<size_t>(cpu / 64)] |= uint64_t{1} << cpu % 64;
  }
  return cores;
}

void ranks_share_the_cores_that_they_have_in_common() {
  const std::vector<Cores> together(2, cores_from(0, 12));
  require(threads_of(together, 0, 0) == 6, "two ranks on 12 cores");
  require(threads_of(together, 1, 1) == 5, "one of them is the network's");
  const std::vector<Cores> apart{cores_from(0, 6), cores_from(60, 7), cores_from(66, 2)};
  require(threads_of(apart, 0, 0) == 6, "a rank with cores of its own");
  require(threads_of(apart, 1, 0) == 3, "a rank that shares one of its seven");
  require(threads_of(std::vector(1, cores_from(0, 200)), 0, 0) == kMostFitting, "200 cores");
  require(threads_of(std::vector(4, cores_from(0, 2)), 0, 0) == 1, "four ranks on two cores");
  require(threads_of(std::vector(1, cores_from(3, 2)), 0, 1) == 1, "two cores and a network");
  require(threads_of(std::vector(1, Cores()), 0, 1) == 1, "a mask that is not known");
}

void requests_quotas_and_earlier_groups_count() {
  std::vector<Cores> ranks(2, cores_from(0, 16));
  ranks[0].threads = 5;
  require(threads_of(ranks, 0, 1) == 5, "what was asked for");
  ranks[0].threads = 1000;
  require(threads_of(ranks, 0, 0) == kMostThreads, "no more than that");
  ranks[1].quota = 6;
  require(threads_of(ranks, 1, 0) == 3, "half of a quota");
  ranks[1].quota = 1;
  require(threads_of(ranks, 1, 0) == 1, "a core between two");
  ranks[1].quota = 0;
  ranks[1].sharers = 8;
  require(threads_of(ranks, 1, 0) == 2, "eight ranks share them in another group");
}

void quotas_are_read_in_both_versions() {
  const std::filesystem::path root =
      std::filesystem::temp_directory_path() / str("ringcomm-threads-test-", ::getpid());
  const Finally clean{[&] { std::filesystem::remove_all(root); }};
  const auto write = [&](const char* folder, const char* file, const char* text) {
    std::filesystem::create_directories(root / folder);
    std::ofstream(root / folder / file) << text << "\n";
  };
  write("job/rank", "cpu.max", "max 100000");
  const auto quota = [&](const char* own) { return quota_in(own, root.string()); };
  require(quota("0::/job/rank\n") == 0, "no quota");
  write("job", "cpu.max", "350000 100000");
  require(quota("0::/job/rank\n") == 3, "that of a cgroup around it");
  require(quota("0::/elsewhere/beyond\n") == 0, "a path that this container does not see");
  write("cpu,cpuacct/slurm", "cpu.cfs_quota_us", "50000");
  write("cpu,cpuacct/slurm", "cpu.cfs_period_us", "100000");
  require(quota("5:cpu,cpuacct:/slurm\n1:name=systemd:/\n") == 1, "half a core");
  write("cpu,cpuacct/slurm", "cpu.cfs_quota_us", "-1");
  require(quota("5:cpu,cpuacct:/slurm\n4:cpuset:/job\n") == 0, "none in version 1");
  require(quota("") == 0 && quota("nonsense\n:\n") == 0, "nothing to read");
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  using namespace ringcomm::testing;
  return run_checks(
      {
          {"every byte once", every_byte_once},
          {"helpers take part", helpers_take_part},
          {"nested steps run alone", nested_steps_run_alone},
          {"several threads at once", several_threads_at_once},
          {"what a part throws arrives", what_a_part_throws_arrives},
          {"a thread beside computation takes fewer", a_thread_beside_computation_takes_fewer},
          {"a child makes a pool of its own", a_child_makes_a_pool_of_its_own},
          {"helpers inherit affinity and no signals", helpers_inherit_affinity_and_no_signals},
          {"ranks share the cores that they have in common",
           ranks_share_the_cores_that_they_have_in_common},
          {"requests, quotas and earlier groups count", requests_quotas_and_earlier_groups_count},
          {"quotas are read in both versions", quotas_are_read_in_both_versions},
      },
      argc, argv);
}
