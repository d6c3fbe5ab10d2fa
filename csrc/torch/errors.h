// Turns the core's errors into torch's. A caller of torch.distributed catches RuntimeError (every
// one of them is), DistBackendError (a peer, a mismatch, a timeout) or DistNetworkError (the
// system).
#pragma once

#include <c10/util/Exception.h>

#include <exception>

#include "base/error.h"

namespace ringcomm {

// Calls function(), and turns its errors into torch's. Others are torch's own already, or the
// standard library's.
decltype(auto) with_torch_errors(const auto& function) {
  try {
    return function();
  } catch (const UsageError& error) {
    TORCH_CHECK(false, error.what());
  } catch (const PeerError& error) {
    C10_THROW_ERROR(DistBackendError, error.what());
  } catch (const MismatchError& error) {
    C10_THROW_ERROR(DistBackendError, error.what());
  } catch (const TimeoutError& error) {
    C10_THROW_ERROR(DistBackendError, error.what());
  } catch (const SystemError& error) {
    C10_THROW_ERROR(DistNetworkError, error.what());
  }
}

inline std::exception_ptr as_torch(const std::exception_ptr& error) {
  try {
    with_torch_errors([&] { std::rethrow_exception(error); });
  } catch (const std::exception&) {
    return std::current_exception();
  }
  return error;
}

// Does the same for calls that can fail only because of a wrong argument.
decltype(auto) with_value_errors(const auto& function) {
  try {
    return function();
  } catch (const UsageError& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

}  // namespace ringcomm
