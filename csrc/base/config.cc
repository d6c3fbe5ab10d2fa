#include "base/config.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <string_view>

namespace ringcomm {
namespace {

std::optional<std::string> variable(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

LogLevel parse_level(const std::string& text) {
  const std::vector<std::string> names = {"debug", "info", "warning", "error", "off"};
  const auto found = std::find(names.begin(), names.end(), text);
  RINGCOMM_CHECK(found != names.end(), "RINGCOMM_LOG=", text,
                 " is not a level: use debug, info, warning, error or off");
  return static_cast<LogLevel>(found - names.begin());
}

std::chrono::microseconds parse_spin(const std::string& text) {
  char* end = nullptr;
  const long value = std::strtol(text.c_str(), &end, 10);
  RINGCOMM_CHECK(*end == '\0' && value >= 0 && value <= 1'000'000, "RINGCOMM_SPIN_US=", text,
                 " is not a number of microseconds from 0 to 1000000");
  return std::chrono::microseconds(value);
}

// Read at run time, or when ringcomm is built and tested.
const std::vector<std::string>& known_variables() {
  static const std::vector<std::string> names = {
      "RINGCOMM_LOG",        "RINGCOMM_ALGORITHM", "RINGCOMM_SPIN_US", "RINGCOMM_IFNAME",
      "RINGCOMM_PORTS",      "RINGCOMM_SANITIZE",  "RINGCOMM_CUDA",    "RINGCOMM_CUDA_ARCHS",
      "RINGCOMM_TEST_LEVEL", "RINGCOMM_WERROR"};
  return names;
}

std::vector<std::string> unknown_variables() {
  std::vector<std::string> warnings;
  constexpr std::string_view prefix = "RINGCOMM_";
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    if (!text.starts_with(prefix)) continue;
    const std::string name(text.substr(0, text.find('=')));
    const auto& known = known_variables();
    if (std::find(known.begin(), known.end(), name) != known.end()) continue;
    warnings.push_back(str("unknown environment variable ", name, " is ignored: did you mean ",
                           nearest(name, known), "?"));
  }
  return warnings;
}

}  // namespace

std::string nearest(const std::string& word, const std::vector<std::string>& known) {
  std::string best;
  size_t fewest = SIZE_MAX;
  for (const std::string& candidate : known) {
    std::vector<size_t> row(candidate.size() + 1);
    std::iota(row.begin(), row.end(), size_t{0});
    for (size_t i = 0; i < word.size(); ++i) {  // Levenshtein's distance, one row at a time
      size_t diagonal = std::exchange(row[0], i + 1);
      for (size_t j = 0; j < candidate.size(); ++j) {
        const size_t replaced = diagonal + (word[i] == candidate[j] ? 0 : 1);
        diagonal = std::exchange(row[j + 1], std::min({row[j] + 1, row[j + 1] + 1, replaced}));
      }
    }
    if (row.back() < fewest) {
      fewest = row.back();
      best = candidate;
    }
  }
  return best;
}

Config Config::from_environment() {
  Config config;
  if (const auto value = variable("RINGCOMM_LOG")) config.log = parse_level(*value);
  if (const auto value = variable("RINGCOMM_SPIN_US")) config.spin = parse_spin(*value);
  config.algorithm = variable("RINGCOMM_ALGORITHM");
  config.ifname = variable("RINGCOMM_IFNAME").value_or("");
  config.ports = variable("RINGCOMM_PORTS").value_or("");
  config.run_id = variable("TORCHELASTIC_RUN_ID").value_or("none");
  config.restart = variable("TORCHELASTIC_RESTART_COUNT").value_or("0");
  config.warnings = unknown_variables();
  return config;
}

}  // namespace ringcomm
