#include "plan/rules.h"

#include <algorithm>
#include <charconv>

#include "plan/registry.h"

namespace ringcomm {
namespace {

constexpr size_t kMostText = 2000;  // ranks tell it to one another

bool has(Collective collective, Algorithm algorithm) {
  if (is_registered(algorithm)) return serves(algorithm, collective);
  if (is_kernel(algorithm)) return kernel_serves(algorithm, collective);
  return std::ranges::count(algorithms_of(collective), algorithm) > 0;
}

uint64_t bytes_in(const std::string& text, const std::string& rule) {
  uint64_t value = 0;
  const char* const end = text.data() + text.size();
  const auto [at, error] = std::from_chars(text.data(), end, value);
  const std::string unit(at, end);
  const size_t power = std::string("KMG").find(unit);
  const bool known = unit.empty() || (unit.size() == 1 && power != std::string::npos);
  const int shift = unit.empty() ? 0 : 10 * (1 + static_cast<int>(power));
  RINGCOMM_CHECK(error == std::errc() && known && value <= UINT64_MAX >> 30,
                 "RINGCOMM_ALGORITHM=", rule, ": '", text,
                 "' is no number of bytes, such as 4096, 64K or 1M");
  return value << shift;
}

// "all_reduce:64K-1M=swing", "all_reduce=swing", "swing"
Rule rule_in(const std::string& text) {
  const size_t equals = text.find('=');
  Rule rule{.algorithm =
                algorithm_called(text.substr(equals == std::string::npos ? 0 : equals + 1))};
  if (equals == std::string::npos) return rule;
  const std::string left = text.substr(0, equals);
  const size_t colon = left.find(':');
  const std::string name = left.substr(0, colon);
  rule.collective = collective_called(name);
  RINGCOMM_CHECK(rule.collective, "RINGCOMM_ALGORITHM=", text, ": there is no collective '", name,
                 "'");
  RINGCOMM_CHECK(has(*rule.collective, rule.algorithm), "RINGCOMM_ALGORITHM=", text, ": ",
                 to_string(*rule.collective), " has no algorithm '", to_string(rule.algorithm),
                 "'");
  if (colon == std::string::npos) return rule;
  const std::string range = left.substr(colon + 1);
  const size_t dash = range.find('-');
  RINGCOMM_CHECK(dash != std::string::npos, "RINGCOMM_ALGORITHM=", text, ": '", range,
                 "' is no range of bytes, such as 64K-1M, or 1M- without an end");
  // Ranks may send different amounts in an all_to_all, and they must all choose alike.
  RINGCOMM_CHECK(rule.collective != Collective::kAllToAll, "RINGCOMM_ALGORITHM=", text,
                 ": an all_to_all is chosen without a range of bytes");
  if (dash > 0) rule.from = bytes_in(range.substr(0, dash), text);
  if (dash + 1 < range.size()) rule.to = bytes_in(range.substr(dash + 1), text);
  return rule;
}

}  // namespace

Rules::Rules(const std::string& text) : text_(text) {
  RINGCOMM_CHECK(text.size() <= kMostText, "RINGCOMM_ALGORITHM has ", text.size(),
                 " letters: at most ", kMostText);
  std::istringstream in(text);
  for (std::string rule; std::getline(in, rule, ',');) rules_.push_back(rule_in(rule));
}

std::optional<Algorithm> Rules::find(const Shape& shape, bool kernels) const {
  if (rules_.empty()) return std::nullopt;
  const uint64_t bytes = message_bytes(shape);
  for (const Rule& rule : rules_) {
    const bool meant = rule.collective ? *rule.collective == shape.collective
                                       : has(shape.collective, rule.algorithm);
    if (meant && is_kernel(rule.algorithm) == kernels && rule.from <= bytes && bytes <= rule.to)
      return rule.algorithm;
  }
  return std::nullopt;
}

bool Rules::name(Algorithm algorithm) const {
  return std::ranges::count(rules_, algorithm, &Rule::algorithm) > 0;
}

std::vector<Algorithm> Rules::registered() const {
  std::vector<Algorithm> all;
  for (const Rule& rule : rules_) {
    if (is_registered(rule.algorithm)) all.push_back(rule.algorithm);
  }
  return all;
}

}  // namespace ringcomm
