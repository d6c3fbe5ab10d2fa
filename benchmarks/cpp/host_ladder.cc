// Measures the cost of each layer of an all_reduce inside a host: one call, an in-place float32
// SUM, timed at three heights, for benchmarks/ladder.py.
//
//   host_ladder RANKS
//
// A line "RUNG ELEMENTS CALLS" is answered with the seconds of each call, as long as on the slowest
// rank. Rungs: handwritten, a loop on the transport (publish, signal, wait, add); plan, the same as
// a plan, interpreted: the cost of planning as data; engine, Communicator::run: fingerprint, plan
// cache, queue, flight state. A rung's first call is looked at and not timed.
//
// Each line has ranks and groups of its own: the lower two rungs count signals for themselves,
// behind the group's back.
#include <sched.h>

#include <cstring>
#include <iostream>
#include <span>

#include "comm/communicator.h"
#include "cpp/processes.h"

namespace ringcomm::testing {
namespace {

constexpr int kWarm = 5;  // calls before those that are timed

struct Order {
  std::string rung;
  size_t elements = 0;
  int calls = 0;
};

Operation all_reduce_of(std::span<float> data) {
  Operation operation;
  operation.collective = Collective::kAllReduce;
  operation.dtype = DType::kFloat32;
  operation.bytes = data.size_bytes();
  operation.input = {{reinterpret_cast<std::byte*>(data.data()), operation.bytes}};
  operation.output = operation.input;
  return operation;
}

// One call at one height.
class Rung {
 public:
  virtual ~Rung() = default;
  virtual void operator()() = 0;
};

// As the planner's, without a plan: payload in the lines when it fits, else two publish and two
// result slots, one signal a segment.
class Handwritten final : public Rung {
 public:
  Handwritten(Communicator& group, std::span<float> data)
      : transport_(group.state().transport()),
        data_(data),
        segment_(group.geometry().segment_bytes / 4),
        patience_(group.state().patience()) {}

  void operator()() override {
    half_ = static_cast<int>(++operations_ % 2);
    data_.size_bytes() <= kLineBytes ? by_lines() : by_segments();
  }

 private:
  Rank peer(int i) const { return (transport_.rank() + i) % transport_.size(); }
  float* window(Rank rank, size_t slot) {
    return reinterpret_cast<float*>(transport_.window(rank, half_)) + slot * segment_;
  }
  void signal_all() {
    for (int i = 1; i < transport_.size(); ++i) transport_.signal(peer(i), kData, half_, 0);
  }
  void wait_all() {
    ++waited_;
    for (int i = 1; i < transport_.size(); ++i) {
      const auto ready = [&] { return transport_.arrived(peer(i), kData, half_) >= waited_; };
      patience_.reset();
      while (!ready()) {
        if (!patience_.again()) {
          transport_.doorbell().sleep(kAllNews, ready, std::chrono::milliseconds(50));
          patience_.reset();
        }
      }
    }
  }

  void by_lines() {
    for (int i = 1; i < transport_.size(); ++i) {
      std::memcpy(transport_.line(peer(i), transport_.rank(), half_), data_.data(),
                  data_.size_bytes());
    }
    signal_all();
    wait_all();
    for (size_t k = 0; k < data_.size(); ++k) {
      float sum = 0;
      for (Rank rank = 0; rank < transport_.size(); ++rank) {
        float value = data_[k];
        if (rank != transport_.rank()) {
          std::memcpy(&value, transport_.line(transport_.rank(), rank, half_) + 4 * k, 4);
        }
        sum += value;
      }
      data_[k] = sum;
    }
  }

