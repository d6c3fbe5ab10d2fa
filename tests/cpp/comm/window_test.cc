// Windows: puts and signals against a model of what each rank has put where, over shared memory and
// TCP, with ranks that only compute, that leave, and that have closed the window.
#include <deque>
#include <random>

#include "cpp/oracle.h"
#include "cpp/processes.h"

namespace ringcomm::testing {
namespace {

constexpr auto kLong = std::chrono::seconds(120);  // a guard against hangs
constexpr uint64_t kRegion = 1 << 20;  // bytes that a rank writes in each of another's windows
constexpr int kWindows = 2;            // and one more for the answers
constexpr int kPuts = 8'500;           // of each rank, to each other one

std::shared_ptr<Communicator> join(Store& store, Rank rank, int size, bool tcp) {
  ProcessConfig config;
  if (tcp) config.transport = "tcp";
  Process::get().configure(config);
  CommunicatorOptions options;
  options.rank = rank;
  options.size = size;
  options.timeout = kLong;
  return Communicator::create(store, options);
}

using Bytes = std::vector<std::byte>;

MessagePtr post(Communicator& group, bool sending, Rank peer, uint32_t tag, Span data,
                std::optional<uint64_t> into = std::nullopt,
                std::chrono::milliseconds timeout = kLong) {
  auto message = std::make_shared<Message>(timeout);
  message->sending = sending;
  message->peer = peer;
  message->tag = tag;
  message->data = data;
  message->into = into;
  group.messages().post(message);
  return message;
}

void finish(Communicator& group, const MessagePtr& message) {
  require(group.wait(*message), message->describe(), " does not end");
  if (message->error) std::rethrow_exception(message->error);
}

void meet(Communicator& group) {
  Operation barrier;
  barrier.collective = Collective::kBarrier;
  group.run(barrier);
}

// The steps of one rank's towards another. Both sides make the same course from its seed.
class Course {
 public:
  Course(Rank from, Rank to) : chance_(static_cast<uint64_t>(from * 64 + to)) {}

  struct Step {
    bool signals = false;  // else a put
    int window = 0;
    uint64_t at = 0;  // in the region
    Bytes data;
  };
  bool over() const { return made_ == kPuts; }
  Step next() {
    Step step;
    step.signals = ++made_ == kPuts || chance_() % 8 == 0;
    step.window = static_cast<int>(chance_() % kWindows);
    if (step.signals) return step;
    const uint64_t most = chance_() % 64 == 0 ? 200'000 : chance_() % 8 == 0 ? 20'000 : 500;
    step.data.resize(1 + chance_() % most);
    step.at = chance_() % (kRegion - step.data.size());
    for (size_t i = 0; i < step.data.size(); i += 8) {
      const uint64_t word = chance_();
      std::memcpy(&step.data[i], &word, std::min<size_t>(8, step.data.size() - i));
    }
    return step;
  }

 private:
  std::mt19937_64 chance_;
  int made_ = 0;
};

class Member {
 public:
  Member(Communicator& group) : group_(group) {
    const auto size = static_cast<uint64_t>(group.size());
    for (int i = 0; i <= kWindows; ++i) {
      memory_.emplace_back(size * kRegion);
      tags_.push_back(group.messages().open_window({memory_[at(i)].data(), size * kRegion}));
    }
    meet(group);
  }

  // Does to all others, in random turns, what their courses say. After a signal it waits for the
  // answer before it writes there again.
  void write(Rank self) {
    struct Target {
      Rank rank;
      Course course;
      MessagePtr answer;
    };
    std::vector<Target> targets;
    for (Rank to = 0; to < group_.size(); ++to) {
      if (to != self) targets.push_back({to, Course(self, to), nullptr});
    }
    std::mt19937_64 chance(static_cast<uint64_t>(self));
    std::deque<std::pair<MessagePtr, Bytes>> puts;
    while (!targets.empty()) {
      const auto target = targets.begin() + static_cast<ptrdiff_t>(chance() % targets.size());
      if (target->answer) finish(group_, std::exchange(target->answer, nullptr));
      if (target->course.over()) {
        targets.erase(target);
        continue;
      }
      Course::Step step = target->course.next();
      const uint32_t tag = tags_[at(step.window)];
      if (step.signals) {
        finish(group_, post(group_, true, target->rank, tag, {}));
        target->answer = post(group_, false, target->rank, tags_[kWindows], {});
        continue;
      }
      const Span data{step.data.data(), step.data.size()};
      const uint64_t into = static_cast<uint64_t>(self) * kRegion + step.at;
      puts.emplace_back(post(group_, true, target->rank, tag, data, into), std::move(step.data));
      if (puts.size() < 16) continue;
      finish(group_, puts.front().first);
      puts.pop_front();
    }
    for (const auto& put : puts) finish(group_, put.first);
  }

  // Looks, at each of its signals, whether all that a rank has put by then is here, and answers.
  void check(Rank from) {
    Course course(from, group_.rank());
    std::array<Bytes, kWindows> model;
    for (Bytes& window : model) window.resize(kRegion);
    for (int steps = 0; !course.over(); ++steps) {
      const Course::Step step = course.next();
      if (!step.signals) {
        std::ranges::copy(step.data,
                          model[at(step.window)].begin() + static_cast<ptrdiff_t>(step.at));
        continue;
      }
      finish(group_, post(group_, false, from, tags_[at(step.window)], {}));
      for (int i = 0; i < kWindows; ++i) {
        const std::byte* const here = memory_[at(i)].data() + static_cast<uint64_t>(from) * kRegion;
        require(std::memcmp(here, model[at(i)].data(), kRegion) == 0, "rank ", from,
                " put into window ", i, " something else, or elsewhere, by step ", steps);
      }
      finish(group_, post(group_, true, from, tags_[kWindows], {}));
    }
  }

