#include "comm/ladder.h"

#include <cstring>

namespace ringcomm {
namespace {

Operation all_reduce_of(std::span<float> data) {
  Operation operation;
  operation.collective = Collective::kAllReduce;
  operation.dtype = DType::kFloat32;
  operation.bytes = data.size_bytes();
  operation.input = {{reinterpret_cast<std::byte*>(data.data()), operation.bytes}};
  operation.output = operation.input;
  return operation;
}

template <typename Call>
std::vector<double> time_calls(int iterations, Call&& call) {
  std::vector<double> seconds;
  seconds.reserve(static_cast<size_t>(iterations));
  for (int i = 0; i < iterations; ++i) {
    const auto start = Clock::now();
    call();
    seconds.push_back(std::chrono::duration<double>(Clock::now() - start).count());
  }
  return seconds;
}

// As the planner's, without a plan: payload in the lines when it fits, else two publish and two
// result slots, one signal a segment.
class Handwritten {
 public:
  Handwritten(Communicator& group, std::span<float> data)
      : transport_(group.transport()), data_(data), segment_(group.geometry().segment_bytes / 4) {
    const int cpus = Runtime::get().cpus();
    const bool own_core = group.size() <= cpus;
    patience_ = Patience(SpinPolicy{std::chrono::microseconds(own_core ? 300 : 0),
                                    own_core ? 4 : 100, own_core ? 256 : 16});
  }

  void operator()() {
    half_ = static_cast<int>(++operations_ % 2);
    data_.size_bytes() <= kLineBytes ? by_lines() : by_segments();
  }

 private:
  Rank peer(int i) const { return (transport_.rank() + i) % transport_.size(); }
  float* window(Rank rank, size_t slot) {
    return reinterpret_cast<float*>(transport_.memory(rank, half_)) + slot * segment_;
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
          transport_.doorbell().sleep(ready, std::chrono::milliseconds(50));
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

}  // namespace

std::vector<double> time_handwritten(Communicator& group, std::span<float> data, int iterations) {
  Handwritten all_reduce(group, data);
  return time_calls(iterations, all_reduce);
}

std::vector<double> time_plan(Communicator& group, std::span<float> data, int iterations) {
  const Operation operation = all_reduce_of(data);
  const auto plan = group.plan_for(operation);
  HostExecutor executor(group.transport(), group.geometry());
  const bool own_core = group.size() <= Runtime::get().cpus();
  Patience patience(SpinPolicy{std::chrono::microseconds(own_core ? 300 : 0), own_core ? 4 : 100,
                               own_core ? 256 : 16});
  uint64_t sequence = 0;
  executor.input().assign(operation.input);
  executor.output().assign(operation.output);
  return time_calls(iterations, [&] {
    executor.start(plan, ++sequence, make_reduction(operation, group.size()));
    while (executor.advance() != HostExecutor::Status::kDone) {
      patience.reset();
      while (!executor.ready()) {
        if (!patience.again()) {
          group.transport().doorbell().sleep([&] { return executor.ready(); },
                                             std::chrono::milliseconds(50));
          patience.reset();
        }
      }
    }
  });
}

std::vector<double> time_engine(Communicator& group, std::span<float> data, int iterations) {
  const Operation operation = all_reduce_of(data);
  return time_calls(iterations, [&] { group.run(operation); });
}

}  // namespace ringcomm
