// c10d's Store as the core's.
#pragma once

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "base/error.h"
#include "transport/store.h"

namespace ringcomm {

class StoreAdapter final : public Store {
  static decltype(auto) attempt(const auto& function) {
    try {
      return function();
    } catch (const c10::DistNetworkError& error) {
      fail(
          "does not answer: has the process that serves it ended? That is rank 0, unless a "
          "launcher or the program serves it; see its own output",
          error.what_without_backtrace());
    } catch (const c10::Error& error) {
      fail("refuses a request", error.what_without_backtrace());
    } catch (const std::exception& error) {
      fail("refuses a request", error.what());
    }
  }
  [[noreturn]] static void fail(const char* how, const char* what) {
    C10_THROW_ERROR(DistStoreError, str("the store through which the ranks find one another ", how,
                                        " (", what, ")"));
  }

 public:
  explicit StoreAdapter(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override {
    attempt([&] { store_->set(key, value); });
  }

  bool has(const std::string& key) override {
    return attempt([&] { return store_->check({key}); });
  }

  bool has_all(const std::vector<std::string>& keys) override {
    return attempt([&] { return store_->check(keys); });
  }

  std::string get(const std::string& key) override {
    return attempt([&] { return store_->get_to_str(key); });
  }

  std::vector<std::string> get_all(const std::vector<std::string>& keys) override {
    if (!attempt([&] { return store_->hasExtendedApi(); })) return Store::get_all(keys);
    std::vector<std::string> values;
    constexpr size_t kAtOnce = 512;  // of all keys, so that other ranks are served in between
    for (size_t from = 0; from < keys.size(); from += kAtOnce) {
      const auto end =
          keys.begin() + static_cast<std::ptrdiff_t>(std::min(from + kAtOnce, keys.size()));
      const std::vector<std::string> some(keys.begin() + static_cast<std::ptrdiff_t>(from), end);
      for (const auto& value : attempt([&] { return store_->multiGet(some); })) {
        values.emplace_back(value.begin(), value.end());
      }
    }
    return values;
  }

  int64_t add(const std::string& key, int64_t amount) override {
    return attempt([&] { return store_->add(key, amount); });
  }

  std::string host() override {
    auto store = store_;
    while (const auto prefixed = c10::dynamic_intrusive_pointer_cast<c10d::PrefixStore>(store)) {
      store = prefixed->getUnderlyingStore();
    }
    const auto served = c10::dynamic_intrusive_pointer_cast<c10d::TCPStore>(store);
    return served ? served->getHost() : std::string();
  }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace ringcomm
