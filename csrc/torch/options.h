// The options of a group: init_process_group("ringcomm", pg_options=ringcomm.Options()).
#pragma once

#include <c10/util/Exception.h>
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

  // The settings that ringcomm/options.py has read and checked, and the names of those set in code.
  Config config;
  std::set<std::string> given;

  // Tells whether tensors of CUDA devices are this group's, too. Not in "cpu:ringcomm,cuda:nccl".
  bool cuda = true;

  // In an elastic world its members meet through these links, unless guests join them.
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

// Returns a timeout that somebody gives as the core can count it in nanoseconds. A century stands
// for all that is longer. So it does for timedelta.max, of which pybind11 makes a number far below
// zero.
inline std::chrono::milliseconds checked_timeout(std::chrono::milliseconds timeout) {
  constexpr std::chrono::milliseconds kCentury = std::chrono::hours(24 * 36525);
  if (timeout < -kCentury) return kCentury;
  TORCH_CHECK_VALUE(timeout.count() > 0, "ringcomm: a timeout of ", timeout.count(),
                    " ms is over before anything can happen: give a positive one, or "
                    "datetime.timedelta.max to wait for as long as it takes");
  return std::min(timeout, kCentury);
}

}  // namespace ringcomm