  void by_segments() {
    const size_t segments = (data_.size() + segment_ - 1) / segment_;
    publish(0);
    signal_all();
    for (size_t c = 0; c < segments; ++c) {
      wait_all();
      if (c > 0) load(c - 1);
      if (c + 1 < segments) publish(c + 1);
      add(c);
      signal_all();
    }
    wait_all();
    load(segments - 1);
  }
  size_t length(size_t c) const { return std::min(segment_, data_.size() - c * segment_); }
  size_t cut(size_t c, Rank rank) const {
    const auto part = static_cast<size_t>(rank), parts = static_cast<size_t>(transport_.size());
    return rank == transport_.size() ? length(c) : length(c) / 16 * part / parts * 16;
  }
  void publish(size_t c) {
    const size_t low = cut(c, transport_.rank()), high = cut(c, transport_.rank() + 1);
    float* to = window(transport_.rank(), c % 2);
    const float* from = data_.data() + c * segment_;
    std::memcpy(to, from, low * 4);
    std::memcpy(to + high, from + high, (length(c) - high) * 4);
  }
  void add(size_t c) {
    const size_t low = cut(c, transport_.rank()), high = cut(c, transport_.rank() + 1);
    float* result = window(transport_.rank(), 2 + c % 2);
    float* mine = data_.data() + c * segment_;
    const auto source = [&](Rank rank) {
      return rank == transport_.rank() ? mine : window(rank, c % 2);
    };
    if (transport_.size() == 2) {
      const float *a = source(0), *b = source(1);
      for (size_t i = low; i < high; ++i) mine[i] = result[i] = a[i] + b[i];
      return;
    }
    for (size_t i = low; i < high; ++i) result[i] = source(0)[i] + source(1)[i];
    for (Rank rank = 2; rank < transport_.size(); ++rank) {
      const float* next = source(rank);
      for (size_t i = low; i < high; ++i) result[i] += next[i];
    }
    std::memcpy(mine + low, result + low, (high - low) * 4);
  }
  void load(size_t c) {
    for (int i = 1; i < transport_.size(); ++i) {
      const size_t low = cut(c, peer(i)), high = cut(c, peer(i) + 1);
      std::memcpy(data_.data() + c * segment_ + low, window(peer(i), 2 + c % 2) + low,
                  (high - low) * 4);
    }
  }

  Transport& transport_;
  std::span<float> data_;
  size_t segment_;
  Patience patience_;
  uint64_t operations_ = 0, waited_ = 0;
  int half_ = 0;
};

// Makes the plan that the group would run: its ranks share this host. 0: in its usual segments.
std::shared_ptr<const Plan> plan_of(const Communicator& group, const Operation& operation,
                                    uint64_t segment_bytes) {
  Shape shape = make_shape(operation, group.geometry());
  if (segment_bytes > 0) shape.geometry.segment_bytes = segment_bytes;
  const auto requested = group.state().requested_algorithm(shape);
  const Algorithm algorithm = requested.value_or(select(shape, true));
  return std::make_shared<const Plan>(make_plan(shape, group.rank(), algorithm));
}

class Planned final : public Rung {
 public:
  Planned(Communicator& group, std::span<float> data, uint64_t segment_bytes = 0)
      : group_(group),
        operation_(all_reduce_of(data)),
        plan_(plan_of(group, operation_, segment_bytes)),
        executor_(group.state().transport()),
        patience_(group.state().patience()) {
    executor_.input().assign(operation_.input);
    executor_.output().assign(operation_.output);
  }

  void operator()() override {
    executor_.start(plan_, ++sequence_, make_reduction(operation_, group_.size()));
    while (executor_.advance() != HostExecutor::Status::kDone) {
      patience_.reset();
      while (!executor_.ready()) {
        if (!patience_.again()) {
          group_.state().transport().doorbell().sleep(
              kSignalNews, [&] { return executor_.ready(); }, std::chrono::milliseconds(50));
          patience_.reset();
        }
      }
    }
  }

 private:
  Communicator& group_;
  const Operation operation_;
  const std::shared_ptr<const Plan> plan_;
  HostExecutor executor_;
  Patience patience_;
  uint64_t sequence_ = 0;
};

class Engine final : public Rung {
 public:
  Engine(Communicator& group, std::span<float> data)
      : group_(group), operation_(all_reduce_of(data)) {}
  void operator()() override { group_.run(operation_); }

