#include "sim/sim_graphs.h"

#include <algorithm>

#include "sim/api_sim.h"
#include "sim/sim_process.h"

namespace ringcomm::sim {
namespace {

constexpr const char* kUnsupported = "operation not permitted when stream is capturing";
constexpr const char* kInvalidated = "operation failed due to a previous error during capture";
constexpr const char* kMerge = "operation would result in a merge of separate capture sequences";
constexpr const char* kUnmatched = "capture was not ended in the same stream as it began";
constexpr const char* kUnjoined = "capturing stream has unjoined work";
constexpr const char* kIsolation = "dependency created on uncaptured work in another stream";
constexpr const char* kImplicit =
    "operation would make the legacy stream depend on a capturing blocking stream";
constexpr const char* kCapturedEvent =
    "operation not permitted on an event last recorded in a capturing stream";
constexpr const char* kWrongThread =
    "attempt to terminate a thread-local capture sequence from another thread";
constexpr const char* kIllegalState = "the operation cannot be performed in the present state";

// A thread may end while its capture goes on, and then its std::thread::id is used again.
uint64_t this_thread() {
  static std::atomic<uint64_t> last{0};
  thread_local const uint64_t id = ++last;
  return id;
}

[[noreturn]] void fail(const char* call, const char* why) {
  throw DeviceError(str(call, ": ", why));
}

void check_use(SimMemory& memory, const Use& use) {
  memory.host_side("", use.address, use.bytes, use.mapped);
  if (memory.allocation_of(use.address).id != use.allocation) throw DeviceError("another one");
}

// Checks that everything a node uses is there as it was when it was captured.
void check_uses(const Node& node) {
  try {
    for (const Use& use : node.uses) check_use(Process::get().memory, use);
  } catch (const DeviceError&) {
    throw DeviceError("an illegal memory access was encountered");
  }
}

void run(const std::function<void()>& operation) {
  try {
    operation();
  } catch (const std::exception& error) {
    Process::get().fail(error.what());
  }
}

void replay(const Graph& graph, uint64_t stream, uint64_t number) {
  for (uint64_t i = 0; i < graph.nodes.size() && !Process::get().failed(); ++i) {
    const Node& node = graph.nodes[i];
    node.faults->before(stream, number + (i << 32));
    run([&] {
      check_uses(node);
      const auto operation = node.operation;  // the next replay begins with it as it was captured
      operation();
    });
  }
}

}  // namespace

// ---- captures -----------------------------------------------------------------------------------

void SimGraphs::begin(const StreamPtr& stream, CaptureMode mode) {
  constexpr const char* kCall = "cudaStreamBeginCapture";
  if (Capture* capture = find(stream)) {
    capture->invalidated = true;
    fail(kCall, kIllegalState);
  }
  const uint64_t id = next_id_++;
  Capture& capture = captures_[id];
  capture.id = id;
  capture.mode = mode;
  capture.thread = this_thread();
  capture.origin = stream->id;
  capture.streams[stream->id] = {};
  capture.graph = std::make_shared<Graph>();
}

void* SimGraphs::end(const StreamPtr& stream) {
  constexpr const char* kCall = "cudaStreamEndCapture";
  Capture* const capture = find(stream);
  if (capture == nullptr) fail(kCall, kIllegalState);
  const char* wrong = nullptr;
  if (capture->origin != stream->id) wrong = kUnmatched;
  if (capture->mode != CaptureMode::kRelaxed && capture->thread != this_thread()) {
    wrong = kWrongThread;
  }
  if (wrong != nullptr) {
    capture->invalidated = true;
    fail(kCall, wrong);
  }
  const Capture ended = std::move(*capture);
  captures_.erase(ended.id);  // in any case its streams are free
  if (ended.invalidated) fail(kCall, kInvalidated);
  const Before& joined = ended.streams.at(ended.origin);
  for (const auto& [id, before] : ended.streams) {
    const auto entry = joined.find(id);
    const uint64_t seen = entry == joined.end() ? 0 : entry->second;
    if (id != ended.origin && seen < before.at(id)) fail(kCall, kUnjoined);
  }
  return graphs_.emplace(ended.graph.get(), ended.graph).first->first;
}

SimGraphs::Capture* SimGraphs::find(const StreamPtr& stream) {
  for (auto& [id, capture] : captures_) {
    if (capture.streams.contains(stream->id)) return &capture;
  }
  return nullptr;
}

SimGraphs::Capture* SimGraphs::active(const char* call, const StreamPtr& stream) {
  Capture* capture = find(stream);
  if (capture != nullptr && capture->invalidated) fail(call, kInvalidated);
  return capture;
}

bool SimGraphs::is_capturing(const StreamPtr& stream) { return find(stream) != nullptr; }

uint64_t SimGraphs::capture_of(const StreamPtr& stream) {
  const Capture* capture = find(stream);
  return capture == nullptr || capture->invalidated ? 0 : capture->id;
}

bool SimGraphs::captures_globally() const {
  return std::any_of(captures_.begin(), captures_.end(),
                     [](const auto& entry) { return entry.second.mode == CaptureMode::kGlobal; });
}

void SimGraphs::refuse_unsafe(const char* call) {
  if (thread_relaxed) return;
  bool refused = false;
  for (auto& [id, capture] : captures_) {
    const bool ours = capture.thread == this_thread() && capture.mode != CaptureMode::kRelaxed;
    if (ours || capture.mode == CaptureMode::kGlobal) refused = capture.invalidated = true;
  }
  if (refused) fail(call, kUnsupported);
}

void SimGraphs::refuse(const char* call, const StreamPtr& stream) {
  Capture* capture = find(stream);
  if (capture == nullptr) return;
  capture->invalidated = true;
  fail(call, kUnsupported);
}

// ---- nodes --------------------------------------------------------------------------------------

uint64_t SimGraphs::enqueue(const char* call, const StreamPtr& stream, Node node) {
  if (Capture* capture = active(call, stream)) {
    capture->graph->nodes.push_back(std::move(node));
    ++capture->streams[stream->id][stream->id];
    return 0;
  }
  return stream->enqueue([node = std::move(node), id = stream->id](uint64_t number) {
    node.faults->before(id, number);
    run(node.operation);
  });
}

// No work that has to be joined.
bool SimGraphs::record(Event event, const StreamPtr& stream, Node node) {
  Capture* capture = active("cudaEventRecord", stream);
  forget(event);
  if (capture == nullptr) return false;
  capture->graph->nodes.push_back(std::move(node));
  events_[event] = {capture->id, capture->streams[stream->id]};
  return true;
}

bool SimGraphs::wait(Event event, const StreamPtr& stream, bool legacy) {
  constexpr const char* kCall = "cudaStreamWaitEvent";
  Capture* own = active(kCall, stream);
  const auto recorded = events_.find(event);
  const auto captured =
      recorded == events_.end() ? captures_.end() : captures_.find(recorded->second.capture);
  if (own != nullptr && captured == captures_.end()) {
    own->invalidated = true;
    fail(kCall, kIsolation);
  }
  if (recorded == events_.end()) return false;
  if (captured == captures_.end()) fail(kCall, kCapturedEvent);  // it has ended
  Capture& theirs = captured->second;
  if (own != nullptr && own != &theirs) {
    own->invalidated = theirs.invalidated = true;
    fail(kCall, kMerge);
  }
  if (legacy) {
    theirs.invalidated = true;
    fail(kCall, kImplicit);
  }
  if (theirs.invalidated) fail(kCall, kInvalidated);
  Before& before = theirs.streams[stream->id];
  for (const auto& [id, work] : recorded->second.before) before[id] = std::max(before[id], work);
  return true;
}

// ---- replays ------------------------------------------------------------------------------------

Graph& SimGraphs::graph_at(const char* call, void* graph) {
  const auto entry = graphs_.find(graph);
  if (entry == graphs_.end()) fail(call, "invalid argument");
  return *entry->second;
}

void SimGraphs::launch(void* graph, const StreamPtr& stream) {
  constexpr const char* kCall = "cudaGraphLaunch";
  Graph& launched = graph_at(kCall, graph);
  refuse(kCall, stream);  // CUDA would make it a node, which nobody needs here
  launched.number =
      stream->enqueue([graph = graphs_.at(graph), last = launched.stream,
                       last_number = launched.number, id = stream->id](uint64_t number) {
        if (last) last->wait_for(last_number);
        replay(*graph, id, number);
      });
  launched.stream = stream;
}

// Launches of the graph run to their end.
void SimGraphs::destroy(void* graph) {
  graph_at("cudaGraphExecDestroy", graph);
  graphs_.erase(graph);
}

// ---- the functions for tests --------------------------------------------------------------------

namespace {

thread_local std::string graph_error;

// False after an error, whose text is kept: C has no exceptions.
bool attempt(const char* call, const std::function<void(Process&)>& what) {
  try {
    Process& process = Process::get();
    process.check_owner(call);
    const Entered entered(process);
    process.check(call);
    what(process);
    return true;
  } catch (const std::exception& error) {
    graph_error = error.what();
    return false;
  }
}

StreamPtr stream_at(Process& process, const char* call, void* stream) {
  return process.streams.find(call, stream, device_of_thread);
}

}  // namespace
}  // namespace ringcomm::sim

