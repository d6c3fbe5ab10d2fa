// Every failure ends in an exception that names ranks and operation, on every rank, in time.
#include <csignal>
#include <future>

#include "comm/communicator.h"
#include "cpp/processes.h"
#include "cpp/world.h"
#include "host/host_operation.h"

namespace ringcomm::testing {
namespace {

using Millis = std::chrono::milliseconds;

std::shared_ptr<Communicator> join(Store& store, Rank rank, int size, Millis timeout) {
  CommunicatorOptions options;
  options.rank = rank;
  options.size = size;
  options.timeout = timeout;
  return Communicator::create(store, options);
}

struct Buffer {
  explicit Buffer(size_t elements) : data(elements, 1.0f) {}
  Operation operation(Collective collective, Rank root = 0) {
    Operation what;
    what.collective = collective;
    what.dtype = DType::kFloat32;
    what.root = root;
    what.bytes = 4 * data.size();
    what.input = {{reinterpret_cast<std::byte*>(data.data()), what.bytes}};
    what.output = what.input;
    return what;
  }
  std::vector<float> data;
};

// Runs `body` and returns the text of the exception that it must throw within `most` seconds, or
// later on a busy machine.
template <typename Error>
std::string text_of(double most, const std::function<void()>& body) {
  const Deadline clock(std::chrono::hours(1));
  try {
    body();
  } catch (const Error& error) {
    require(clock.elapsed_seconds() < most * slack(), "took ", clock.elapsed_seconds(),
            " s: ", error.what());
    return error.what();
  }
  throw Failure("no exception");
}

void require_in(const std::string& text, const std::string& part) {
  require(text.find(part) != std::string::npos, "'", part, "' is not in: ", text);
}

void require_quick_shutdown(Communicator& group) {
  const Deadline clock(std::chrono::hours(1));
  group.shutdown();
  require(clock.elapsed_seconds() < 2 * slack(), "shutdown took ", clock.elapsed_seconds(), " s");
}

// Every rank learns that rank `odd` called something else, with both descriptions.
void mismatch(int size, const std::function<Operation(Buffer&)>& odd_call,
              const std::string& words) {
  SharedStore store;
  require_all_zero(run_processes(size, [&](Rank rank) {
    const auto group = join(store, rank, size, Millis(20'000));
    Buffer good(1000), other(1001);
    group->run(good.operation(Collective::kAllReduce));
    const std::string text = text_of<std::exception>(1.5, [&] {
      group->run(rank == size - 1 ? odd_call(other) : good.operation(Collective::kAllReduce));
      group->run(good.operation(Collective::kAllReduce));  // where the first had returned already
    });
    require_in(text, "#2");
    require_in(text, "all_reduce float32[1000] SUM");
    require_in(text, words);
    const std::string again = text_of<PeerError>(0.5, [&] { group->run(Operation{}); });
    require_in(again, "has failed before");
    require_quick_shutdown(*group);
  }));
}

void split_mismatch() {
  SharedStore store;
  require_all_zero(run_processes(2, [&](Rank rank) {
    const auto group = join(store, rank, 2, Millis(20'000));
    Operation what;
    what.collective = Collective::kAllToAll;
    std::vector<std::byte> in(100), out(100);
    what.send = {8, 8};
    what.recv = {8, 8};
    if (rank == 1) what.recv = {12, 8};  // rank 0 sends 8
    what.input = {{in.data(), 16}};
    what.output = {{out.data(), what.recv[0] + what.recv[1]}};
    const std::string text = text_of<std::exception>(1.5, [&] {
      group->run(what);
      group->run(Operation{});
    });
    require_in(text, "split");
  }));
}

// SIGKILL in the middle of a stream of operations.
void killed(int size, Rank victim, bool forked_child_lives) {
  SharedStore store;
  const auto statuses = run_processes(size, [&](Rank rank) {
    const auto group = join(store, rank, size, Millis(20'000));
    Buffer buffer(100'000);
    for (int i = 0; i < 5; ++i) group->run(buffer.operation(Collective::kAllReduce));
    if (rank == victim) {
      if (forked_child_lives && ::fork() == 0) {  // holds all that it inherited
        const Deadline over(std::chrono::seconds(60));
        while (!store.has("told") && !over.passed()) ::usleep(1000);
        ::_exit(0);
      }
      ::kill(::getpid(), SIGKILL);
    }
    const std::string text = text_of<PeerError>(1.0, [&] {
      for (int i = 0; i < 5; ++i) group->run(buffer.operation(Collective::kAllReduce));
    });
    store.set("told", "");
    require_in(text, str("rank ", victim));
    require_in(text, "all_reduce #");
    require_quick_shutdown(*group);
  });
  for (Rank rank = 0; rank < size; ++rank) {
    const int status = statuses[static_cast<size_t>(rank)];
    require(rank == victim ? WIFSIGNALED(status) : status == 0, "rank ", rank, ": ", status);
  }
}

void late_rank() {
  SharedStore store;
  require_all_zero(run_processes(3, [&](Rank rank) {
    const auto group = join(store, rank, 3, Millis(20'000));
    Buffer buffer(10);
    group->run(buffer.operation(Collective::kAllReduce));
    group->state().set_timeout(Millis(2000));
    if (rank == 2) {
      while (store.add("timed out", 0) < 2) ::usleep(1000);
      const std::string text =
          text_of<PeerError>(1, [&] { group->run(buffer.operation(Collective::kAllReduce)); });
      require_in(text, "Timed out");
      return;
    }
    const std::string text =
        text_of<std::exception>(4, [&] { group->run(buffer.operation(Collective::kAllReduce)); });
    store.add("timed out", 1);
    require_in(text, "Timed out after 2");
    require_in(text,
               "(alive, last finished #1 all_reduce float32[10] SUM, has not called #2; pid ");
    require_quick_shutdown(*group);
  }));
}

// A rank that leaves in good order is no death, until something of it is missing.
void early_leaver() {
  SharedStore store;
  require_all_zero(run_processes(2, [&](Rank rank) {
    const auto group = join(store, rank, 2, Millis(20'000));
    Buffer buffer(100'000);
    group->run(buffer.operation(Collective::kAllReduce));
    if (rank == 1) return group->shutdown();
    const std::string text =
        text_of<PeerError>(1, [&] { group->run(buffer.operation(Collective::kAllReduce)); });
    require_in(text, "rank 1 has left the group");
  }));
}

// A rank finishes a collective and leaves. A rank that has yet to see its own end of it gets the
// result, and only then does its recv fail, which no rank will answer.
void leaver_behind_a_result() {
  SharedStore store;
  require_all_zero(run_processes(2, [&](Rank rank) {
    const auto group = join(store, rank, 2, Millis(20'000));
    Buffer buffer(10), wanted(10);
    if (rank == 1) {
      group->run(buffer.operation(Collective::kAllReduce));
      group->state().transport().finish(Board::kHost, 2);
      return group->shutdown();
    }
    std::promise<void> looked;
    const auto held = [&](const std::exception_ptr&) { looked.get_future().wait(); };
    group->host().submit(buffer.operation(Collective::kAllReduce), held);
    const auto second = group->host().submit(buffer.operation(Collective::kAllReduce));
    const auto message = std::make_shared<Message>(std::chrono::seconds(20));
    message->peer = 1;
    message->data = {reinterpret_cast<std::byte*>(wanted.data.data()), 40};
    group->messages().post(message);
    while (!group->state().transport().state(1, Board::kHost).left) std::this_thread::yield();
    group->state().check();
    require(group->state().failure().empty(),
            "#2 may still end well, not: ", group->state().failure());
    group->state().transport().finish(Board::kHost, 2);  // as if it had
    group->state().check();
    require_in(group->state().failure(), "rank 1 has left the group");
    looked.set_value();
    require(group->wait(*message) && message->error, "the message fails");
  }));
}

// Rank 0 has said that it reads nobody's tensors any more, gives up, and uses its own again. Rank 1
// has all its signals, and must not take what it then reads for rank 0's data.
void a_reader_of_one_that_gives_up() {
  World world(3, Geometry::for_ranks(3));
  constexpr uint64_t kShard = 1 << 20;
  std::vector<std::shared_ptr<Communicator>> groups;
  std::vector<std::unique_ptr<HostOperation>> operations;
  for (const Rank rank : {0, 1, 2}) {
    groups.push_back(world.join<Transport>(rank));
    operations.push_back(
        std::make_unique<HostOperation>(groups.back()->state(), Geometry::for_ranks(3)));
    Operation operation;
    operation.collective = Collective::kAllGather;
    operation.shards = {kShard, kShard, kShard};
    operation.input = {{world.arena(rank), kShard}};
    operation.output = {{world.arena(rank) + kShard, 3 * kShard}};
    operations.back()->begin(operation);
  }
  const auto advance = [&](size_t rank) {
    bool done = false;
    for (int i = 0; i < 20 && !done; ++i) done = operations[rank]->advance();
    return done;
  };
  require(!advance(0) && !advance(1), "they wait for rank 2");
  require(!advance(2) && !advance(0), "they wait for rank 1");
  require(operations[0]->readable_operations() == 1, "it reads tensors where they lie");
  groups[0]->state().fail("it has other things to do");
  std::memset(world.arena(0), 0x55, kShard);
  const std::string text = text_of<PeerError>(10, [&] { advance(1); });
  require_in(text, "rank 0 failed: ");
  require_in(text, "it has other things to do");
  for (const auto& operation : operations) operation->end(false);
}

// abort() frees the callers of run() on this rank and on the others, and those that call later.
void aborted() {
  SharedStore store;
  require_all_zero(run_processes(3, [&](Rank rank) {
    const auto group = join(store, rank, 3, Millis(20'000));
    Buffer buffer(10);
    std::thread aborter;
    if (rank == 0) store.set("calls", "");
    if (rank == 1) {
      aborter = std::thread([&] {
        while (!store.has("calls")) ::usleep(1000);
        ::usleep(200'000);  // by then, both wait for rank 2
        group->abort("the user said so");
        store.set("aborted", "");
      });
    }
    while (rank == 2 && !store.has("aborted")) ::usleep(1000);
    const std::string text =
        text_of<PeerError>(1, [&] { group->run(buffer.operation(Collective::kAllReduce)); });
    require_in(text, "the user said so");
    if (aborter.joinable()) aborter.join();
  }));
}

// The same ends for queued operations, and for send/recv.
void asynchronous_death() {
  SharedStore store;
  const auto statuses = run_processes(2, [&](Rank rank) {
    const auto group = join(store, rank, 2, Millis(20'000));
    Buffer buffer(10);
    group->run(buffer.operation(Collective::kAllReduce));
    if (rank == 1) ::kill(::getpid(), SIGKILL);
    const auto task = group->host().submit(buffer.operation(Collective::kAllReduce));
    const auto message = std::make_shared<Message>(std::chrono::seconds(20));
    message->peer = 1;
    message->data = {reinterpret_cast<std::byte*>(buffer.data.data()), 40};
    message->dtype = DType::kFloat32;
    const Deadline clock(std::chrono::hours(1));
    try {
      group->messages().post(message);
    } catch (const PeerError&) {  // the task may have failed the group already
      message->end(std::current_exception());
      message->call_back();
    }
    require(group->wait(*task) && task->error, "the task fails");
    require(group->wait(*message) && message->error, "the message fails");
    require(clock.elapsed_seconds() < slack(), "took ", clock.elapsed_seconds(), " s");
    require_quick_shutdown(*group);
  });
  require(statuses[0] == 0 && WIFSIGNALED(statuses[1]), "statuses");
}

void message_mismatch() {
  SharedStore store;
  require_all_zero(run_processes(2, [&](Rank rank) {
    const auto group = join(store, rank, 2, Millis(20'000));
    std::vector<std::byte> data(64);
    const auto message = std::make_shared<Message>(std::chrono::seconds(20));
    message->sending = rank == 0;
    message->peer = 1 - rank;
    message->data = {data.data(), rank == 0 ? 64u : 32u};
    group->messages().post(message);
    require(group->wait(*message), "done");
    if (rank == 0) {
      const std::string text = text_of<PeerError>(1, [&] { group->run(Operation{}); });
      return require_in(text, "sent uint8[64]");
    }
    const std::string text =
        text_of<MismatchError>(1, [&] { std::rethrow_exception(message->error); });
    require_in(text, "recv uint8[32] tag 0 from rank 0: rank 0 sent uint8[64]");
    require(!group->state().failure().empty(), "the group has failed");
  }));
}

// A child forked by a rank cannot use the group, nor disturb it by ending.
void forked_child() {
  SharedStore store;
  require_all_zero(run_processes(2, [&](Rank rank) {
    auto group = join(store, rank, 2, Millis(20'000));
    Buffer buffer(1000);
    group->run(buffer.operation(Collective::kAllReduce));
    const pid_t child = ::fork();
    if (child == 0) {
      int status = 1;
      try {
        group->run(buffer.operation(Collective::kAllReduce));
      } catch (const PeerError& error) {
        status = std::string(error.what()).find("forked") == std::string::npos ? 1 : 0;
      }
      group.reset();
      ::_exit(status);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    require(status == 0, "the child's status: ", status);
    for (int i = 0; i < 10; ++i) group->run(buffer.operation(Collective::kAllReduce));
    group->run(Operation{});
  }));
}

std::vector<Check> all_checks() {
  const auto another_size = [](Buffer& b) { return b.operation(Collective::kAllReduce); };
  const auto barrier = [](Buffer&) { return Operation{}; };
  const auto another_type = [](Buffer& b) {
    Operation what = b.operation(Collective::kAllReduce);
    what.dtype = DType::kInt32;
    return what;
  };
  const auto another_op = [](Buffer& b) {
    b.data.resize(1000);
    Operation what = b.operation(Collective::kAllReduce);
    what.op = ReduceOp::kMax;
    return what;
  };
  std::vector<Check> checks;
  for (const int size : {2, 3, 5}) {
    const auto add = [&](const char* name, std::function<Operation(Buffer&)> call,
                         const char* words) {
      checks.push_back({str("mismatch/", name, "/", size), [=] { mismatch(size, call, words); }});
    };
    add("count", another_size, "float32[1001]");
    const auto broadcast = [=](Buffer& b) { return b.operation(Collective::kBroadcast, size - 1); };
    add("collective", broadcast, "broadcast float32[1001] root");
    add("barrier", barrier, "barrier");
    add("dtype", another_type, "int32[1001]");
    add("op", another_op, "MAX");
  }
  checks.push_back({"mismatch/splits", split_mismatch});
  for (const Rank victim : {0, 1, 2}) {
    checks.push_back({str("killed/", victim), [=] { killed(3, victim, false); }});
  }
  checks.push_back({"killed/while its child lives", [] { killed(2, 1, true); }});
  checks.push_back({"killed/asynchronous", asynchronous_death});
  checks.push_back({"late rank", late_rank});
  checks.push_back({"early leaver", early_leaver});
  checks.push_back({"leaver behind a result", leaver_behind_a_result});
  checks.push_back({"a reader of one that gives up", a_reader_of_one_that_gives_up});
  checks.push_back({"aborted", aborted});
  checks.push_back({"message mismatch", message_mismatch});
  checks.push_back({"forked child", forked_child});
  return checks;
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  return ringcomm::testing::run_checks(ringcomm::testing::all_checks(), argc, argv);
}
