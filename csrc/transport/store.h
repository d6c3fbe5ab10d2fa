// The key-value store through which ranks find one another: c10d's Store in production
// (torch/store_adapter.h), transport/socket_store.h where there is none, a map in tests.
#pragma once

#include <cstdint>
#include <optional>
#include <thread>

#include "base/deadline.h"
#include "base/error.h"

namespace ringcomm {

class Store {
 public:
  virtual ~Store() = default;
  virtual void set(const std::string& key, const std::string& value) = 0;
  virtual bool has(const std::string& key) = 0;
  virtual bool has_all(const std::vector<std::string>& keys) {
    return std::ranges::all_of(keys, [&](const auto& key) { return has(key); });
  }
  virtual std::string get(const std::string& key) = 0;                              // `key` exists
  virtual std::vector<std::string> get_all(const std::vector<std::string>& keys) {  // they exist
    std::vector<std::string> values;
    for (const std::string& key : keys) values.push_back(get(key));
    return values;
  }
  // Adds to an integer that starts at 0; returns the sum.
  virtual int64_t add(const std::string& key, int64_t amount) = 0;
  // Says a word under a name in a list, once. said() tells how many have been said there.
  virtual void say(const std::string& list, const std::string& name, const std::string& word) {
    set(list + name, word);
    add(list + "said", 1);
  }
  virtual int64_t said(const std::string& list) { return add(list + "said", 0); }
  // Tells whether its keys outlive a meeting, in a process that may end. Then ranks find the words
  // of others that are dead, and the process that serves it must not leave before the rest have
  // read.
  virtual bool served() { return true; }
  // Names the host that serves the store, if there is one.
  virtual std::string host() { return {}; }
  // Returns the time by which waiting is timed.
  virtual Clock::time_point now() { return Clock::now(); }
  // Waits between two questions. Returns true if the answer may have changed by now.
  virtual bool wait(Clock::duration most) {
    std::this_thread::sleep_for(most);
    return false;
  }
  // Returns the rank's death, if it is known here.
  virtual std::optional<PeerError> died(Rank) { return std::nullopt; }
};

}  // namespace ringcomm
