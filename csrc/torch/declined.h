// The calls of torch's backends that this one declines. Each is refused by a sentence that gives an
// alternative. tests/backend/test_torch_calls.py holds torch's list of calls against
// this one and that of Backend.
#pragma once

#include <torch/headeronly/version.h>

#include <memory>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <unordered_map>

#include "torch/tensors.h"

namespace ringcomm {

class Declined : public c10d::Backend {
 public:
  using c10d::Backend::Backend;
  using Other = c10::intrusive_ptr<c10d::Backend>;
  using OtherOptions = c10::intrusive_ptr<c10d::Backend::Options>;

  Other merge(const c10::intrusive_ptr<c10d::Store>&, const OtherOptions&, const int&,
              const int&) override {
    decline("merge", "a group keeps its ranks: make one of all of them, by new_group()");
  }
  std::shared_ptr<c10::Allocator> getMemAllocator() override {
    decline("getMemAllocator", "any memory will do: allocate tensors as usual");
  }
  at::Tensor allocateTensor(long, at::TensorOptions) override {
    decline("allocateTensor", "any memory will do: allocate tensors as usual");
  }

#if TORCH_VERSION_MINOR >= 12
  void suspend() override { decline("suspend", "a group has nothing to give back: destroy it"); }
  void resume() override { decline("resume", "a group has nothing to give back: destroy it"); }
  std::unordered_map<std::string, uint64_t> getMemoryStats() override {
    decline("getMemoryStats", "no statistics are kept: flight_record() lists operations");
  }
#endif

#if TORCH_VERSION_MINOR >= 14
  c10::intrusive_ptr<c10d::Window> new_window(const std::optional<at::Tensor>&) override {
    decline("new_window", "there are no one-sided calls: use isend() and irecv()");
  }
  void registerAbortHook(int64_t, c10d::AbortHook) override {
    decline("registerAbortHook", "look at get_error() and flight_record() where a call has failed");
  }
  void unregisterAbortHook(int64_t) override {
    decline("unregisterAbortHook", "there is none: registerAbortHook() is not served");
  }
#endif

#if TORCH_VERSION_MINOR >= 15
  void startTimeEstimate() override {
    decline("startTimeEstimate", "`python -m ringcomm model` tells what operations take");
  }
  float endTimeEstimate() override {
    decline("endTimeEstimate", "`python -m ringcomm model` tells what operations take");
  }
  void registerCompletionHook(int64_t, c10d::CompletionHook) override {
    decline("registerCompletionHook", "use registerOnCompletionHook(), or the future of a Work");
  }
  void unregisterCompletionHook(int64_t) override {
    decline("unregisterCompletionHook", "there is none: registerCompletionHook() is not served");
  }
#endif

 private:
  [[noreturn]] static void decline(const char* call, const char* why) { Refusal{call}(why); }
};

}  // namespace ringcomm
