// One line a message on stderr: "ringcomm INFO rank 1 of 'default': ...". RINGCOMM_LOG sets the
// level; by default warnings and errors are shown.
#pragma once

#include <poll.h>
#include <unistd.h>

#include <cstdint>

#include "base/error.h"

namespace ringcomm {

enum class LogLevel : uint8_t { kDebug, kInfo, kWarning, kError, kOff };

class Logger {
 public:
  Logger(LogLevel level, std::string who) : level_(level), who_(std::move(who)) {}

  bool shows(LogLevel level) const { return level >= level_; }
  template <typename... Parts>
  void info(const Parts&... parts) const {
    if (shows(LogLevel::kInfo)) write("INFO", str(parts...));
  }
  template <typename... Parts>
  void warning(const Parts&... parts) const {
    if (shows(LogLevel::kWarning)) write("WARNING", str(parts...));
  }

 private:
  // One write call, so that lines of several ranks on one terminal do not mix.
  void write(const char* level, const std::string& text) const {
    const auto line = str("ringcomm ", level, who_.empty() ? "" : " ", who_, ": ", text, "\n");
    // A reader that has stopped, as a terminal after Ctrl-S, must not stop the network thread.
    pollfd ready{STDERR_FILENO, POLLOUT, 0};
    if (::poll(&ready, 1, 100) != 1 || ready.revents != POLLOUT) return;
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
  }
  LogLevel level_ = LogLevel::kWarning;
  std::string who_;
};

}  // namespace ringcomm
