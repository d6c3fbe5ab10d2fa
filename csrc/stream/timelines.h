// The order of a group's work on its device. A timeline is work that is done in order: the group's
// operations; the messages to one peer; those from one peer. A word of this rank's area counts what
// the device has done of each.
#pragma once

#include "device/api.h"
#include "group/group_state.h"

namespace ringcomm {

// A place in a timeline: it is behind the device once the timeline's word has come to `value`.
struct Point {
  int timeline = 0;
  uint32_t value = 0;
  bool operator==(const Point&) const = default;
};

inline constexpr int kGroupTimeline = 0;  // the timeline of the group's operations
inline int timeline_of(Rank peer, bool sending) { return 1 + 2 * peer + (sending ? 1 : 0); }

// Tells whether a word that counts, and may wrap, has come to that value.
inline bool has_come(uint32_t count, uint32_t value) {
  return static_cast<int32_t>(count - value) >= 0;
}

// Events that are used again and again. Any thread may call any function.
class EventPool {
 public:
  EventPool(const GroupState& state, cuda::Api& api) : state_(state), api_(api) {}

  cuda::Event take();
  void give_back(cuda::Event event);
  void destroy();

 private:
  const GroupState& state_;
  cuda::Api& api_;
  Mutex mutex_;
  std::vector<cuda::Event> events_ RINGCOMM_GUARDED_BY(mutex_);
};

// One thread at a time may call it, on the group's device.
class Timelines {
 public:
  Timelines(const GroupState& state, cuda::Api& api, EventPool& events)
      : state_(state),
        api_(api),
        events_(events),
        timelines_(static_cast<size_t>(1 + 2 * state.size())) {}

  // Makes the group's streams, unless it has them. `connections`: the program's streams have so
  // many to the device.
  void make_streams(int connections);
  // Returns the place that the next end in that timeline will have.
  Point next(int timeline) const { return {timeline, at(timeline).issued + 1}; }
  // Returns the stream for what comes next in these timelines, after what came before in each of
  // them: `caller`, or one of the group's, after what is in `caller` so far.
  cuda::Stream begin(const std::vector<int>& timelines, cuda::Stream caller, bool on_own_stream);
  // Records the end of what is in the stream: it is at that place.
  void end(const Point& point, cuda::Stream stream);
  // Do the same for an operation of the group that a graph captures: it comes after those that the
  // same graph has.
  void begin_captured(uint64_t capture, cuda::Stream stream);
  void end_captured(uint64_t capture, cuda::Stream stream);
  void destroy();

 private:
  struct Timeline {
    uint32_t issued = 0;
    cuda::Event event = nullptr;    // the end of the last operation
    cuda::Stream stream = nullptr;  // the group's own for it
  };
  Timeline& at(int timeline) { return timelines_[static_cast<size_t>(timeline)]; }
  const Timeline& at(int timeline) const { return timelines_[static_cast<size_t>(timeline)]; }

  const GroupState& state_;
  cuda::Api& api_;
  EventPool& events_;
  std::vector<Timeline> timelines_;
  std::vector<cuda::Stream> streams_;
  uint64_t capture_ = 0;            // the last graph that has captured an operation of the group
  cuda::Event captured_ = nullptr;  // the end of the last one in it
};

}  // namespace ringcomm
