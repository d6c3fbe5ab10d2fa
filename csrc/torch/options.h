// The options of a group: init_process_group("ringcomm", pg_options=ringcomm.Options()).
#pragma once

#include <torch/headeronly/version.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "base/config.h"
#include "elastic/link.h"

namespace ringcomm {

inline constexpr const char* kBackendName = "ringcomm";

struct Options final : c10d::Backend::Options {
  explicit Options(std::chrono::milliseconds timeout = kBackendDefaultTimeout)
      : c10d::Backend::Options(kBackendName, timeout) {}

  // What ringcomm/options.py has read and checked, and the names of what code has set.
  Config config;
  std::set<std::string> given;

  // Are tensors of CUDA devices this group's, too? Not in "cpu:ringcomm,cuda:nccl".
  bool cuda = true;

  // Of an elastic world: its members meet through these links, unless guests join them.
  std::shared_ptr<Links> links;
  std::function<void()> check_members;  // while they meet; throws where they never will

#ifndef C10D_BACKEND_HAS_RECONFIGURE
  bool enable_reconfigure = false;  // torch's from 2.14 on: reconfigure() is what connects
#endif

#if TORCH_VERSION_MINOR >= 14
  c10::intrusive_ptr<c10d::Backend::Options> clone() const override {
    return c10::make_intrusive<Options>(*this);
  }
#endif
};

using GroupOptionsPtr = c10::intrusive_ptr<Options>;

// A timeout the core can count in nanoseconds; torch's may be as long as a float can say.
inline std::chrono::milliseconds sane_timeout(std::chrono::milliseconds timeout) {
  constexpr std::chrono::milliseconds kCentury = std::chrono::hours(24 * 36525);
  return std::clamp(timeout, std::chrono::milliseconds(1), kCentury);
}

}  // namespace ringcomm
