// Common parts of the C++ test programs: named checks, ranks as threads or processes, an in-process
// store. A program prints "ok NAME" for each check that held and exits 1 at the first that did not.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/error.h"
#include "transport/store.h"

namespace ringcomm::testing {

class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <typename... Parts>
void require(bool condition, const Parts&... what) {
  if (!condition) throw Failure(str(what...));
}

// How many times as long as alone something may take that is quick: more beside other tests, which
// test_cpp.py says.
inline int slack() {
  const char* const times = std::getenv("TEST_SLACK");
  return times == nullptr ? 1 : std::atoi(times);
}

struct Check {
  std::string name;
  std::function<void()> body;
};

// Runs the checks whose name contains argv[1] (all without it); the exit status of main.
inline int run_checks(const std::vector<Check>& checks, int argc, char** argv) {
  const std::string filter = argc > 1 ? argv[1] : "";
  int passed = 0;
  for (const Check& check : checks) {
    if (check.name.find(filter) == std::string::npos) continue;
    try {
      check.body();
    } catch (const std::exception& error) {
      std::printf("FAILED %s: %s\n", check.name.c_str(), error.what());
      return 1;
    }
    std::printf("ok %s\n", check.name.c_str());
    std::fflush(stdout);
    ++passed;
  }
  if (passed == 0) std::printf("FAILED no check is named like '%s'\n", filter.c_str());
  return passed == 0 ? 1 : 0;
}

// Runs body(rank) on `size` threads; throws what they threw, by rank.
inline void run_threads(int size, const std::function<void(Rank)>& body) {
  std::vector<std::exception_ptr> errors(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (Rank rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (...) {
        errors[static_cast<size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  std::string all;
  for (size_t rank = 0; rank < errors.size(); ++rank) {
    if (!errors[rank]) continue;
    try {
      std::rethrow_exception(errors[rank]);
    } catch (const std::exception& error) {
      all += str(all.empty() ? "" : "; ", "thread ", rank, ": ", error.what());
    }
  }
  require(all.empty(), all);
}

class LocalStore final : public Store {
 public:
  void set(const std::string& key, const std::string& value) override {
    const std::lock_guard lock(mutex_);
    values_[key] = value;
  }
  bool has(const std::string& key) override {
    const std::lock_guard lock(mutex_);
    return values_.count(key) > 0;
  }
  std::string get(const std::string& key) override {
    const std::lock_guard lock(mutex_);
    return values_.at(key);
  }
  int64_t add(const std::string& key, int64_t amount) override {
    const std::lock_guard lock(mutex_);
    return counters_[key] += amount;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::string> values_;
  std::map<std::string, int64_t> counters_;
};

// SplitMix64: small, seeded, the same everywhere.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = (state_ += 0x9e3779b97f4a7c15);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  uint64_t below(uint64_t bound) { return next() % bound; }

 private:
  uint64_t state_;
};

}  // namespace ringcomm::testing
