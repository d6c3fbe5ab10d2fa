// Several groups at once over TCP: what more workers bring. Two processes on loopback, and in each
// round an asynchronous, in-place float32 SUM in every group.
//
//   pool_bench GROUPS BYTES ROUNDS WORKERS
//
// Rounds alternate between one worker and WORKERS. Prints, for both, the median seconds of a round
// on the slower process and the quartiles; then the same of the ratios of neighbouring rounds, how
// many times as fast WORKERS are as one. "waits": the main thread waits for one group after the
// other, and drives as well. "callbacks": it does nothing, and workers do all.
#include <algorithm>
#include <future>
#include <iostream>

#include "comm/communicator.h"
#include "cpp/processes.h"

namespace ringcomm::testing {
namespace {

constexpr int kWarm = 10;  // rounds that are not timed
constexpr auto kHang = std::chrono::seconds(60);

struct Order {
  int groups = 0;
  size_t bytes = 0;
  int rounds = 0, workers = 0;
  bool waits = false;
};

struct Group {
  std::shared_ptr<Communicator> ranks;
  std::vector<float> data;
  Operation operation() {
    Operation what;
    what.collective = Collective::kAllReduce;
    what.dtype = DType::kFloat32;
    what.bytes = 4 * data.size();
    what.input = {{reinterpret_cast<std::byte*>(data.data()), what.bytes}};
    what.output = what.input;
    return what;
  }
};

void all_at_once(std::vector<Group>& groups, bool waits) {
  std::atomic<size_t> left = groups.size();
  std::promise<void> over;
  std::vector<TaskPtr> tasks;
  for (Group& group : groups) {
    tasks.push_back(
        group.ranks->host().submit(group.operation(), [&](const std::exception_ptr& error) {
          if (error) std::terminate();
          if (--left == 0) over.set_value();
        }));
  }
  for (size_t i = 0; waits && i < tasks.size(); ++i) groups[i].ranks->wait(*tasks[i], kHang);
  require(over.get_future().wait_for(kHang) == std::future_status::ready, "a round hangs");
}

void measure(const Order& order, Store& store, Rank rank, double* seconds) {
  ProcessConfig config;
  config.transport = "tcp";
  Process::get().configure(config);
  CommunicatorOptions options;
  options.rank = rank;
  options.size = 2;
  options.timeout = kHang;
  const auto all = Communicator::create(store, options);
  std::vector<Group> groups(static_cast<size_t>(order.groups));
  for (size_t i = 0; i < groups.size(); ++i) {
    options.name = str("group ", i);
    groups[i].ranks = Communicator::create(store, options);
    groups[i].data.assign(order.bytes / sizeof(float), 1);
  }
  for (int round = -kWarm; round < order.rounds; ++round) {
    Workers::get().set_most(round % 2 == 0 ? 1 : order.workers);
    for (Group& group : groups) std::ranges::fill(group.data, 1.0f);
    all->run(Operation{});  // a barrier
    const auto start = Clock::now();
    all_at_once(groups, order.waits);
    const std::chrono::duration<double> time = Clock::now() - start;
    if (round >= 0) seconds[round] = time.count();
    for (const Group& group : groups) {
      for (const float value : group.data) require(value == 2, "sum ", value);
    }
  }
  all->run(Operation{});
  for (const Group& group : groups) group.ranks->shutdown();
  all->shutdown();
}

void print(const char* name, std::vector<double> values) {
  std::ranges::sort(values);
  const auto at = [&](size_t quarter) { return values[(values.size() - 1) * quarter / 4]; };
  std::printf("  %-16s %10.3g (%.3g to %.3g)\n", name, at(2), at(1), at(3));
}

void obey(const Order& order) {
  const size_t rounds = static_cast<size_t>(order.rounds);
  void* const at = ::mmap(nullptr, 2 * rounds * sizeof(double), PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (at == MAP_FAILED) throw SystemError("mmap");
  auto* const seconds = static_cast<double*>(at);
  SharedStore store;
  require_all_zero(run_processes(2, [&](Rank rank) {
    measure(order, store, rank, seconds + static_cast<size_t>(rank) * rounds);
  }));
  std::vector<double> one, more, ratios;
  for (size_t round = 0; round + 1 < rounds; round += 2) {
    one.push_back(std::max(seconds[round], seconds[rounds + round]));
    more.push_back(std::max(seconds[round + 1], seconds[rounds + round + 1]));
    ratios.push_back(one.back() / more.back());
  }
  std::printf("%d groups, %zu bytes, %s, %zu rounds each\n", order.groups, order.bytes,
              order.waits ? "waits" : "callbacks", one.size());
  print("1 worker, s", one);
  print(str(order.workers, " workers, s").c_str(), more);
  print("times as fast", ratios);
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  ringcomm::testing::Order order;
  if (argc == 5) {
    order = {std::atoi(argv[1]), std::strtoull(argv[2], nullptr, 10), std::atoi(argv[3]),
             std::atoi(argv[4])};
  }
  if (order.groups < 1 || order.bytes < 4 || order.rounds < 2 || order.workers < 1) {
    std::fprintf(stderr, "pool_bench GROUPS BYTES ROUNDS WORKERS\n");
    return 2;
  }
  try {
    for (const bool waits : {false, true}) {
      order.waits = waits;
      ringcomm::testing::obey(order);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "pool_bench: %s\n", error.what());
    return 1;
  }
  return 0;
}
