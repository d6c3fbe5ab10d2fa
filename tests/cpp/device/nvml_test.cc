// Nvml (csrc/device/nvml.h) over a library of the test's own: this program.
#include "device/nvml.h"

#include "cpp/harness.h"

namespace {

const std::string kFirst = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f";
const std::string kSecond = "GPU-00010203-0405-0607-0809-0a0b0c0d0eff";
int broken = 0;  // the status that a link has

}  // namespace

extern "C" {
#pragma GCC visibility push(default)
int nvmlInit_v2() { return 0; }
int nvmlDeviceGetHandleByUUID(const char* uuid, void** device) {
  if (uuid != kFirst && uuid != kSecond) return 6;  // NVML_ERROR_NOT_FOUND
  *device = const_cast<std::string*>(uuid == kFirst ? &kFirst : &kSecond);
  return 0;
}
int nvmlDeviceGetP2PStatus(void* one, void* other, int index, int* status) {
  if (one == other || index != 2) return 2;  // NVML_ERROR_INVALID_ARGUMENT
  *status = broken;
  return 0;
}
#pragma GCC visibility pop
}

namespace ringcomm::testing {
namespace {

using cuda::Nvml;
using cuda::Uuid;

constexpr Uuid kOne{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

Uuid other(uint8_t last) {
  Uuid uuid = kOne;
  uuid.back() = last;
  return uuid;
}

void joined_by_nvlink() {
  const Nvml nvml(nullptr);
  broken = 0;
  require(nvml.nvlink(kOne, other(0xff)), "a link that works");
  broken = 4;  // not supported
  require(!nvml.nvlink(kOne, other(0xff)), "a link that does not");
  broken = 0;
  require(!nvml.nvlink(kOne, other(0x7f)), "a GPU that is not there");
}

void without_the_library() {
  require(!Nvml("libthere-is-none.so.1").nvlink(kOne, other(0xff)), "no library");
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  using namespace ringcomm::testing;
  return run_checks(
      {{"joined by NVLink", joined_by_nvlink}, {"without the library", without_the_library}}, argc,
      argv);
}
