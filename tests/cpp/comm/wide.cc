// Hundreds of ranks of the engine on this machine, in network namespaces or on one host: all
// collectives with exact results, their costs, and the outcome when a rank does not do its
// part. lab/wide.py starts it, tests/network/test_wide.py has the results that it must give.
#include <sys/prctl.h>
#include <sys/wait.h>

#include <csignal>

#include "cpp/comm/wide_report.h"
#include "cpp/comm/wide_scenarios.h"

namespace ringcomm::testing {
namespace {

constexpr uint64_t kLeastMemory = uint64_t{1536} << 20;   // that the machine keeps
constexpr auto kAfterFailure = std::chrono::seconds(60);  // for the others, to tell their errors

class Parent {
 public:
  explicit Parent(const WideOptions& options)
      : options_(options),
        board_(Board::make()),
        table_(StoreTable::make()),
        pids_(static_cast<size_t>(options.ranks)),
        ends_(pids_.size(), "is alive") {}

  int run() {
    std::fflush(nullptr);
    board_.began = now_seconds();
    for (Rank rank = 0; rank < options_.ranks; ++rank) start(rank);
    const Deadline deadline(WideRank::seconds(options_.deadline + 5));  // the ranks' own is first
    while (reap()) {
      if (deadline.passed()) end_all("did not end in time");
      if (board_.broken && !failed_) failed_.emplace(kAfterFailure);
      if (failed_ && failed_->passed()) end_all("did not end after another rank had failed");
      const uint64_t left = 1024 * number_in("/proc/meminfo", "MemAvailable:");
      if (left < kLeastMemory) end_all("was ended since this machine lacks memory");
      act();
      ::usleep(5000);
    }
    std::printf("%s\n", Report(options_, board_).text(ends_).c_str());
    return std::ranges::all_of(ends_, [](const auto& end) { return end.empty(); }) ? 0 : 1;
  }

 private:
  void start(Rank rank) {
    const pid_t parent = ::getpid();
    const pid_t child = ::fork();
    if (child < 0) {
      end_all("was ended");
      throw SystemError("fork");
    }
    if (child > 0) {
      pids_[static_cast<size_t>(rank)] = child;
      return;
    }
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(1);
    int status = 0;
    try {
      WideRank self(options_, board_, table_, rank);
      live(self);
    } catch (const std::exception& error) {
      Seat& seat = board_.seat(rank);
      std::snprintf(seat.error, sizeof seat.error, "%s", error.what());
      board_.broken = true;
      status = 1;
    }
    ::_exit(status);
  }

  // False once none is alive.
  bool reap() {
    int status = 0;
    for (pid_t pid; (pid = ::waitpid(-1, &status, WNOHANG)) > 0;) {
      const auto rank = std::ranges::find(pids_, pid) - pids_.begin();
      pids_[static_cast<size_t>(rank)] = 0;
      std::string& end = ends_[static_cast<size_t>(rank)];
      if (end != "is alive") continue;  // ended by this process
      const bool meant = options_.chosen("kill", static_cast<Rank>(rank)) && WIFSIGNALED(status) &&
                         WTERMSIG(status) == SIGKILL;
      end = status == 0 || meant ? "" : str("ended with status ", status);
      if (!end.empty()) board_.broken = true;
    }
    return std::ranges::any_of(pids_, [](pid_t pid) { return pid != 0; });
  }

  void end_all(const std::string& why) {
    for (size_t rank = 0; rank < pids_.size(); ++rank) {
      if (pids_[rank] == 0) continue;
      ends_[rank] = why;
      ::kill(pids_[rank], SIGKILL);
    }
  }

  // Once all ranks are in their loops.
  void act() {
    if (acted_ || (!options_.is("kill") && !options_.is("loop"))) return;
    for (Rank rank = 0; rank < options_.ranks; ++rank) {
      if (board_.seat(rank).loops < 3) return;
    }
    acted_ = true;
    std::puts("looping");
    std::fflush(stdout);
    if (!options_.is("kill")) return;
    board_.killed_at = now_seconds();
    ::kill(pids_.at(static_cast<size_t>(options_.value)), SIGKILL);
  }

  const WideOptions& options_;
  Board& board_;
  StoreTable& table_;
  std::vector<pid_t> pids_;        // 0 once it has ended
  std::vector<std::string> ends_;  // see Report
  bool acted_ = false;
  std::optional<Deadline> failed_;  // from the first error on
};

int run(int argc, char** argv) {
  try {
    const WideOptions options = parse_wide(argc, argv);
    return Parent(options).run();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "wide: %s\n%s", error.what(), kWideUsage);
    return 2;
  }
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) { return ringcomm::testing::run(argc, argv); }
