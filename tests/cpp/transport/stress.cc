// Random collectives with ranks as threads on one mapping, so that ThreadSanitizer sees every
// access; and transports broken on purpose, which must be caught.
//
//   stress [filter]            the checks
//   stress --broken relaxed    signals without release: must fail, or be reported by TSan
//   stress --broken deaf       signals that wake nobody: must fail
#include <future>
#include <memory>

#include "cpp/oracle.h"
#include "cpp/world.h"

namespace ringcomm::testing {
namespace {

// Signals that are published so, and wake the peer or do not.
template <std::memory_order kStore, bool kWake>
class BrokenTransport final : public Transport {
 public:
  using Transport::Transport;
  void signal(Rank to, int lane, int half, uint64_t stamp) override {
    Line& line = peer(to).segment.line(place(rank()), lane, half);
    line.stamp.store(stamp, std::memory_order_relaxed);
    line.count.store(++sent(to, lane), kStore);
    if (kWake) peer(to).doorbell.notify(kSignalNews);
  }
};
using RelaxedTransport = BrokenTransport<std::memory_order_relaxed, true>;
using DeafTransport = BrokenTransport<std::memory_order_seq_cst, false>;

// A barrier, so that nobody leaves while others still work; then goodbye.
void leave(Communicator& group) {
  group.run(Operation{});
  group.shutdown();
}

template <typename Kind>
void collectives(int size, uint64_t seed, int calls) {
  World world(size, tiny(size));
  run_threads(size, [&](Rank rank) {
    const auto group = world.join<Kind>(rank);
    Random shared(seed), own(seed * 1000 + static_cast<uint64_t>(rank));
    for (int number = 0; number < calls; ++number) {
      const Call call = random_call(shared, size, 5000);
      for (uint64_t spin = own.below(4) == 0 ? own.below(3000) : 0; spin > 0; --spin) {
        std::atomic_signal_fence(std::memory_order_seq_cst);  // a delay that no clock decides
      }
      perform(*group, call, static_cast<uint64_t>(number));
    }
    leave(*group);
  });
}

// Messages of many tags and sizes, in both directions, posted in different orders.
void messages(int size, uint64_t seed) {
  World world(size, tiny(size));
  run_threads(size, [&](Rank rank) {
    const auto group = world.join<Transport>(rank);
    const Rank to = (rank + 1) % size, from = (rank + size - 1) % size;
    Random shared(seed);
    for (int round = 0; round < 20; ++round) {
      std::vector<std::vector<std::byte>> sent, received;
      std::vector<MessagePtr> requests;
      const auto post = [&](bool sending, uint32_t tag, std::vector<std::byte>& data) {
        auto message = std::make_shared<Message>(std::chrono::seconds(60));
        message->sending = sending;
        message->peer = sending ? to : tag % 3 == 0 ? Message::kAnySource : from;
        message->tag = tag;
        message->data = {data.data(), data.size()};
        requests.push_back(message);
        group->messages().post(message);
      };
      constexpr uint32_t kTags = 12;
      sent.resize(kTags);
      received.resize(kTags);
      for (uint32_t tag = 0; tag < kTags; ++tag) {
        const size_t bytes = shared.below(tag % 4 == 0 ? 100'000 : 3000);
        sent[tag].assign(bytes, static_cast<std::byte>(17 * rank + static_cast<int>(tag)));
        received[tag].resize(bytes);
      }
      for (uint32_t tag = 0; tag < kTags; ++tag) post(true, tag, sent[tag]);
      for (uint32_t tag = kTags; tag-- > 0;) post(false, tag, received[tag]);
      for (const MessagePtr& request : requests) {
        require(group->wait(*request), "not done");
        if (request->error) std::rethrow_exception(request->error);
      }
      for (uint32_t tag = 0; tag < kTags; ++tag) {
        const auto want = static_cast<std::byte>(17 * from + static_cast<int>(tag));
        for (const std::byte got : received[tag]) require(got == want, "tag ", tag);
      }
    }
    leave(*group);
  });
}

Operation sum_of(std::vector<int32_t>& data) {
  Operation operation;
  operation.collective = Collective::kAllReduce;
  operation.dtype = DType::kInt32;
  operation.bytes = 4 * data.size();
  operation.input = {{reinterpret_cast<std::byte*>(data.data()), operation.bytes}};
  operation.output = operation.input;
  return operation;
}

// Asynchronous all_reduces of two groups, driven by the worker, waited for in reverse.
void asynchronous(int size, uint64_t seed) {
  World first_world(size, tiny(size)), second_world(size, tiny(size));
  run_threads(size, [&](Rank rank) {
    const auto first = first_world.join<Transport>(rank),
               second = second_world.join<Transport>(rank);
    Random shared(seed);
    for (int round = 0; round < 10; ++round) {
      std::vector<std::vector<int32_t>> data(16);
      std::vector<TaskPtr> tasks;
      for (size_t i = 0; i < data.size(); ++i) {
        data[i].assign(shared.below(3000), rank + static_cast<int32_t>(i));
        tasks.push_back((i % 2 == 0 ? first : second)->host().submit(sum_of(data[i])));
      }
      for (size_t i = data.size(); i-- > 0;) {
        require((i % 2 == 0 ? first : second)->wait(*tasks[i]), "not done");
        if (tasks[i]->error) std::rethrow_exception(tasks[i]->error);
        const int32_t want = size * (size - 1) / 2 + size * static_cast<int32_t>(i);
        for (const int32_t got : data[i]) require(got == want, "sum ", got, ", not ", want);
      }
    }
    leave(*first);
    leave(*second);
  });
}

// Threads that wait for messages, for tasks and for nothing, at once and in one group.
void beside_waiters(int size) {
  World world(size, tiny(size));
  run_threads(size, [&](Rank rank) {
    const auto group = world.join<Transport>(rank);
    std::vector<std::byte> received(2), sent(2, std::byte{7});
    std::vector<int32_t> data(10), other(1000);
    const auto message = [&](bool sending, std::vector<std::byte>& bytes) {
      auto made = std::make_shared<Message>(std::chrono::seconds(60));
      made->sending = sending;
      made->peer = (rank + (sending ? 1 : size - 1)) % size;
      made->data = {bytes.data(), bytes.size()};
      return made;
    };
    for (int round = 0; round < 10; ++round) {
      const auto wanted = message(false, received), late = message(false, sent);
      group->messages().post(wanted);
      std::thread waiter([&] { group->wait(*wanted); });
      for (int call = 0; call < 20; ++call) {
        data.assign(data.size(), 1);
        other.assign(other.size(), 1);
        const TaskPtr task = call % 3 == 0 ? group->host().submit(sum_of(other)) : nullptr;
        group->run(sum_of(data));
        if (task && call % 2 == 0) group->wait(*task);
        require(data.back() == size && (!task || task->done), "round ", round, " call ", call);
      }
      late->tag = 5;  // nobody sends it
      group->messages().post(late);
      group->wait(*late, std::chrono::milliseconds(1));
      require(late->error && group->state().failure().empty(), "it was not withdrawn");
      group->messages().post(message(true, sent));
      waiter.join();
      require(wanted->done && !wanted->error, "no message");
    }
    leave(*group);
  });
}

// Callbacks that block until another operation has ended, which somebody else has to drive: the
// rank that waits with wait() as well as the one that does not.
void blocking_callbacks(int size, uint64_t seed) {
  World world(size, tiny(size));
  run_threads(size, [&](Rank rank) {
    const auto group = world.join<Transport>(rank);
    Random shared(seed);
    for (int round = 0; round < 20; ++round) {
      std::vector<int32_t> first(1 + shared.below(2000), 1), second(1 + shared.below(2000), 2);
      std::promise<void> over;
      const auto again = [&](const std::exception_ptr&) {
        Progress::call_out([&] {
          std::promise<void> inner;
          group->host().submit(sum_of(second),
                               [&](const std::exception_ptr&) { inner.set_value(); });
          inner.get_future().wait();
        });
        over.set_value();
      };
      const TaskPtr task = group->host().submit(sum_of(first), again);
      if (round % 2 == 0) group->wait(*task);
      over.get_future().wait();
      require(first[0] == size && second.back() == 2 * size, "round ", round);
    }
    leave(*group);
  });
}

// The same across groups of which some are idle and some wait: the worker's list of them changes
// while one of them calls out. A callback waits for an operation of another group: the order of
// operations in a group is the same everywhere.
void callbacks_across_groups(int size, uint64_t seed) {
  constexpr size_t kOuter = 4;
  std::vector<std::unique_ptr<World>> worlds;
  for (size_t i = 0; i < 2 * kOuter; ++i) {
    worlds.push_back(std::make_unique<World>(size, tiny(size)));
  }
  run_threads(size, [&](Rank rank) {
    std::vector<std::shared_ptr<Communicator>> groups;
    for (const auto& world : worlds) groups.push_back(world->join<Transport>(rank));
    Random shared(seed);
    for (int round = 0; round < 40; ++round) {
      std::vector<std::vector<int32_t>> data(groups.size());
      for (auto& numbers : data) numbers.assign(1 + shared.below(2000), 1);
      std::vector<std::promise<void>> over(kOuter);
      for (size_t at = 0; at < kOuter; ++at) {
        groups[at]->host().submit(sum_of(data[at]), [&, at](const std::exception_ptr&) {
          Progress::call_out([&] {
            std::promise<void> inner;
            groups[kOuter + at]->host().submit(
                sum_of(data[kOuter + at]), [&](const std::exception_ptr&) { inner.set_value(); });
            inner.get_future().wait();
          });
          over[at].set_value();
        });
      }
      for (auto& promise : over) promise.get_future().wait();
      for (const auto& numbers : data) require(numbers[0] == size, "round ", round);
    }
    for (const auto& group : groups) leave(*group);
  });
}

// A message's callback waits for another message, which may be complete already.
void callbacks_across_messages(int size) {
  World world(size, tiny(size));
  run_threads(size, [&](Rank rank) {
    const auto group = world.join<Transport>(rank);
    const Rank to = (rank + 1) % size, from = (rank + size - 1) % size;
    for (int round = 0; round < 50; ++round) {
      std::vector<std::byte> data(6);
      std::vector<MessagePtr> messages;
      for (uint32_t i = 0; i < 6; ++i) {  // three sends, three receives
        messages.push_back(std::make_shared<Message>(std::chrono::seconds(60)));
        messages[i]->sending = i < 3;
        messages[i]->peer = i < 3 ? to : from;
        messages[i]->tag = i % 3;
        messages[i]->data = {&data[i], 1};
      }
      std::promise<void> second, first;
      messages[4]->on_done = [&](const std::exception_ptr&) { second.set_value(); };
      messages[3]->on_done = [&](const std::exception_ptr&) {
        Progress::call_out([&] { second.get_future().wait(); });
        first.set_value();
      };
      for (const uint32_t i : {4, 5, 0, 1, 2, 3}) group->messages().post(messages[i]);
      if (round % 2 == 0) group->wait(*messages[5]);
      first.get_future().wait();
      for (const auto& message : messages) group->wait(*message);
    }
    leave(*group);
  });
}

// Two operations that belong together stay together, whatever else is asked for meanwhile.
void continuations(int size, uint64_t seed) {
  World world(size, tiny(size));
  run_threads(size, [&](Rank rank) {
    const auto group = world.join<Transport>(rank);
    Random shared(seed);
    for (int round = 0; round < 20; ++round) {
      std::vector<std::vector<int32_t>> data(2);
      for (auto& part : data) part.assign(1 + shared.below(2000), 1);
      std::vector<int32_t> other(1 + shared.below(2000), 1);
      size_t part = 0;
      const auto continuation = [&](Operation& operation) {
        if (++part == data.size()) return false;
        operation = sum_of(data[part]);
        return true;
      };
      const TaskPtr task = group->host().submit(sum_of(data[0]), nullptr, continuation);
      const uint64_t asked = group->sequence();
      const TaskPtr next = group->host().submit(sum_of(other));
      require(group->wait(*next) && task->done && !task->error, "not done, or not in order");
      require(asked == 3 * static_cast<uint64_t>(round) + 2, "numbered ", asked);
      for (const auto& sum : data) require(sum.back() == size, "part of ", round);
    }
    leave(*group);
  });
}

// How long rank 1 stays in a barrier after the last rank came to it: the lower quartile of 40, in
// seconds, since a busy machine makes some of them longer.
// That rank comes 30 ms late: the others are asleep by then, between two looks at their peers.
template <typename Kind>
double late_barrier() {
  World world(3, tiny(3));
  const Deadline clock(std::chrono::hours(1));
  std::vector<double> came(40), left(40), seconds;
  run_threads(3, [&](Rank rank) {
    const auto group = world.join<Kind>(rank);
    for (size_t i = 0; i < came.size(); ++i) {
      if (rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(30));
      if (rank == 0) came[i] = clock.elapsed_seconds();
      group->run(Operation{});
      if (rank == 1) left[i] = clock.elapsed_seconds();
    }
    group->shutdown();
  });
  for (size_t i = 0; i < came.size(); ++i) seconds.push_back(left[i] - came[i]);
  std::ranges::nth_element(seconds, seconds.begin() + 10);
  return seconds[10];
}

// Runs a broken transport; 1 when it was caught.
int broken(const std::string& how) {
  try {
    if (how == "relaxed") collectives<RelaxedTransport>(3, 1, 300);
  } catch (const std::exception& error) {
    std::printf("caught: %s\n", error.what());
    return 1;
  }
  if (how != "deaf") return 0;
  // A sleeper that nobody wakes looks again after 20 ms. On a busy machine the others are slow as
  // well, so it has several turns to be caught.
  for (int turn = 0; turn < 5; ++turn) {
    const double good = late_barrier<Transport>(), bad = late_barrier<DeafTransport>();
    std::printf("%.2f ms when signals wake, %.2f ms when they do not\n", good * 1e3, bad * 1e3);
    if (bad > 3 * good) return 1;
  }
  return 0;
}

std::vector<Check> all_checks() {
  std::vector<Check> checks;
  for (const int size : {1, 2, 3, 4, 5}) {
    for (const uint64_t seed : {1, 2}) {
      checks.push_back({str("collectives/", size, "/seed", seed),
                        [=] { collectives<Transport>(size, seed, 150); }});
    }
    if (size == 1) continue;
    for (const int workers : {1, 3}) {
      const auto add = [&](const char* name, auto&& body) {
        checks.push_back({str(name, '/', size, '/', workers), [=] {
                            Workers::get().set_most(workers);
                            body();
                          }});
      };
      add("messages", [=] { messages(size, 3); });
      add("beside_waiters", [=] { beside_waiters(size); });
      add("asynchronous", [=] { asynchronous(size, 4); });
      add("blocking_callbacks", [=] { blocking_callbacks(size, 5); });
      add("callbacks_across_groups", [=] { callbacks_across_groups(size, 7); });
      add("callbacks_across_messages", [=] { callbacks_across_messages(size); });
      add("continuations", [=] { continuations(size, 6); });
    }
  }
  return checks;
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  using namespace ringcomm::testing;
  if (argc == 3 && std::string(argv[1]) == "--broken") return broken(argv[2]);
  return run_checks(all_checks(), argc, argv);
}
