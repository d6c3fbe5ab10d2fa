// Runs operations on a device through memory of the host, if ranks do not reach one another's
// devices. The stream copies to pinned memory, the group's own engine works there, and the stream
// copies back. Stream and host tell each other by words in such memory. No other file knows the
// engines of both.
//
// A long operation goes in pieces: while the host works on one, the stream copies the next ones in,
// and the last one out. Pieces use few slots in turn. The slots are those of all operations, which
// end in order: so does the stream's work, and what is copied in comes after what was copied out.
#pragma once

#include "progress/progress.h"
#include "stream/timelines.h"

namespace ringcomm {

// A message on a device, as it was asked for.
struct DeviceMessage {
  MessageKind kind;
  Span data;
  std::chrono::milliseconds timeout{0};  // 0: the group's

  int timeline() const { return timeline_of(kind.peer, kind.sending); }
};

class HostStaging {
 public:
  // How an operation ended, once it has.
  enum Result : uint32_t { kGood = 1, kBad = 2 };
  using ResultWord = const std::atomic<uint32_t>*;
  // Says whether that place is behind the device, and notes how it ended.
  using Passed = std::function<bool(const Point& point)>;

  HostStaging(const GroupState& state, Progress& progress, cuda::Api& api, Passed passed)
      : state_(state), progress_(progress), api_(api), passed_(std::move(passed)) {}

  // If streams cannot signal, calls wait. Then there is no word to look at later.
  bool streams_can_signal = false;
  // Enqueues an operation, which ends at that place. `uncut`: as a single piece.
  ResultWord run(const Operation& operation, cuda::Stream stream, const Point& end, bool uncut);
  // Enqueues messages, which end at those places. All are on their way before the stream waits for
  // any of them: the peers may do the same.
  std::vector<ResultWord> post(const std::vector<DeviceMessage>& messages,
                               const std::vector<Point>& ends, cuda::Stream stream);

  // Tells whether there are messages whose data no stream has brought to the host yet.
  bool gated() {
    const Lock lock(mutex_);
    return !gates_.empty();
  }
  // Posts those that have come. Returns true when there were some.
  bool open_gates();
  void give_back() {
    for (const Buffer& buffer : std::exchange(buffers_, {})) api_.release_pinned(buffer.memory);
  }

 private:
  struct Buffer {
    std::byte* memory;
    uint64_t bytes;
    std::optional<Point> end;  // it is free behind this; none: a slot
  };
  struct Gate {
    const std::atomic<uint32_t>* open;
    MessagePtr message;
  };

  std::byte* buffer(uint64_t bytes, const std::optional<Point>& end);
  void copy(cuda::Stream stream, const Spans& to, const Spans& from);
  void signal_host(cuda::Stream stream, std::byte* buffer, uint32_t pieces);
  void await(cuda::Stream stream, std::byte* buffer, uint32_t pieces);

  const GroupState& state_;
  Progress& progress_;
  cuda::Api& api_;
  const Passed passed_;
  std::deque<Buffer> buffers_;
  std::array<Span, 4> slots_;  // of buffers that no message uses

  Mutex mutex_;
  std::vector<Gate> gates_ RINGCOMM_GUARDED_BY(mutex_);
};

}  // namespace ringcomm