 private:
  Communicator& group_;
  const Operation operation_;
};

std::unique_ptr<Rung> make_rung(const std::string& name, Communicator& group,
                                std::span<float> data) {
  if (name == "handwritten") return std::make_unique<Handwritten>(group, data);
  if (name == "plan") return std::make_unique<Planned>(group, data);
  if (name.starts_with("plan/")) {
    return std::make_unique<Planned>(group, data, std::stoull(name.substr(5)));
  }
  if (name == "engine") return std::make_unique<Engine>(group, data);
  throw UsageError(str("a rung is handwritten, plan, plan/SEGMENT_BYTES or engine, not ", name));
}

// Small whole numbers: their sum is exact.
float value(size_t index, Rank rank) {
  return static_cast<float>((index * 7 + static_cast<size_t>(rank) * 3) % 1000);
}

void verify(Rung& rung, const Order& order, const Communicator& group, std::span<float> data) {
  for (size_t i = 0; i < data.size(); ++i) data[i] = value(i, group.rank());
  rung();
  for (size_t i = 0; i < data.size(); ++i) {
    float sum = 0;
    for (Rank rank = 0; rank < group.size(); ++rank) sum += value(i, rank);
    require(data[i] == sum, order.rung, ", ", order.elements, " elements: element ", i, " is ",
            data[i], ", not ", sum);
  }
  std::fill(data.begin(), data.end(), 0.0f);
}

// To a core of one's own; the kernel is free to move us from there.
void spread(Rank rank) {
  cpu_set_t all, own;
  if (::sched_getaffinity(0, sizeof all, &all) != 0) throw SystemError("sched_getaffinity");
  int skip = rank % CPU_COUNT(&all), core = 0;
  while (!CPU_ISSET(core, &all) || skip-- > 0) ++core;
  CPU_ZERO(&own);
  CPU_SET(core, &own);
  ::sched_setaffinity(0, sizeof own, &own);
  ::sched_setaffinity(0, sizeof all, &all);
}

// Runs one rank's part of an order. `seconds`: where its calls' times go.
void climb(const Order& order, Store& store, Rank rank, int size, double* seconds) {
  CommunicatorOptions options;
  options.rank = rank;
  options.size = size;
  options.timeout = std::chrono::seconds(60);
  const auto all = Communicator::create(store, options);
  options.name = order.rung;
  const auto group = Communicator::create(store, options);
  // Where torch's allocator would put it.
  const size_t bytes = (order.elements * sizeof(float) + 63) / 64 * 64;
  const std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(64, bytes),
                                                           &std::free);
  const std::span<float> data(static_cast<float*>(memory.get()), order.elements);
  const auto rung = make_rung(order.rung, *group, data);
  verify(*rung, order, *group, data);
  all->run(Operation{});  // a barrier
  spread(rank);
  for (int i = -kWarm; i < order.calls; ++i) {
    const auto start = Clock::now();
    (*rung)();
    const std::chrono::duration<double> time = Clock::now() - start;
    if (i >= 0) seconds[i] = time.count();
  }
  all->run(Operation{});
  group->shutdown();
  all->shutdown();
}

// Memory that the ranks fill and their parent reads.
class Times {
 public:
  Times(int ranks, int calls)
      : ranks_(static_cast<size_t>(ranks)),
        calls_(static_cast<size_t>(calls)),
        bytes_(ranks_ * calls_ * sizeof(double)),
        at_(::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {
    if (at_ == MAP_FAILED) throw SystemError("mmap");
  }
  ~Times() { ::munmap(at_, bytes_); }
  Times(const Times&) = delete;
  Times& operator=(const Times&) = delete;

  double* of(Rank rank) const {
    return static_cast<double*>(at_) + static_cast<size_t>(rank) * calls_;
  }
  void print_slowest() const {
    for (size_t call = 0; call < calls_; ++call) {
      double slowest = 0;
      for (size_t r = 0; r < ranks_; ++r) {
        slowest = std::max(slowest, of(static_cast<Rank>(r))[call]);
      }
      std::cout << (call == 0 ? "" : " ") << slowest;
    }
    std::cout << std::endl;
  }

 private:
  const size_t ranks_, calls_, bytes_;
  void* const at_;
};

void obey(const std::string& line, int size) {
  Order order;
  std::istringstream in(line);
  in >> order.rung >> order.elements >> order.calls;
  require(!in.fail() && order.calls > 0 && order.elements > 0, "RUNG ELEMENTS CALLS, not ", line);
  SharedStore store;
  const Times times(size, order.calls);
  require_all_zero(
      run_processes(size, [&](Rank rank) { climb(order, store, rank, size, times.of(rank)); }));
  times.print_slowest();
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  const int size = argc == 2 ? std::atoi(argv[1]) : 0;
  if (size < 1) {
    std::fprintf(stderr, "host_ladder RANKS\n");
    return 2;
  }
  try {
    for (std::string line; std::getline(std::cin, line);) ringcomm::testing::obey(line, size);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "host_ladder: %s\n", error.what());
    return 1;
  }
  return 0;
}
