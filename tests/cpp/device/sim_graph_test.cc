// Captures of CUDA graphs on the simulated device follow the rules of CUDA: which streams take
// part, what events do, and which calls a capture forbids to which thread.
#include <thread>

#include "sim_graph_harness.h"

namespace ringcomm::testing {
namespace {

// ---- forks, joins and events --------------------------------------------------------------------

void a_fork_and_its_join() {
  in_simulation([](Simulation& sim) {
    Api& api = *sim.api;
    const Event forked = api.make_event(), joined = api.make_event();
    std::vector<std::byte*> at(4);
    for (auto& memory : at) memory = api.allocate(kBytes);
    api.wait_until(sim.side, sim.word(0), 1);  // its earlier work is no part of the graph
    api.record(forked, sim.side);
    void* graph = capture(sim.stream, [&] {
      api.copy(sim.stream, at[1], at[0], kBytes);
      api.record(forked, sim.stream);
      require(api.capture_of(sim.side) == 0, "not yet");
      api.wait(sim.side, forked);
      require(api.capture_of(sim.side) == api.capture_of(sim.stream), "one capture");
      api.copy(sim.side, at[2], at[1], kBytes);
      api.record(joined, sim.side);
      api.wait(sim.stream, joined);
      api.copy(sim.stream, at[3], at[2], kBytes);
    });
    require(api.capture_of(sim.side) == 0, "its end frees all its streams");
    for (int i = 1; i <= 3; ++i) {
      std::memset(at[0], i, kBytes);
      launch(graph, sim.stream);
      api.synchronize(sim.stream);
      require(is_all(at[3], kBytes, static_cast<std::byte>(i)), "replay ", i);
    }
    sim.shared.store(0, 1);
    api.synchronize(sim.side);
  });
}

void ends_that_are_none() {
  in_simulation([](Simulation& sim) {
    Api& api = *sim.api;
    const Event event = api.make_event();
    const auto wait = [&](Stream later, Stream earlier) {
      api.record(event, earlier);
      api.wait(later, event);
    };
    const std::string unjoined = "capturing stream has unjoined work";
    begin(sim.stream);
    wait(sim.side, sim.stream);
    require_no_graph(sim.stream, unjoined);
    begin(sim.stream);
    wait(sim.side, sim.stream);
    wait(sim.stream, sim.side);
    api.write(sim.side, sim.word(0), 1);
    require_no_graph(sim.stream, unjoined);
    require(api.capture_of(sim.side) == 0, "this ends it, too");

    begin(sim.stream);
    wait(sim.side, sim.stream);
    wait(sim.stream, sim.side);
    require_no_graph(sim.side, "capture was not ended in the same stream as it began");
    require_invalidated(sim.stream);
    require_no_graph(sim.stream, "the operation cannot be performed in the present state");

    const std::string elsewhere =
        "attempt to terminate a thread-local capture sequence from another thread";
    for (const int mode : {kGlobal, kThreadLocal}) {
      begin(sim.stream, mode);
      std::thread([&] { require_no_graph(sim.stream, elsewhere); }).join();
      require_invalidated(sim.stream);
    }
    begin(sim.stream, kRelaxed);
    std::thread([&] { end(sim.stream); }).join();
  });
}

void events_keep_captures_apart() {
  in_simulation([](Simulation& sim) {
    Api& api = *sim.api;
    const Event eager = api.make_event(), captured = api.make_event();
    api.record(eager, sim.side);
    for (const Event event : {eager, api.make_event()}) {
      begin(sim.stream);
      require_error("cudaStreamWaitEvent: dependency created on uncaptured work in another stream",
                    [&] { api.wait(sim.stream, event); });
      require_error("cudaStreamWaitEvent: operation failed due to a previous error during capture",
                    [&] { api.wait(sim.stream, event); });
      require_invalidated(sim.stream);
    }
    capture(sim.stream, [&] { api.record(captured, sim.stream); });
    require_error("cudaStreamWaitEvent: operation not permitted on an event last recorded in a",
                  [&] { api.wait(sim.side, captured); });
    begin(sim.stream);
    require_error("cudaStreamWaitEvent: dependency created",
                  [&] { api.wait(sim.stream, captured); });
    require_invalidated(sim.stream);
    api.record(captured, sim.side);
    api.wait(sim.stream, captured);  // an ordinary event again
    api.synchronize(sim.stream);

    begin(sim.stream);
    begin(sim.side);
    api.record(captured, sim.stream);
    require_error("cudaStreamWaitEvent: operation would result in a merge",
                  [&] { api.wait(sim.side, captured); });
    require_invalidated(sim.stream);
    require_invalidated(sim.side);

    begin(sim.stream);
    api.record(captured, sim.stream);
    require_error("cudaStreamWaitEvent: operation would make the legacy stream depend",
                  [&] { api.wait(nullptr, captured); });
    require_invalidated(sim.stream);
  });
}

// ---- forbidden calls ----------------------------------------------------------------------------

struct Unsafe {
  const char* name;
  std::function<void()> call;
};

// With what they need. Each can be made once.
std::vector<Unsafe> unsafe_calls(Simulation& sim, const IpcHandle& handle) {
  Api& api = *sim.api;
  auto* host = reinterpret_cast<std::byte*>(&Shared::make());
  auto* registered = reinterpret_cast<std::byte*>(&Shared::make());
  api.register_host(registered, 8);
  const std::vector<Chunk> none;
  return {
      {"cudaMalloc", [&api] { api.allocate(1); }},
      {"cudaFree", [&api, memory = api.allocate(1)] { api.release(memory); }},
      {"cudaMallocHost", [&api] { api.allocate_pinned(1); }},
      {"cudaFreeHost", [&api, memory = api.allocate_pinned(1)] { api.release_pinned(memory); }},
      {"cudaHostRegister", [&api, host] { api.register_host(host, 8); }},
      {"cudaHostUnregister", [&api, registered] { api.unregister_host(registered); }},
      {"cudaIpcOpenMemHandle", [&api, handle] { api.open_memory(handle); }},
      {"cudaIpcCloseMemHandle", [&api, base = api.open_memory(handle)] { api.close_memory(base); }},
  };
}

void unsafe_calls_invalidate() {
  with_exported_memory([](Simulation& sim, const IpcHandle& handle) {
    Api& api = *sim.api;
    for (const auto& [name, call] : unsafe_calls(sim, handle)) {
      begin(sim.stream);
      require_error(str(name, ": ", kUnsupported), call);
      require(api.capture_of(sim.stream) == 0, "the capture is no more");
      require_invalidated(sim.stream);
      begin(sim.stream);
      {
        const bool before = api.relax_captures(true);
        const Finally restore{[&] { api.relax_captures(before); }};
        const std::string error = error_of(call);
        require(error == "nothing", "in a relaxed thread: ", error);
      }
      end(sim.stream);
    }
    // Calls for virtual addresses are refused before they look at their arguments.
    begin(sim.stream);
    require_error(str("cuMemMap: ", kUnsupported), [&] { api.map_chunks({}); });
    require_error(str("cuMemUnmap: ", kUnsupported), [&] { api.unmap_chunks(nullptr, 0); });
    require_invalidated(sim.stream);
    capture(sim.stream, [&] {  // these do not disturb it
      api.destroy_stream(api.make_stream());
      api.destroy_event(api.make_event());
      api.synchronize(sim.side);
      require(ringcomm_sim_allocate(1) != nullptr, "torch's allocator");
    });
  });
}

// The table in the documentation of cudaThreadExchangeStreamCaptureMode.
void modes_of_captures_and_threads() {
  for (const int mode : {kGlobal, kThreadLocal, kRelaxed}) {
    for (const bool elsewhere : {false, true}) {
      for (const bool relaxed : {false, true}) {
        in_simulation([&](Simulation& sim) {
          const bool forbidden =
              !relaxed && (mode == kGlobal || (mode == kThreadLocal && !elsewhere));
          const std::string what =
              str("mode ", mode, elsewhere ? ", elsewhere" : "", relaxed ? ", relaxed" : "");
          const auto call = [&] {
            require(!sim.api->relax_captures(relaxed), "threads begin in mode global");
            const std::string error = error_of([&] { sim.api->allocate(1); });
            require((error != "nothing") == forbidden, what, ": ", error);
            require(sim.api->relax_captures(false) == relaxed, "its mode is a thread's own");
          };
          begin(sim.stream, mode);
          if (elsewhere) {
            std::thread(call).join();
          } else {
            call();
          }
          if (forbidden)
            require_invalidated(sim.stream);
          else
            end(sim.stream);
        });
      }
    }
  }
}

void calls_about_a_capturing_stream() {
  in_simulation([](Simulation& sim) {
    Api& api = *sim.api;
    begin(sim.stream);
    require_error(str("cudaStreamSynchronize: ", kUnsupported),
                  [&] { api.synchronize(sim.stream); });
    require_error("cuStreamWriteValue32: operation failed due to a previous error during capture",
                  [&] { api.write(sim.stream, sim.word(0), 1); });
    require_invalidated(sim.stream);
    begin(sim.stream, kRelaxed);
    require_error(str("cudaStreamDestroy: ", kUnsupported),
                  [&] { api.destroy_stream(sim.stream); });
    require_invalidated(sim.stream);
    void* empty = capture(sim.stream, [] {});
    begin(sim.stream);
    require(ringcomm_sim_launch_graph(empty, sim.stream) == 1, "a replay in a capture");
    require_invalidated(sim.stream);
    begin(sim.stream);
    require(ringcomm_sim_begin_capture(sim.stream, kGlobal) == 1, "two captures of a stream");
    require_invalidated(sim.stream);
    api.synchronize(sim.stream);
    require(sim.shared.load(0) == 0, "nothing ran");
  });
}

void the_legacy_stream() {
  in_simulation([](Simulation& sim) {
    require(ringcomm_sim_begin_capture(nullptr, kRelaxed) == 1, "it cannot capture");
    require(ringcomm_sim_graph_error() == str("cudaStreamBeginCapture: ", kUnsupported),
            ringcomm_sim_graph_error());
    for (const int mode : {kGlobal, kThreadLocal, kRelaxed}) {
      begin(sim.stream, mode);
      bool told = true;
      std::thread([&] {
        try {
          require(sim.api->capture_of(nullptr) == 0, "it never captures");
        } catch (const UsageError&) {
          told = false;
        }
      }).join();
      require(told == (mode != kGlobal), "mode ", mode);
      sim.api->write(nullptr, sim.word(1), 1);  // streams that do not block have no part in it
      end(sim.stream);
    }
  });
}

}  // namespace
}  // namespace ringcomm::testing

int main(int argc, char** argv) {
  using namespace ringcomm::testing;
  return run_checks({{"a fork and its join", a_fork_and_its_join},
                     {"ends that are none", ends_that_are_none},
                     {"events keep captures apart", events_keep_captures_apart},
                     {"unsafe calls invalidate a capture", unsafe_calls_invalidate},
                     {"modes of captures and threads", modes_of_captures_and_threads},
                     {"calls about a stream that captures", calls_about_a_capturing_stream},
                     {"the legacy stream", the_legacy_stream}},
                    argc, argv);
}
