// Common parts of the tests of CUDA graphs on the simulated device.
#pragma once

#include "sim_harness.h"

namespace ringcomm::testing {

constexpr int kGlobal = 0, kThreadLocal = 1, kRelaxed = 2;
constexpr const char* kUnsupported = "operation not permitted when stream is capturing";

inline void begin(Stream stream, int mode = kGlobal) {
  require(ringcomm_sim_begin_capture(stream, mode) == 0, ringcomm_sim_graph_error());
}

inline void* end(Stream stream) {
  void* graph = ringcomm_sim_end_capture(stream);
  require(graph != nullptr, ringcomm_sim_graph_error());
  return graph;
}

inline void* capture(Stream stream, const std::function<void()>& calls) {
  begin(stream);
  calls();
  return end(stream);
}

inline void launch(void* graph, Stream stream) {
  require(ringcomm_sim_launch_graph(graph, stream) == 0, ringcomm_sim_graph_error());
}

inline void require_no_graph(Stream stream, const std::string& error) {
  const void* graph = ringcomm_sim_end_capture(stream);
  const std::string seen = ringcomm_sim_graph_error();
  require(graph == nullptr, "a graph, in place of: ", error);
  require(seen == "cudaStreamEndCapture: " + error, "expected: ", error, "; seen: ", seen);
}

inline void require_invalidated(Stream stream) {
  require_no_graph(stream, "operation failed due to a previous error during capture");
}

// A process with a device, two streams and four words.
struct Simulation {
  explicit Simulation(const SimOptions& options = {}) : api(make_simulated_api(options)) {}
  std::byte* word(int i) const { return word_at(words, i); }

  const std::unique_ptr<Api> api;
  const Stream stream = api->make_stream(), side = api->make_stream();
  Shared& shared = Shared::make();
  std::byte* const words = register_words(*api, shared);
};

inline void in_simulation(const std::function<void(Simulation&)>& body,
                          const SimOptions& options = {}) {
  in_processes(1, [&](Rank) {
    Simulation simulation(options);
    body(simulation);
  });
}

inline void with_exported_memory(const std::function<void(Simulation&, const IpcHandle&)>& body) {
  Shared& shared = Shared::make();
  in_processes(2, [&](Rank rank) {
    Simulation sim;
    if (rank == 1) {
      shared.handle = sim.api->export_memory(sim.api->allocate(kBytes));
      shared.reach(1);
      shared.await(2);
      return;
    }
    shared.await(1);
    body(sim, shared.handle);
    shared.reach(2);
  });
}

}  // namespace ringcomm::testing
