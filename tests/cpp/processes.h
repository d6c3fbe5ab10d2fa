// Ranks as forked processes, and a store that they share.
#pragma once

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>

#include "base/deadline.h"
#include "harness.h"

namespace ringcomm::testing {

// A table in anonymous shared memory: made before the fork, polled by those that wait.
class SharedStore final : public Store {
 public:
  SharedStore() {
    void* at =
        ::mmap(nullptr, sizeof(Table), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) throw SystemError("mmap");
    table_ = new (at) Table;
  }
  ~SharedStore() override { ::munmap(table_, sizeof(Table)); }

  void set(const std::string& key, const std::string& value) override {
    const Guard guard(table_->lock);
    Entry& entry = find_or_make(key);
    require(value.size() < sizeof entry.value, "value too long");
    std::memcpy(entry.value, value.c_str(), value.size() + 1);
  }
  bool has(const std::string& key) override {
    const Guard guard(table_->lock);
    return find(key) != nullptr;
  }
  std::string get(const std::string& key) override {
    const Guard guard(table_->lock);
    return find(key)->value;
  }
  int64_t add(const std::string& key, int64_t amount) override {
    const Guard guard(table_->lock);
    return find_or_make(key).counter += amount;
  }

 private:
  struct Entry {
    char key[128];
    char value[8192];
    int64_t counter;
  };
  struct Table {
    std::atomic_flag lock;
    int used = 0;
    std::array<Entry, 2048> entries;
  };
  struct Guard {
    explicit Guard(std::atomic_flag& flag) : lock(flag) {
      while (lock.test_and_set(std::memory_order_acquire)) ::usleep(10);
    }
    ~Guard() { lock.clear(std::memory_order_release); }
    std::atomic_flag& lock;
  };

  Entry* find(const std::string& key) {
    for (int i = 0; i < table_->used; ++i) {
      if (key == table_->entries[static_cast<size_t>(i)].key) {
        return &table_->entries[static_cast<size_t>(i)];
      }
    }
    return nullptr;
  }
  Entry& find_or_make(const std::string& key) {
    if (Entry* entry = find(key)) return *entry;
    require(key.size() < sizeof(Entry::key), "key too long");
    Entry& entry = table_->entries.at(static_cast<size_t>(table_->used++));
    std::memcpy(entry.key, key.c_str(), key.size() + 1);
    return entry;
  }

  Table* table_;
};

// Forks `size` processes that run body(rank); returns their exit statuses as waitpid gives them.
// A body that throws prints the error and exits with 1.
inline std::vector<int> run_processes(int size, const std::function<void(Rank)>& body) {
  std::fflush(nullptr);
  std::vector<pid_t> children;
  for (Rank rank = 0; rank < size; ++rank) {
    const pid_t child = ::fork();
    if (child < 0) throw SystemError("fork");
    if (child > 0) {
      children.push_back(child);
      continue;
    }
    int status = 0;
    try {
      body(rank);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      status = 1;
    }
    std::fflush(nullptr);
    ::_exit(status);
  }
  std::vector<int> statuses;
  for (const pid_t child : children) {
    int status = 0;
    ::waitpid(child, &status, 0);
    statuses.push_back(status);
  }
  return statuses;
}

inline void require_all_zero(const std::vector<int>& statuses) {
  for (size_t rank = 0; rank < statuses.size(); ++rank) {
    require(statuses[rank] == 0, "the process of rank ", rank, " ended with status ",
            statuses[rank]);
  }
}

}  // namespace ringcomm::testing
