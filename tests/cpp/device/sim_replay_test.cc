// Replays of CUDA graphs on the simulated device: what becomes a node, in what order nodes and
// graphs run, and what a node does whose memory is gone.
#include <signal.h>

#include "sim_graph_harness.h"

namespace ringcomm::testing {
namespace {

// ---- nodes --------------------------------------------------------------------------------------

void nodes_run_in_replays() {
  in_simulation([](Simulation& sim) {
    Api& api = *sim.api;
    std::byte *from = api.allocate(kBytes), *to = api.allocate(2 * kBytes);
    auto* wide = reinterpret_cast<uint64_t*>(api.allocate(8));
    *wide = 0;
    require(api.capture_of(sim.stream) == 0, "before");
    begin(sim.stream);
    const uint64_t first = api.capture_of(sim.stream);
    api.wait_until(sim.stream, sim.word(0), 1);
    api.copy(sim.stream, to, from, kBytes);
    api.launch(sim.stream, bytes_moved(to + kBytes, to));
    api.each_word(sim.stream, std::array{Word{reinterpret_cast<std::byte*>(wide), ~uint64_t{0},
                                              Word::kWrite64}});
    api.write(sim.stream, sim.word(0), 0);
    api.write(sim.stream, sim.word(1), 7);
    require(first > 0 && api.capture_of(sim.side) == 0, "one stream captures");
    void* graph = end(sim.stream);
    api.synchronize(sim.stream);
    require(is_all(to, kBytes, kPoison) && *wide == 0 && sim.shared.load(1) == 0, "nothing ran");

    for (int i = 1; i <= 3; ++i) {
      std::memset(from, i, kBytes);
      *wide = 0;
      launch(graph, sim.stream);
      require(*wide == 0, "it waits for a word");
      sim.shared.store(0, 1);
      api.synchronize(sim.stream);
      require(is_all(to, 2 * kBytes, static_cast<std::byte>(i)), "copied, and copied again");
      require(*wide == ~uint64_t{0} && sim.shared.load(1) == 7, "words");
    }
    begin(sim.stream);
    require(api.capture_of(sim.stream) > first, "each capture has its id");
    end(sim.stream);
  });
}

// Each replay reads the addresses anew.
void the_leader_kernel_is_replayed() {
  in_simulation([](Simulation& sim) {
    auto* values = reinterpret_cast<int32_t*>(sim.api->allocate_pinned(4 * sizeof(int32_t)));
    auto* slots = reinterpret_cast<LeaderSlot*>(sim.api->allocate_pinned(2 * sizeof(LeaderSlot)));
    LeaderArgs leader{};
    leader.reduction.dtype = DType::kInt32;
    leader.call = leader.parts = 1;
    leader.length[0] = leader.unit = sizeof(int32_t);
    leader.n_ranks = 2;
    leader.rank = -1;  // all have slots
    auto* abort = reinterpret_cast<uint32_t*>(sim.api->allocate_pinned(sizeof(uint32_t)));
    leader.abort = &(*abort = 0);
    for (int i = 0; i < 2; ++i) leader.slot[i] = slots + i;
    void* graph = capture(sim.stream, [&] { sim.api->launch(sim.stream, leader); });
    std::fill_n(values, 4, 1);
    for (int i = 0; i < 6; ++i) {
      int32_t* at = values + 2 * (i % 2);
      for (int k = 0; k < 2; ++k) {
        const auto address = reinterpret_cast<uint64_t>(at + k);
        slots[k] = {address, address, 0, 1};
      }
      launch(graph, sim.stream);
      sim.api->synchronize(sim.stream);
      require(at[0] == 2 << i / 2 && at[1] == 2 << i / 2, "doubled in replay ", i);
    }
  });
}

// ---- replays ------------------------------------------------------------------------------------

// B's graph writes the word that A's waits for and resets, and the reverse.
void replays_of_two_processes() {
  constexpr uint32_t kReplays = 1000;
  Shared& shared = Shared::make();
  in_processes(2, [&](Rank rank) {
    const auto api = make_simulated_api({});
    std::byte* words = register_words(*api, shared);
    const Stream stream = api->make_stream();
    const auto word = [&](int i) { return word_at(words, i); };
    if (rank == 0) {
      void* graph = capture(stream, [&] {
        api->wait_until(stream, word(0), 1);
        api->write(stream, word(0), 0);
        api->copy(stream, word(3), word(2), sizeof(uint32_t));
        api->write(stream, word(1), 1);
      });
      for (uint32_t i = 1; i <= kReplays; ++i) {
        api->write(stream, word(2), i);
        launch(graph, stream);
      }
      api->synchronize(stream);
      return;
    }
    std::byte* seen = api->allocate_pinned(kReplays * sizeof(uint32_t));
    void* graph = capture(stream, [&] {
      api->write(stream, word(0), 1);
      api->wait_until(stream, word(1), 1);
      api->write(stream, word(1), 0);
    });
    for (int i = 0; i < static_cast<int>(kReplays); ++i) {
      launch(graph, stream);
      api->copy(stream, word_at(seen, i), word(3), sizeof(uint32_t));
    }
    api->synchronize(stream);
    for (uint32_t i = 0; i < kReplays; ++i) {
      const uint32_t value = reinterpret_cast<uint32_t*>(seen)[i];
      require(value == i + 1, "replay ", i + 1, " saw ", value);
    }
  });
}

void a_graph_waits_for_its_last_launch() {
  in_simulation([](Simulation& sim) {
    Api& api = *sim.api;
    const Stream third = api.make_stream();
    std::byte *from = api.allocate(kBytes), *to = api.allocate(kBytes);
    void* graph = capture(sim.stream, [&] {
      api.copy(sim.stream, to, from, kBytes);
      api.write(sim.stream, sim.word(1), 1);
      api.wait_until(sim.stream, sim.word(0), 1);
    });
    void* other = capture(sim.stream, [&] { api.write(sim.stream, sim.word(2), 5); });
    std::memset(from, 1, kBytes);
    launch(graph, sim.stream);
    while (sim.shared.load(1) == 0) ::usleep(100);
    std::memset(from, 2, kBytes);
    launch(graph, sim.side);
    launch(other, third);  // another graph does not wait
    api.synchronize(third);
    ::usleep(5000);
    require(sim.shared.load(2) == 5 && is_all(to, kBytes, std::byte{1}), "it ran twice at once");
    ringcomm_sim_destroy_graph(graph);  // launched work goes on
    sim.shared.store(0, 1);
    api.synchronize(sim.side);
    require(is_all(to, kBytes, std::byte{2}), "the second launch");
    require(ringcomm_sim_launch_graph(graph, sim.stream) == 1, "a destroyed graph");
    sim.shared.store(2, 0);
    launch(other, sim.stream);
    api.synchronize(sim.stream);
    require(sim.shared.load(2) == 5, "the other graph is alive");
  });
}

void a_replay_is_one_command() {
  SimOptions options;
  options.commands = 10;
  in_simulation(
      [](Simulation& sim) {
        Api& api = *sim.api;
        void* graph = capture(sim.stream, [&] {
          for (uint32_t i = 1; i <= 20; ++i) api.write(sim.stream, sim.word(1), i);
        });
        api.wait_until(sim.stream, sim.word(0), 1);
        for (int i = 1; i < 10; ++i) launch(graph, sim.stream);
        require_late("launch", sim.shared, [&] { launch(graph, sim.stream); });
        api.synchronize(sim.stream);
      },
      options);
}

void a_replay_that_waits_holds_up_calls() {
  in_simulation([](Simulation& sim) {
    void* graph = capture(sim.stream, [&] { sim.api->wait_until(sim.stream, sim.word(0), 1); });
    launch(graph, sim.stream);
    await_waiting_stream();
    require_late("allocate", sim.shared, [&] { sim.api->allocate(1); });
  });
}

// ---- memory that is gone ------------------------------------------------------------------------

// A graph that was replayed once, whose second replay comes after `end_use`. What follows the node
// that uses the memory does not run: not the wait, which would never end.
void require_illegal(Simulation& sim, const std::function<void(Stream)>& use,
                     const std::function<void()>& end_use) {
  Api& api = *sim.api;
  void* graph = capture(sim.stream, [&] {
    api.write(sim.stream, sim.word(1), 1);
    use(sim.stream);
    api.write(sim.stream, sim.word(2), 1);
    api.wait_until(sim.stream, sim.word(0), 1);
  });
  sim.shared.store(0, 1);
  launch(graph, sim.stream);
  api.synchronize(sim.stream);
  require(sim.shared.load(2) == 1, "all of it ran");
  for (int i = 0; i < 3; ++i) sim.shared.store(i, 0);
  end_use();
  launch(graph, sim.stream);
  require_error("cudaStreamSynchronize: an illegal memory access was encountered",
                [&] { api.synchronize(sim.stream); });
  require(sim.shared.load(1) == 1 && sim.shared.load(2) == 0, "it ended at that node");
  require(ringcomm_sim_launch_graph(graph, sim.stream) == 1, "the device is unusable");
}

void memory_that_is_gone() {
  in_simulation([](Simulation& sim) {  // released, and in use again by another
    std::byte* memory = sim.api->allocate(kBytes);
    require_illegal(
        sim, [&](Stream s) { sim.api->copy(s, memory, memory + 1, 1); },
        [&] {
          sim.api->release(memory);
          require(sim.api->allocate(kBytes) == memory, "the same address");
        });
  });
  in_simulation([](Simulation& sim) {
    std::byte *from = sim.api->allocate(kBytes), *to = sim.api->allocate(kBytes);
    require_illegal(
        sim, [&](Stream s) { sim.api->launch(s, bytes_moved(to, from)); },
        [&] { sim.api->release(from); });
  });
  in_simulation([](Simulation& sim) {
    std::byte* word = sim.api->allocate_pinned(8);
    require_illegal(
        sim, [&](Stream s) { sim.api->write(s, word, 1); }, [&] { sim.api->release_pinned(word); });
  });
  in_simulation([](Simulation& sim) {
    Shared& other = Shared::make();
    std::byte* words = register_words(*sim.api, other);
    other.store(0, 1);
    require_illegal(
        sim, [&](Stream s) { sim.api->wait_until(s, words, 1); },
        [&] { sim.api->unregister_host(reinterpret_cast<std::byte*>(other.word)); });
  });
  with_exported_memory([](Simulation& sim, const IpcHandle& handle) {
    std::byte* theirs = sim.api->open_memory(handle);
    require_illegal(
        sim, [&](Stream s) { sim.api->copy(s, theirs, theirs + 1, 1); },
        [&] { sim.api->close_memory(theirs); });
  });
}

// ---- faults -------------------------------------------------------------------------------------

void faults_befall_nodes() {
  Shared& shared = Shared::make();
  const auto replay = [&](const SimOptions& options) {
    const auto api = make_simulated_api(options);
    std::byte* words = register_words(*api, shared);
    const Stream stream = api->make_stream();
    void* graph = capture(stream, [&] {
      for (uint32_t i = 1; i <= 10; ++i) api->write(stream, words, i);
    });
    api->write(stream, words, 0);
    launch(graph, stream);
    api->synchronize(stream);
  };
  const auto statuses = run_processes(1, [&](Rank) {
    SimOptions options;
    options.dies_at = 1 + 4;
    replay(options);
  });
  require(WIFSIGNALED(statuses[0]) && WTERMSIG(statuses[0]) == SIGKILL, "it lives");
  require(shared.load(0) == 3, "it died at node ", shared.load(0) + 1);
  in_processes(1, [&](Rank) {
    SimOptions options;
    options.slow_us = 5000;
    const Deadline never(Clock::duration::max());
    replay(options);
    require(never.elapsed() >= std::chrono::milliseconds(55), "eleven operations of 5 ms");
  });
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  using namespace ringcomm::testing;
  return run_checks({{"nodes run in replays, not before", nodes_run_in_replays},
                     {"the leader's kernel in replays", the_leader_kernel_is_replayed},
                     {"replays of two processes wait for one another", replays_of_two_processes},
                     {"a graph waits for its last launch", a_graph_waits_for_its_last_launch},
                     {"a replay is one command", a_replay_is_one_command},
                     {"a replay that waits holds up calls", a_replay_that_waits_holds_up_calls},
                     {"memory that is gone", memory_that_is_gone},
                     {"fault: nodes that are slow, or the last", faults_befall_nodes}},
                    argc, argv);
}
