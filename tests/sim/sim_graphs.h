// Capture and replay of CUDA graphs on a simulated device, by the rules of cudaStreamBeginCapture.
//
// A call that enqueues into a stream that takes part in a capture makes a node of its graph, and
// runs nothing. A replay is one command of a stream. It runs the nodes one by one, in the order
// of the calls, as CUDA may do. Memory that was released or unregistered since the capture is an
// illegal access, also where other memory has come to lie at its address.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "sim/sim_memory.h"
#include "sim/sim_streams.h"

namespace ringcomm::sim {

class Faults;
using StreamPtr = std::shared_ptr<SimStream>;

enum class CaptureMode : uint8_t { kGlobal, kThreadLocal, kRelaxed };  // cudaStreamCaptureMode

// The mode of the calling thread is relaxed (cudaThreadExchangeStreamCaptureMode), not global.
inline thread_local bool thread_relaxed = false;

// A range of addresses that a call was given, and the allocation that it was part of then.
struct Use {
  const std::byte* address;
  uint64_t bytes;
  bool mapped;
  uint64_t allocation;  // 0: none, as for registered memory
};

// Finds where the host has what a call was given as addresses of the device, and keeps their list.
class Addresses {
 public:
  Addresses(const char* call, SimMemory& memory) : call_(call), memory_(memory) {}

  std::byte* host_side(const std::byte* address, uint64_t bytes, bool mapped) {
    std::byte* host = memory_.host_side(call_, address, bytes, mapped);
    uses_.push_back({address, bytes, mapped, memory_.allocation_of(address).id});
    return host;
  }
  // Replaces an argument of a kernel.
  template <typename T>
  void operator()(T*& address, uint64_t bytes, bool mapped = false) {
    if (address == nullptr) return;
    const auto* device_side = reinterpret_cast<const std::byte*>(address);
    address = reinterpret_cast<T*>(host_side(device_side, bytes, mapped));
  }
  const char* call() const { return call_; }
  const std::vector<Use>& uses() const { return uses_; }

 private:
  const char* const call_;
  SimMemory& memory_;
  std::vector<Use> uses_;
};

struct Node {
  std::shared_ptr<Faults> faults;
  std::vector<Use> uses;
  std::function<void()> operation;
};

// No node is added once it was captured.
struct Graph {
  std::vector<Node> nodes;
  StreamPtr stream;  // of the last launch, which has this number there
  uint64_t number = 0;
};

// Those of a process, and its captures. Process::driver guards all of it.
class SimGraphs {
 public:
  void begin(const StreamPtr& stream, CaptureMode mode);
  void* end(const StreamPtr& stream);  // the graph
  void launch(void* graph, const StreamPtr& stream);
  void destroy(void* graph);

  bool is_capturing(const StreamPtr& stream);       // also after the capture was invalidated
  uint64_t capture_of(const StreamPtr& stream);     // 0: none, or one that was invalidated
  bool captures_globally() const;                   // any stream, in mode global
  void refuse_unsafe(const char* call);             // where a capture forbids it to this thread
  void refuse(const char* call, const StreamPtr&);  // a call that no stream takes while it captures

  // Into the graph that the stream captures, or for the device. Returns its number in the stream; 0
  // where it was captured.
  uint64_t enqueue(const char* call, const StreamPtr& stream, Node node);
  // False where the stream does not capture.
  bool record(Event event, const StreamPtr& stream, Node node);
  // False where the event was not captured. Else the stream takes part in its capture, which that
  // of CUDA's legacy stream, the default one, cannot.
  bool wait(Event event, const StreamPtr& stream, bool legacy);
  void forget(Event event) { events_.erase(event); }

 private:
  // How much work of each stream comes before: the next of a stream, or the end of the graph.
  using Before = std::map<uint64_t, uint64_t>;
  struct Capture {
    uint64_t id = 0;
    CaptureMode mode = CaptureMode::kGlobal;
    uint64_t thread = 0;
    uint64_t origin = 0;  // the stream where it began
    bool invalidated = false;
    std::map<uint64_t, Before> streams;  // that take part
    std::shared_ptr<Graph> graph;
  };
  struct Captured {  // the last record of an event
    uint64_t capture;
    Before before;
  };

  Capture* find(const StreamPtr& stream);  // null where it does not capture
  Capture* active(const char* call, const StreamPtr& stream);
  Graph& graph_at(const char* call, void* graph);

  uint64_t next_id_ = 1;
  std::map<uint64_t, Capture> captures_;
  std::map<Event, Captured> events_;
  std::map<void*, std::shared_ptr<Graph>> graphs_;
};

}  // namespace ringcomm::sim
