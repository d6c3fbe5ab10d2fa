// Runs operations on a device through memory of the host, if ranks do not reach one another's
// devices. The stream copies to pinned memory, the group's own engine works there, and the stream
// copies back. Stream and host tell each other by words in such memory. No other file knows the
// engines of both.
//
// A long operation goes in pieces: while the host works on one, the stream copies the next ones in,
// and the last one out. Pieces use few slots in turn. The slots are those of all operations, which
// end in order: so does the stream's work, and what is copied in comes after what was copied out.
#pragma once

#include "device/api.h"
#include "progress/progress.h"

namespace ringcomm {

// A message on a device, as it was asked for.
struct DeviceMessage {
  MessageKind kind;
  Span data;
  std::chrono::milliseconds timeout{0};  // 0: the group's

  // Operations of one timeline end in order: the group's are 0, each direction of a peer has one.
  int timeline() const { return timeline_of(kind.peer, kind.sending); }
  static int timeline_of(Rank peer, bool sending) { return 1 + 2 * peer + (sending ? 1 : 0); }
};

class HostStaging {
 public:
  // How an operation ended, once it has.
  enum Result : uint32_t { kGood = 1, kBad = 2 };
  using ResultWord = const std::atomic<uint32_t>*;
  // A point of a timeline. `passed` says whether it is behind the device, and notes how it ended.
  struct Point {
    int timeline;
    uint32_t value;
  };
  using Passed = std::function<bool(const Point& point)>;

  HostStaging(Progress& group, cuda::Api& api, Passed passed)
      : group_(group), api_(api), passed_(std::move(passed)) {}

  // If streams cannot signal, calls wait. Then there is no word to look at later.
  bool streams_can_signal = false;
  // The number of the host's last operation, after run().
  uint64_t sequence() const { return group_.host().sequence(); }
  ResultWord run(const Operation& operation, cuda::Stream stream, const Point& end, bool uncut);
  // All are on their way before the stream waits for one: the peers may do the same.
  std::vector<ResultWord> post(const std::vector<DeviceMessage>& messages,
                               const std::vector<Point>& ends, cuda::Stream stream);

  // Messages whose data no stream has brought to the host yet.
  bool gated() {
    const Lock lock(mutex_);
    return !gates_.empty();
  }
  // Posts those that have come. True when there was one.
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
  void tell(cuda::Stream stream, std::byte* buffer, uint32_t pieces);
  void await(cuda::Stream stream, std::byte* buffer, uint32_t pieces);

  Progress& group_;
  cuda::Api& api_;
  const Passed passed_;
  std::deque<Buffer> buffers_;
  std::array<Span, 4> slots_;  // of buffers that no message uses

  Mutex mutex_;
  std::vector<Gate> gates_ RINGCOMM_GUARDED_BY(mutex_);
};

}  // namespace ringcomm