extern "C" {

[[gnu::visibility("default")]] int ringcomm_sim_begin_capture(void* stream, int mode) {
  constexpr const char* kCall = "cudaStreamBeginCapture";
  const bool done = ringcomm::sim::attempt(kCall, [&](auto& process) {
    if (mode < 0 || mode > 2) ringcomm::sim::fail(kCall, "invalid argument");
    if (stream == nullptr) ringcomm::sim::fail(kCall, ringcomm::sim::kUnsupported);
    process.graphs.begin(ringcomm::sim::stream_at(process, kCall, stream),
                         static_cast<ringcomm::sim::CaptureMode>(mode));
  });
  return done ? 0 : 1;
}

[[gnu::visibility("default")]] void* ringcomm_sim_end_capture(void* stream) {
  constexpr const char* kCall = "cudaStreamEndCapture";
  void* graph = nullptr;
  ringcomm::sim::attempt(kCall, [&](auto& process) {
    graph = process.graphs.end(ringcomm::sim::stream_at(process, kCall, stream));
  });
  return graph;
}

[[gnu::visibility("default")]] int ringcomm_sim_is_capturing(void* stream) {
  constexpr const char* kCall = "cudaStreamIsCapturing";
  bool capturing = false;
  ringcomm::sim::attempt(kCall, [&](auto& process) {
    capturing = process.graphs.is_capturing(ringcomm::sim::stream_at(process, kCall, stream));
  });
  return capturing ? 1 : 0;
}

[[gnu::visibility("default")]] int ringcomm_sim_launch_graph(void* graph, void* stream) {
  constexpr const char* kCall = "cudaGraphLaunch";
  const bool done = ringcomm::sim::attempt(kCall, [&](auto& process) {
    process.graphs.launch(graph, ringcomm::sim::stream_at(process, kCall, stream));
  });
  return done ? 0 : 1;
}

[[gnu::visibility("default")]] void ringcomm_sim_destroy_graph(void* graph) {
  ringcomm::sim::attempt("cudaGraphExecDestroy",
                         [&](auto& process) { process.graphs.destroy(graph); });
}

[[gnu::visibility("default")]] const char* ringcomm_sim_graph_error() {
  return ringcomm::sim::graph_error.c_str();
}
}
