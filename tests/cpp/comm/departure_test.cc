// A rank that leaves harms only operations that it had not finished, however it leaves.
//
// Nothing here is left to luck: the last rank has begun an operation and given all that the others
// need, and is held in there, by its callback for interrupts, until they have finished it and gone.
#include <csignal>

#include "cpp/oracle.h"
#include "cpp/processes.h"

namespace ringcomm::testing {
namespace {

using Millis = std::chrono::milliseconds;
constexpr auto kLong = std::chrono::seconds(20);  // a guard against hangs

enum class Way { kAbort, kDestroy, kException, kKill };

// Memory in which the forked ranks tell one another how far they are.
struct Shared {
  std::atomic<int> held{0};   // partner: those who wait for the rank that is held
  std::atomic<int> ready{0};  // partner: the rank that waits for all of them
  std::atomic<int> over{0};   // partner: those who must not end before the test does

  static Shared& make() {
    void* at =
        ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) throw SystemError("mmap");
    return *new (at) Shared;  // the test program's end frees it
  }
};

void await(const std::string& what, const std::function<bool()>& condition) {
  const Deadline deadline(kLong);
  while (!condition()) {
    require(!deadline.passed(), "waited in vain for ", what);
    ::usleep(200);
  }
}

std::shared_ptr<Communicator> join(Store& store, Rank rank, int size,
                                   std::function<void()> interrupt = nullptr) {
  CommunicatorOptions options;
  options.rank = rank;
  options.size = size;
  options.timeout = kLong;
  options.interrupt = std::move(interrupt);
  return Communicator::create(store, options);
}

Call call_of(Collective collective, int size) {
  const Rank root = 0;
  Call call{collective, root, false, ReduceOp::kSum, 12, {}, {}, 7};
  call.shards.assign(static_cast<size_t>(size), 3);
  call.splits.assign(static_cast<size_t>(size),
                     std::vector<uint64_t>(static_cast<size_t>(size), 2));
  return call;
}

std::string failure_of(Communicator& group, const Call& call) {
  Trial trial(call, group.size(), group.rank());
  try {
    group.run(trial.operation);
  } catch (const PeerError& error) {
    return error.what();
  }
  throw Failure("the operation after it did not fail");
}

void require_in(const std::string& text, const std::string& part) {
  require(text.find(part) != std::string::npos, "'", part, "' is not in: ", text);
}

void leave(Communicator& group, Way way) {
  switch (way) {
    case Way::kAbort:
      return group.abort("the user said so");
    case Way::kDestroy:
      group.shutdown();
      return;
    case Way::kException:
      Groups::close_all(std::chrono::seconds(1), "ZeroDivisionError: no more data");
      return;
    case Way::kKill:
      ::kill(::getpid(), SIGKILL);
  }
}

std::string words_of(Way way) {
  switch (way) {
    case Way::kAbort:
      return "rank 0 failed: the user said so";
    case Way::kDestroy:
      return "rank 0 has left the group";
    case Way::kException:
      return "rank 0 failed: its program ended with ZeroDivisionError: no more data";
    case Way::kKill:
      return "Connection closed by rank 0: its process died";
  }
  return {};
}

bool has_gone(Communicator& group, Rank peer) {
  const PeerState state = group.state().transport().state(peer, Board::kHost);
  return state.left || state.failed || group.state().transport().connection_lost(peer);
}

struct Case {
  int size;
  Way way;
  bool tcp;
  Collective collective;
};

// The last rank: it hears of all departures in the middle of the operation.
void be_held(Store& store, const Case& the, Shared& shared) {
  const Rank rank = the.size - 1;
  Communicator* here = nullptr;
  const auto interrupt = [&] {
    if (here == nullptr || shared.held.exchange(1) != 0) return;
    await("the others to go", [&] {
      for (Rank peer = 0; peer < rank; ++peer) {
        if (!has_gone(*here, peer)) return false;
      }
      return true;
    });
  };
  const auto group = join(store, rank, the.size, interrupt);
  const Call first = call_of(Collective::kAllReduce, the.size);
  perform(*group, first, 1);
  here = group.get();
  const Call call = call_of(the.collective, the.size);
  Trial trial(call, the.size, rank);
  const TaskPtr task = group->host().submit(trial.operation);
  Trial after(call_of(Collective::kBarrier, the.size), the.size, rank);
  const TaskPtr next = group->host().submit(after.operation);  // in the queue behind it
  require(group->wait(*task, kLong), "it ends");
  if (task->error) std::rethrow_exception(task->error);
  trial.check(2);
  require(shared.held == 1, "it was not held");
  require(group->wait(*next, kLong) && next->error, "what comes after it fails");
  require_in(group->state().failure(), "barrier #3: ");
  require_in(group->state().failure(), words_of(the.way));
  require_in(failure_of(*group, first), words_of(the.way));
  shared.over = 1;
}

void use_tcp() {
  ProcessConfig config;
  config.transport = "tcp";
  Process::get().configure(config);
}

void leaves(const Case& the) {
  SharedStore store;
  Shared& shared = Shared::make();
  const auto statuses = run_processes(the.size, [&](Rank rank) {
    if (the.tcp) use_tcp();
    if (rank == the.size - 1) return be_held(store, the, shared);
    const auto group = join(store, rank, the.size);
    const Call first = call_of(Collective::kAllReduce, the.size);
    perform(*group, first, 1);
    await("the last rank to be held", [&] { return shared.held == 1; });
    perform(*group, call_of(the.collective, the.size), 2);
    // No rank goes before all have finished it: they fail in the next one.
    ++shared.ready;
    await("the others to finish", [&] { return shared.ready == the.size - 1; });
    if (rank == 0) return leave(*group, the.way);  // and its process ends
    require_in(failure_of(*group, call_of(Collective::kBarrier, the.size)), words_of(the.way));
    await("the last rank to end", [&] { return shared.over == 1; });
  });
  for (size_t rank = 0; rank < statuses.size(); ++rank) {
    const bool killed = rank == 0 && the.way == Way::kKill;
    require(killed ? WIFSIGNALED(statuses[rank]) : statuses[rank] == 0, "rank ", rank, ": ",
            statuses[rank]);
  }
}

// ---- send and recv

MessagePtr message_of(bool sending, Rank peer, uint32_t tag, std::vector<std::byte>& data) {
  const auto message = std::make_shared<Message>(kLong);
  message->sending = sending;
  message->peer = peer;
  message->tag = tag;
  message->data = {data.data(), data.size()};
  return message;
}

void require_good(Communicator& group, const MessagePtr& message) {
  require(group.wait(*message, kLong), "it ends");
  if (message->error) std::rethrow_exception(message->error);
}

// Messages that it has sent are received, also by a rank that had not asked for them. Nobody waits
// for messages that it has not sent, and messages between others go on.
void messages(Way way, bool tcp) {
  SharedStore store;
  Shared& shared = Shared::make();
  const auto statuses = run_processes(3, [&](Rank rank) {
    if (tcp) use_tcp();
    const auto group = join(store, rank, 3);
    perform(*group, call_of(Collective::kAllReduce, 3), 1);
    std::vector<std::byte> small(8000, std::byte{1}), more(8000, std::byte{2}), none(8000);
    std::vector<std::byte> large(300'000, std::byte{3});
    if (rank == 0) {
      for (auto* data : {&small, &more}) {
        const auto message = message_of(true, 2, data == &small ? 1 : 2, *data);
        group->messages().post(message);
        require_good(*group, message);
      }
      leave(*group, way);
      return await("the last rank to end", [&] { return shared.over == 1; });
    }
    if (rank == 1) {
      const auto message = message_of(true, 2, 3, large);
      await("the last rank to look", [&] { return shared.ready == 1; });
      group->messages().post(message);
      require_good(*group, message);
      return await("the last rank to end", [&] { return shared.over == 1; });
    }
    await("rank 0 to go", [&] { return has_gone(*group, 0); });
    std::vector<std::byte> first(8000), second(8000), third(300'000);
    const auto other = message_of(false, 1, 3, third);
    group->messages().post(other);
    group->state().check();
    const auto message = message_of(false, 0, 1, first);
    group->messages().post(message);
    group->state().check();
    require_good(*group, message);
    shared.ready = 1;
    require_good(*group, other);
    const auto two = message_of(false, 0, 2, second);
    group->messages().post(two);
    group->state().check();
    require_good(*group, two);
    require(first == small && second == more && third == large, "what was sent");
    const auto missing = message_of(false, 0, 4, none);
    group->messages().post(missing);
    require(group->wait(*missing, kLong) && missing->error, "nobody sends it");
    require_in(group->state().failure(), "recv uint8[8000] tag 4 from rank 0: ");
    require_in(group->state().failure(), words_of(way).substr(way == Way::kKill ? 18 : 0));
    shared.over = 1;
  });
  for (size_t rank = 0; rank < statuses.size(); ++rank) {
    const bool killed = rank == 0 && way == Way::kKill;
    require(killed ? WIFSIGNALED(statuses[rank]) : statuses[rank] == 0, "rank ", rank, ": ",
            statuses[rank]);
  }
}

// Rank 1 says that rank 0 has failed before rank 0 says so itself: its messages may still be on the
// way, and one that it sends only then is received.
void message_after_hearsay() {
  SharedStore store;
  Shared& shared = Shared::make();
  require_all_zero(run_processes(3, [&](Rank rank) {
    use_tcp();
    const auto group = join(store, rank, 3);
    perform(*group, call_of(Collective::kAllReduce, 3), 1);
    Transport& transport = group->state().transport();
    std::vector<std::byte> data(8000, std::byte{static_cast<unsigned char>(rank)});
    const auto over = [&] { await("the last rank to end", [&] { return shared.over == 1; }); };
    ++shared.held;
    if (rank == 1) {
      await("all to be through", [&] { return shared.held == 3; });
      RankState words;
      words.failed = 1;
      std::strcpy(words.failure, "it has gone");
      const std::byte* const begin = reinterpret_cast<const std::byte*>(&words);
      transport.wire(2)->post(
          {.type = FrameType::kState, .channel = transport.group_id(), .offset = 1},  // of rank 0
          Payload(std::vector(begin, begin + sizeof words)));
      transport.wire(2)->flush();
      return over();
    }
    const auto message = message_of(rank == 0, 2 - rank, 1, data);
    if (rank == 0) {
      await("rank 2 to have heard", [&] { return shared.ready == 1; });
      group->messages().post(message);
      require_good(*group, message);
      leave(*group, Way::kAbort);
      return over();
    }
    group->messages().post(message);
    await("rank 1 to tell", [&] { return transport.state(0, Board::kHost).failed; });
    for (int i = 0; i < 3; ++i) group->state().check();
    require(!message->done, "it is still awaited");
    shared.ready = 1;
    require_good(*group, message);
    require(data[7999] == std::byte{0}, "what was sent");
    const auto missing = message_of(false, 0, 2, data);
    group->messages().post(missing);
    require(group->wait(*missing, kLong) && missing->error, "nobody sends it");
    shared.over = 1;
  }));
}

// A collective of this rank's fails. A message that had come by then, unseen, still counts.
void message_before_a_failure() {
  SharedStore store;
  require_all_zero(run_processes(2, [&](Rank rank) {
    const auto group = join(store, rank, 2);
    std::vector<std::byte> data(4000, std::byte{static_cast<unsigned char>(5 - 5 * rank)});
    const auto message = message_of(rank == 0, 1 - rank, 0, data);
    if (rank == 1) {
      group->messages().post(message);
      await("rank 0 to go", [&] { return has_gone(*group, 0); });
      require_in(failure_of(*group, call_of(Collective::kBarrier, 2)), words_of(Way::kAbort));
      require_good(*group, message);
      return require(data[3999] == std::byte{5}, "what was sent");
    }
    group->messages().post(message);
    require_good(*group, message);
    leave(*group, Way::kAbort);
  }));
}

// A rank has met the others and cannot make its group: they have one, and hear in it why.
void no_group(bool tcp) {
  SharedStore store;
  require_all_zero(run_processes(3, [&](Rank rank) {
    ProcessConfig config;
    if (tcp) config.transport = "tcp";
    if (rank == 1) {
      config.ring = [](int, uint64_t) -> int { throw std::runtime_error("there is no ring"); };
    }
    Process::get().configure(config);
    if (rank != 1) {
      const auto group = join(store, rank, 3);
      const std::string text = failure_of(*group, call_of(Collective::kAllReduce, 3));
      return require_in(text, "rank 1 failed: there is no ring");
    }
    try {
      join(store, rank, 3);
    } catch (const std::runtime_error& error) {
      return require_in(error.what(), "there is no ring");
    }
    throw Failure("it has a group");
  }));
}

const char* name_of(Way way) {
  const char* const names[] = {"abort", "destroy", "exception", "kill"};
  return names[static_cast<int>(way)];
}

std::vector<Check> all_checks() {
  std::vector<Check> checks;
  for (const bool tcp : {false, true}) {
    for (const Way way : {Way::kAbort, Way::kDestroy, Way::kException, Way::kKill}) {
      // Bytes that a killed process had not handed to the kernel yet are lost.
      if (tcp && way == Way::kKill) continue;
      const std::string name = str(tcp ? "tcp/" : "", name_of(way));
      for (const int size : {2, 3, 4}) {
        for (int i = 0; i < kCollectives; ++i) {
          const Case the{size, way, tcp, static_cast<Collective>(i)};
          // No rank of three gets through a barrier before the last one has passed something on.
          if (size > 2 && the.collective == Collective::kBarrier) continue;
          checks.push_back(
              {str(name, "/", to_string(the.collective), "/", size), [=] { leaves(the); }});
        }
      }
      checks.push_back({name + "/messages", [=] { messages(way, tcp); }});
    }
    checks.push_back({tcp ? "tcp/no group" : "no group", [=] { no_group(tcp); }});
  }
  checks.push_back({"message before a failure", message_before_a_failure});
  checks.push_back({"tcp/message after hearsay", message_after_hearsay});
  return checks;
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  return ringcomm::testing::run_checks(ringcomm::testing::all_checks(), argc, argv);
}
