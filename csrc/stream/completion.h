// The end of an operation on a device, or of a batch of messages: an event in its stream, and
// places in timelines; none of what a graph captures.
#pragma once

#include "stream/verdicts.h"

namespace ringcomm {

class Completion {
 public:
  Completion(Verdicts& verdicts, EventPool& events, cuda::Api& api, int device, uint64_t batch,
             std::vector<Point> points, cuda::Event event, cuda::Stream stream)
      : verdicts_(verdicts),
        events_(events),
        api_(api),
        device_(device),
        batch_(batch),
        points_(std::move(points)),
        event_(event),
        stream_(stream) {}
  ~Completion() { events_.give_back(event_); }
  Completion(const Completion&) = delete;

  bool reached() const {
    return std::ranges::all_of(points_, [&](const Point& at) { return verdicts_.reached(at); });
  }
  // Tells whether the operation, which was reached, is good, and did not end because the group
  // failed.
  bool good() const {
    verdicts_.note_progress();
    return std::ranges::all_of(points_, [&](const Point& at) { return verdicts_.is_good(at); });
  }
  // Tells that somebody waits for it. From now on its messages have a deadline, unless they have
  // one.
  void expect() const { verdicts_.expect(batch_); }
  // Makes the stream wait for it; the host does not.
  void block(cuda::Stream stream) const {
    const cuda::OnDevice here(api_, device_);  // to which the default stream belongs
    api_.wait(stream, event_);
  }
  cuda::Stream stream() const { return stream_; }

 private:
  Verdicts& verdicts_;
  EventPool& events_;
  cuda::Api& api_;
  const int device_;
  const uint64_t batch_;
  const std::vector<Point> points_;
  const cuda::Event event_;
  const cuda::Stream stream_;
};
using CompletionPtr = std::shared_ptr<Completion>;

}  // namespace ringcomm
