#include "base/config.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>

namespace ringcomm {
namespace {

std::optional<std::string> variable(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

// Which of `names` the variable has as its value, if it is set.
std::optional<size_t> choice(const char* name, const std::vector<std::string>& names,
                             const char* remedy) {
  const auto text = variable(name);
  if (!text) return std::nullopt;
  const auto found = std::ranges::find(names, *text);
  RINGCOMM_CHECK(found != names.end(), name, "=", *text, remedy);
  return static_cast<size_t>(found - names.begin());
}

// The variable as a number, if it is set. `what` says what it counts.
std::optional<long> number(const char* name, const char* what, long least, long most) {
  const auto text = variable(name);
  if (!text) return std::nullopt;
  char* end = nullptr;
  const long value = std::strtol(text->c_str(), &end, 10);
  RINGCOMM_CHECK(*end == '\0' && value >= least && value <= most, name, "=", *text,
                 " is not a number of ", what, " from ", least, " to ", most);
  return value;
}

// The secret is the job's: a file that others can read is refused.
std::string read_secret(const std::string& path) {
  struct stat status{};
  std::ifstream file(path);
  RINGCOMM_CHECK(file && ::stat(path.c_str(), &status) == 0, "RINGCOMM_SECRET_FILE=", path,
                 " cannot be read");
  RINGCOMM_CHECK((status.st_mode & 077) == 0, "RINGCOMM_SECRET_FILE=", path,
                 " can be read by others: chmod 600 it");
  std::string secret;
  std::getline(file, secret);
  RINGCOMM_CHECK(!secret.empty(), "RINGCOMM_SECRET_FILE=", path, " is empty");
  return secret;
}

}  // namespace

Config Config::from_environment() {
  Config config;
  if (const auto level = choice("RINGCOMM_LOG", {"debug", "info", "warning", "error", "off"},
                                " is not a level: use debug, info, warning, error or off")) {
    config.log = static_cast<LogLevel>(*level);
  }
  if (const auto value = number("RINGCOMM_SPIN_US", "microseconds", 0, 1'000'000)) {
    config.spin = std::chrono::microseconds(*value);
  }
  config.ifname = variable("RINGCOMM_IFNAME").value_or("");
  config.ports = variable("RINGCOMM_PORTS").value_or("");
  config.tcp = choice("RINGCOMM_TRANSPORT", {"auto", "tcp"},
                      " is no transport: use auto, or tcp to have it inside a host too") == 1u;
  config.flows = static_cast<int>(number("RINGCOMM_FLOWS", "connections", 1, 16).value_or(1));
  config.resume =
      std::chrono::seconds(number("RINGCOMM_RESUME_SECONDS", "seconds", 1, 86'400).value_or(30));
  config.secret = variable("RINGCOMM_SECRET").value_or("");
  if (const auto path = variable("RINGCOMM_SECRET_FILE")) config.secret = read_secret(*path);
  config.costs = variable("RINGCOMM_COSTS").value_or("");
  const std::vector<std::string> modes = {"auto", "ipc", "host"};
  const auto mode = choice("RINGCOMM_CUDA_MODE", modes,
                           " is no way for CUDA tensors: use auto, ipc (an error where ranks "
                           "cannot map one another's memory) or host");
  config.cuda_mode = modes[mode.value_or(0)];
  config.cuda_memory = static_cast<uint64_t>(
      number("RINGCOMM_CUDA_MEMORY", "bytes", 1 << 18, int64_t{1} << 40).value_or(0));
  config.cuda_library = variable("RINGCOMM_CUDA_LIBRARY").value_or("");
  config.cuda_connections =
      std::atoi(variable("CUDA_DEVICE_MAX_CONNECTIONS").value_or("8").c_str());
  config.algorithm = variable("RINGCOMM_ALGORITHM");
  config.run_id = variable("TORCHELASTIC_RUN_ID").value_or("none");
  config.restart = variable("TORCHELASTIC_RESTART_COUNT").value_or("0");
  return config;
}

}  // namespace ringcomm
