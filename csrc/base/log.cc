#include "base/log.h"

#include <unistd.h>

namespace ringcomm {

void Logger::write(const char* level, const std::string& text) const {
  // One write call, so that lines of several ranks on one terminal do not mix.
  const std::string line = str("ringcomm ", level, who_.empty() ? "" : " ", who_, ": ", text, "\n");
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace ringcomm
