#include "stream/timelines.h"

namespace ringcomm {

constexpr int kReceiving = 3;    // streams
constexpr int kConnections = 8;  // CUDA's own choice

cuda::Event EventPool::take() {
  {
    const Lock lock(mutex_);
    if (!events_.empty()) {
      const cuda::Event event = events_.back();
      events_.pop_back();
      return event;
    }
  }
  return api_.make_event();
}

void EventPool::give_back(cuda::Event event) {
  if (state_.forked()) return;
  const Lock lock(mutex_);
  events_.push_back(event);
}

void EventPool::destroy() {
  const Lock lock(mutex_);
  for (const cuda::Event event : events_) api_.destroy_event(event);
}

// One for the group's operations, one for sending, and few for receiving: streams share connections
// to the device, on which one that waits holds up the others. They are made at once, before any of
// them waits: the driver may make no other then.
void Timelines::make_streams(int connections) {
  if (!streams_.empty()) return;
  const int receiving = std::min(kReceiving, std::max(1, state_.size() - 1));
  for (int i = 0; i < 2 + receiving; ++i) streams_.push_back(api_.make_stream());
  at(kGroupTimeline).stream = streams_[0];
  for (Rank peer = 0; peer < state_.size(); ++peer) {
    const int other = (peer < state_.rank() ? peer : peer - 1) % receiving;
    at(timeline_of(peer, true)).stream = streams_[1];
    at(timeline_of(peer, false)).stream = streams_[static_cast<size_t>(2 + std::max(0, other))];
  }
  if (connections >= kConnections) return;
  state_.logger().warning("CUDA_DEVICE_MAX_CONNECTIONS=", connections, ": streams that wait for a ",
                          "rank hold up others, also the program's; ", kConnections,
                          " or more are safer");
}

cuda::Stream Timelines::begin(const std::vector<int>& timelines, cuda::Stream caller,
                              bool on_own_stream) {
  const cuda::Stream stream = on_own_stream ? at(timelines[0]).stream : caller;
  if (on_own_stream) {
    const cuda::Event ready = events_.take();
    api_.record(ready, caller);
    api_.wait(stream, ready);
    events_.give_back(ready);
  }
  for (const int timeline : timelines) {
    if (at(timeline).event != nullptr) api_.wait(stream, at(timeline).event);
  }
  return stream;
}

void Timelines::end(const Point& point, cuda::Stream stream) {
  Timeline& timeline = at(point.timeline);
  if (timeline.event == nullptr) timeline.event = api_.make_event();
  timeline.issued = point.value;
  api_.record(timeline.event, stream);
}

void Timelines::begin_captured(uint64_t capture, cuda::Stream stream) {
  if (capture_ == capture) api_.wait(stream, captured_);
}

void Timelines::end_captured(uint64_t capture, cuda::Stream stream) {
  if (captured_ == nullptr) captured_ = api_.make_event();
  capture_ = capture;
  api_.record(captured_, stream);
}

void Timelines::destroy() {
  if (captured_ != nullptr) api_.destroy_event(std::exchange(captured_, nullptr));
  for (Timeline& timeline : timelines_) {
    if (timeline.event != nullptr) api_.destroy_event(std::exchange(timeline.event, nullptr));
  }
  for (const cuda::Stream stream : std::exchange(streams_, {})) api_.destroy_stream(stream);
}

}  // namespace ringcomm
