// The library's one symbol. Whatever is behind the table of functions says so in api().
#include "cuda/library.h"

#include <cstring>

#include "cuda/team.h"

namespace ringcomm::cuda {

std::unique_ptr<Api> make_api();  // api_cuda.cc; tests/sim/api_sim.cc

namespace {

class TheLibrary final : public Library {
 public:
  Api& api() override { return *api_; }
  std::unique_ptr<Team> make_team(const TeamOptions& options) override {
    return std::make_unique<DeviceTeam>(*api_, options);
  }

 private:
  const std::unique_ptr<Api> api_ = make_api();
};

}  // namespace
}  // namespace ringcomm::cuda

extern "C" [[gnu::visibility("default")]] ringcomm::cuda::Library* ringcomm_cuda_library(
    const char* interface) {
  static ringcomm::cuda::Library* const library = new ringcomm::cuda::TheLibrary;
  return std::strcmp(interface, RINGCOMM_INTERFACE) == 0 ? library : nullptr;
}
