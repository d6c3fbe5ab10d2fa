// Rules take the place of the table: an algorithm wherever a collective has it, "ring", or by
// collective and size, "all_reduce:64K-1M=swing,broadcast=tree".
#pragma once

#include <limits>

#include "plan/select.h"

namespace ringcomm {

struct Rule {
  std::optional<Collective> collective = std::nullopt;  // none: each that has the algorithm
  uint64_t from = 0, to = std::numeric_limits<uint64_t>::max();  // of message_bytes()
  Algorithm algorithm = Algorithm::kRing;
};

class Rules {
 public:
  Rules() = default;
  // Throws UsageError, which says what is wrong, and with which rule.
  explicit Rules(const std::string& text);

  const std::string& text() const { return text_; }  // one word; empty: nothing is asked for
  // Returns the algorithm of the first rule that fits, or the kernel.
  std::optional<Algorithm> find(const Shape& shape, bool kernels = false) const;
  std::vector<Algorithm> registered() const;  // that rules name
  bool name(Algorithm algorithm) const;

 private:
  std::string text_;
  std::vector<Rule> rules_;
};

}  // namespace ringcomm