 private:
  static size_t at(int index) { return static_cast<size_t>(index); }

  Communicator& group_;
  std::vector<Bytes> memory_;
  std::vector<uint32_t> tags_;
};

void by_the_model(bool tcp) {
  constexpr int kRanks = 4;
  SharedStore store;
  require_all_zero(run_processes(kRanks, [&](Rank rank) {
    const auto group = join(store, rank, kRanks, tcp);
    Member member(*group);
    run_threads(kRanks, [&](Rank role) { role == rank ? member.write(rank) : member.check(role); });
    meet(*group);
    group->shutdown();
  }));
}

// A rank that is in no call takes in what others put: the put, far larger than a mailbox, ends.
void into_a_rank_that_computes(bool tcp) {
  SharedStore store;
  require_all_zero(run_processes(2, [&](Rank rank) {
    const auto group = join(store, rank, 2, tcp);
    Bytes memory(32 << 20), data(32 << 20, std::byte{7});
    const uint32_t tag = group->messages().open_window({memory.data(), memory.size()});
    meet(*group);
    const Deadline soon(kLong);
    if (rank == 0) {
      finish(*group, post(*group, true, 1, tag, {data.data(), data.size()}, 0));
    } else {
      while (group->messages().put_by(0, tag) < memory.size()) {
        require(!soon.passed(), "nobody takes it in");
        ::usleep(1000);
      }
      require(memory == data, "it is something else");
    }
    meet(*group);
    group->shutdown();
  }));
}

std::string error_of(const std::function<void()>& steps) {
  try {
    steps();
  } catch (const std::exception& error) {
    return error.what();
  }
  throw Failure("all of it ends well");
}

void require_in(const std::string& text, const std::string& part) {
  require(text.find(part) != std::string::npos, "'", part, "' is not in: ", text);
}

// A rank that is killed is named by who waits for its signal.
void death_is_named(bool tcp) {
  SharedStore store;
  const auto statuses = run_processes(2, [&](Rank rank) {
    const auto group = join(store, rank, 2, tcp);
    Bytes memory(100);
    const uint32_t tag = group->messages().open_window({memory.data(), memory.size()});
    meet(*group);
    if (rank == 1) ::kill(::getpid(), SIGKILL);
    const std::string text = error_of([&] { finish(*group, post(*group, false, 1, tag, {})); });
    require_in(text, "wait_signal of window 0 from rank 1: ");
    require_in(text, "rank 1");
  });
  require(statuses[0] == 0 && WIFSIGNALED(statuses[1]), statuses[0], ' ', statuses[1]);
}

// A put where no window is, or beyond its end, fails the group of both, and writes nothing.
void nowhere(bool tcp) {
  for (const bool closed : {false, true}) {
    SharedStore store;
    require_all_zero(run_processes(2, [&](Rank rank) {
      const auto group = join(store, rank, 2, tcp);
      Bytes memory(100), data(60, std::byte{7});
      const uint32_t tag = group->messages().open_window({memory.data(), closed ? 100u : 50u});
      if (closed && rank == 1) group->messages().close_window(tag, false);
      const std::string text = error_of([&] {  // the put may come during the barrier
        meet(*group);
        if (rank == 0) post(*group, true, 1, tag, {data.data(), data.size()}, 0);
        finish(*group, post(*group, false, 1 - rank, tag, {}));
      });
      require_in(text, "keep a window until all ranks have deregistered it");
      if (rank == 0) return;
      require_in(text, closed ? "put 60 bytes at 0 of window 0, which has 0 bytes here"
                              : "put 60 bytes at 0 of window 0, which has 50 bytes here");
      require(memory == Bytes(100), "it is written all the same");
    }));
  }
}

// A put that a stopped process does not take in ends by its timeout, and says what to look at.
void into_a_stopped_rank(bool tcp) {
  SharedStore store;
  const auto statuses = run_processes(2, [&](Rank rank) {
    const auto group = join(store, rank, 2, tcp);
    Bytes memory(64 << 20);
    const uint32_t tag = group->messages().open_window({memory.data(), memory.size()});
    if (rank == 1) store.set("pid", str(::getpid()));
    meet(*group);
    if (rank == 1) ::raise(SIGSTOP);
    const pid_t other = rank == 0 ? std::stoi(store.get("pid")) : 0;
    const Finally over{[&] {
      if (rank == 0) ::kill(other, SIGKILL);
    }};
    const Span data{memory.data(), memory.size()};
    const std::string text = error_of([&] {
      finish(*group, post(*group, true, 1, tag, data, 0, std::chrono::milliseconds(500)));
    });
    require_in(text, "put uint8[67108864] into window 0 of rank 1: Timed out after 0.5");
    require_in(text, "see whether that process is stopped");
  });
  require(statuses[0] == 0 && WIFSIGNALED(statuses[1]), statuses[0], ' ', statuses[1]);
}

std::vector<Check> all_checks() {
  std::vector<Check> checks;
  for (const bool tcp : {false, true}) {
    const std::string way = tcp ? "tcp/" : "";
    checks.push_back({way + "model", [=] { by_the_model(tcp); }});
    checks.push_back({way + "computes", [=] { into_a_rank_that_computes(tcp); }});
    checks.push_back({way + "stopped", [=] { into_a_stopped_rank(tcp); }});
    checks.push_back({way + "death", [=] { death_is_named(tcp); }});
    checks.push_back({way + "nowhere", [=] { nowhere(tcp); }});
  }
  return checks;
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  return ringcomm::testing::run_checks(ringcomm::testing::all_checks(), argc, argv);
}
