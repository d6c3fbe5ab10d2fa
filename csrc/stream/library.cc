#include "stream/library.h"

#include <dlfcn.h>

#include "group/process.h"

namespace ringcomm {
namespace {

constexpr const char* kFile = "libringcomm_cuda.so";

// Beside the library that this code is part of.
std::string beside_us() {
  Dl_info info{};
  ::dladdr(reinterpret_cast<const void*>(&device_api), &info);
  const std::string path = info.dli_fname == nullptr ? "" : info.dli_fname;
  return path.substr(0, path.rfind('/') + 1) + kFile;
}

cuda::Api* open() {
  const std::string& wanted = Process::get().config().cuda_library;
  const std::string path = wanted.empty() ? beside_us() : wanted;
  void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const std::string why = ::dlerror();
    const bool absent = why.find("No such file") != std::string::npos;
    const std::string reason = RINGCOMM_NO_CUDA;
    RINGCOMM_CHECK(!absent || !wanted.empty(), "this build serves CPU tensors only (",
                   reason.empty() ? why : reason,
                   "): run 'pip install ringcomm-cuda' if it came in a wheel, build it where nvcc "
                   "is, with RINGCOMM_CUDA=on, or use the backend 'cpu:ringcomm,cuda:nccl'");
    throw UsageError(str("the library for CUDA tensors cannot be opened: ", why));
  }
  const auto function = reinterpret_cast<cuda::ApiFunction>(::dlsym(library, cuda::kApiSymbol));
  cuda::Api* const api = function == nullptr ? nullptr : function(RINGCOMM_INTERFACE);
  RINGCOMM_CHECK(api != nullptr, path, " belongs to another build of ringcomm: build it again");
  return api;
}

}  // namespace

cuda::Api& device_api() {
  static std::mutex mutex;
  static cuda::Api* api = nullptr;
  const std::lock_guard lock(mutex);
  if (api == nullptr) {
    cuda::Api* const opened = open();
    const std::string why = opened->unusable();
    RINGCOMM_CHECK(why.empty(), "CUDA tensors cannot be served: ", why);
    api = opened;
  }
  return *api;
}

bool device_is_simulated() {
  static const bool simulated =
      !Process::get().config().cuda_library.empty() && device_api().simulated();
  return simulated;
}

}  // namespace ringcomm
