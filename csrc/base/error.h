// The five errors of ringcomm. They are thrown anywhere below, caught by the engine
// that runs the operation (host/host_engine.cc), and mapped once to torch's types (torch/errors.h).
//
// A message is one sentence that a user can act on. It tells what happened, where, and what to do.
#pragma once

#include <cerrno>
#include <cstring>
#include <functional>
#include <locale>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace ringcomm {

// A rank is the position of a process (or a thread, in tests) in its group: 0 … size - 1.
using Rank = int;

// The caller asked for something impossible; nothing was sent and the group still works.
struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Tells whether an errno is about a limit of this process or host, for which no peer is to blame.
inline bool is_own_limit(int code) {
  return code == EMFILE || code == ENFILE || code == ENOBUFS || code == ENOMEM;
}

// The operating system refused; `code` is the errno.
class SystemError : public std::runtime_error {
 public:
  explicit SystemError(const std::string& what, int code = errno)
      : std::runtime_error(what + ": " + std::strerror(code) + remedy(code)), code_(code) {}
  int code() const { return code_; }

 private:
  static const char* remedy(int code) {
    if (code == EMFILE) return ": raise this process's limit of descriptors (`ulimit -n`)";
    return code == ENFILE ? ": raise this host's limit of descriptors (`sysctl fs.file-max`)" : "";
  }
  int code_;
};

// A peer died, left, or failed first.
class PeerError : public std::runtime_error {
 public:
  PeerError(Rank rank, const std::string& what) : std::runtime_error(what), rank_(rank) {}
  Rank rank() const { return rank_; }

 private:
  Rank rank_;
};

// Ranks of one group called different collectives, or the same one with different arguments.
struct MismatchError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A peer did not do its part before the deadline.
struct TimeoutError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Calls `act` at the end of a scope, however that is left.
template <typename Act>
struct Finally {
  const Act act;
  ~Finally() { act(); }
};

// Joins its arguments into one string: str("rank ", 3, " left"). Other ranks read such texts, so
// the program's locale has no part in them: it may write 40000 as 40,000.
template <typename... Parts>
std::string str(const Parts&... parts) {
  std::ostringstream out;
  out.imbue(std::locale::classic());
  (out << ... << parts);
  return out.str();
}

// Reads what str() has written.
struct TextReader : std::istringstream {
  explicit TextReader(const std::string& text) : std::istringstream(text) {
    imbue(std::locale::classic());
  }
};

// Joins what `text` makes of each item: "a, b, c".
template <typename Items, typename Text = std::identity>
std::string joined(const Items& items, const Text& text = {}) {
  std::string all;
  for (const auto& item : items) all += str(all.empty() ? "" : ", ", text(item));
  return all;
}

// Returns "rank 3", or "ranks 1, 2".
inline std::string list_of(const std::vector<Rank>& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + joined(ranks);
}

}  // namespace ringcomm

// Throws UsageError with the given parts unless `condition` holds.
#define RINGCOMM_CHECK(condition, ...)                                            \
  do {                                                                            \
    if (!(condition)) throw ::ringcomm::UsageError(::ringcomm::str(__VA_ARGS__)); \
  } while (false)
