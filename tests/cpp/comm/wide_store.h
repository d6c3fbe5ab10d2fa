// A store for hundreds of ranks on this machine: a hash table in memory that forked processes
// share. It counts the requests and bytes of each rank. On request it answers slowly, or fails one
// request, as a server that loses its connection does.
#pragma once

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstring>

#include "cpp/harness.h"

namespace ringcomm::testing {

// A lock between processes. The death of its holder leaves the table as it was: a new entry is
// linked in last.
class SharedMutex {
 public:
  SharedMutex() {
    pthread_mutexattr_t how;
    pthread_mutexattr_init(&how);
    pthread_mutexattr_setpshared(&how, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&how, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&mutex_, &how);
    pthread_mutexattr_destroy(&how);
  }
  void lock() {
    if (pthread_mutex_lock(&mutex_) == EOWNERDEAD) pthread_mutex_consistent(&mutex_);
  }
  void unlock() { pthread_mutex_unlock(&mutex_); }

 private:
  pthread_mutex_t mutex_;
};

// Made before the fork. The kernel gives pages only where they are used.
struct StoreTable {
  static constexpr size_t kBuckets = 1 << 16;
  static constexpr size_t kMostRanks = 8192;
  static constexpr size_t kRoom = size_t{1} << 30;

  struct Entry {
    Entry* next;
    char* value;
    size_t key_bytes, value_bytes, room;
    int64_t counter;
    char key[1];  // and more
  };
  // One rank's counts. Partner: the parent, which reads them at the end.
  struct Counts {
    std::atomic<uint64_t> requests{0}, bytes{0};
  };

  static StoreTable& make() {
    const int how = MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE;
    void* at = ::mmap(nullptr, sizeof(StoreTable), PROT_READ | PROT_WRITE, how, -1, 0);
    if (at == MAP_FAILED) throw SystemError("mmap");
    return *new (at) StoreTable;
  }

  std::byte* allocate(size_t bytes) {
    require(bytes <= kRoom - used, "the store is full");
    std::byte* const at = memory + used;
    used += (bytes + 15) / 16 * 16;
    return at;
  }

  SharedMutex mutex;
  size_t used = 0;
  std::array<Entry*, kBuckets> buckets;
  std::array<Counts, kMostRanks> counts;
  alignas(16) std::byte memory[kRoom];  // not initialized: mmap's are zero, and untouched
};

struct StoreFaults {
  std::chrono::milliseconds delay{0};  // of each answer
  uint64_t lost_request = 0;           // the request of this rank that fails, from 1; 0: none
};

// A rank's side of the table.
class WideStore final : public Store {
 public:
  WideStore(StoreTable& table, Rank rank, const StoreFaults& faults = {})
      : table_(table), counts_(table.counts.at(static_cast<size_t>(rank))), faults_(faults) {}

  void set(const std::string& key, const std::string& value) override {
    ask(key.size() + value.size());
    const std::lock_guard guard(table_.mutex);
    StoreTable::Entry& entry = find_or_make(key);
    if (entry.value == nullptr || value.size() > entry.room) {
      entry.value = reinterpret_cast<char*>(table_.allocate(value.size() + 1));
      entry.room = value.size();
    }
    std::memcpy(entry.value, value.data(), value.size());
    entry.value_bytes = value.size();
  }
  bool has(const std::string& key) override {
    ask(key.size());
    const std::lock_guard guard(table_.mutex);
    return find(key) != nullptr;
  }
  bool has_all(const std::vector<std::string>& keys) override {
    size_t bytes = 0;
    for (const auto& key : keys) bytes += key.size();
    ask(bytes);
    const std::lock_guard guard(table_.mutex);
    return std::ranges::all_of(keys, [&](const auto& key) { return find(key) != nullptr; });
  }
  std::string get(const std::string& key) override {
    ask(key.size());
    const std::lock_guard guard(table_.mutex);
    return value_of(key);
  }
  std::vector<std::string> get_all(const std::vector<std::string>& keys) override {
    size_t bytes = 0;
    for (const auto& key : keys) bytes += key.size();
    ask(bytes);
    const std::lock_guard guard(table_.mutex);
    std::vector<std::string> values;
    for (const auto& key : keys) values.push_back(value_of(key));
    return values;
  }
  int64_t add(const std::string& key, int64_t amount) override {
    ask(key.size());
    const std::lock_guard guard(table_.mutex);
    return find_or_make(key).counter += amount;
  }

 private:
  // A request comes, with so many bytes.
  void ask(size_t bytes) {
    counts_.bytes += bytes;
    ++counts_.requests;
    if (++asked_ == faults_.lost_request) throw Failure("the connection to the store was lost");
    if (faults_.delay.count() > 0) std::this_thread::sleep_for(faults_.delay);
  }

  std::string value_of(const std::string& key) {
    const StoreTable::Entry* const entry = find(key);
    require(entry != nullptr && entry->value != nullptr, "the store has no ", key);
    counts_.bytes += entry->value_bytes;
    return {entry->value, entry->value_bytes};
  }
  StoreTable::Entry*& bucket(const std::string& key) {
    return table_.buckets[std::hash<std::string>()(key) % StoreTable::kBuckets];
  }
  StoreTable::Entry* find(const std::string& key) {
    for (StoreTable::Entry* entry = bucket(key); entry != nullptr; entry = entry->next) {
      if (key == std::string_view(entry->key, entry->key_bytes)) return entry;
    }
    return nullptr;
  }
  StoreTable::Entry& find_or_make(const std::string& key) {
    if (StoreTable::Entry* entry = find(key)) return *entry;
    std::byte* const memory = table_.allocate(sizeof(StoreTable::Entry) + key.size());
    auto* const entry = reinterpret_cast<StoreTable::Entry*>(memory);
    *entry = {};
    entry->key_bytes = key.size();
    std::memcpy(entry->key, key.data(), key.size());
    entry->next = bucket(key);
    bucket(key) = entry;  // last: see SharedMutex
    return *entry;
  }

  StoreTable& table_;
  StoreTable::Counts& counts_;
  const StoreFaults faults_;
  uint64_t asked_ = 0;
};

}  // namespace ringcomm::testing
