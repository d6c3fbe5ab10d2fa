// A group's operations on tensors of a device: work that its streams do, in the order of the calls.
// The host enqueues and goes on; it waits for other ranks once, when they first meet here.
//
// Of two ranks that call different collectives at least one notices before it enqueues anything:
// each writes its board before it reads the other's. So neither gets a result.
#pragma once

#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "comm/inquiry.h"
#include "comm/mailbox.h"
#include "comm/operation.h"
#include "comm/recorder.h"
#include "comm/waiter.h"
#include "cuda/library.h"
#include "plan/cache.h"

namespace ringcomm {

class Communicator;

// The library for devices, opened at the first call. Throws UsageError, in one sentence, where this
// build has none, or this machine no device that it could use.
cuda::Library& device_library();
// Do tensors of the CPU stand in for those of a device? In tests: RINGCOMM_CUDA_LIBRARY.
bool device_is_simulated();

class DeviceGroup {
 public:
  // The end of an operation: an event in its stream, and a count in memory of the host.
  class End {
   public:
    End(DeviceGroup& group, int track, uint32_t value, cuda::Event event, cuda::Stream stream)
        : group_(group), track_(track), value_(value), event_(event), stream_(stream) {}
    ~End() { group_.keep(event_); }
    End(const End&) = delete;
    End& operator=(const End&) = delete;

    bool reached() const { return group_.reached(track_, value_); }
    // Somebody waits for it: from now on, if not since before, its messages have a deadline.
    void expect() const { group_.expect(track_, value_); }
    bool good() const;                      // of what was reached: not because the group failed
    void block(cuda::Stream stream) const;  // the stream waits for it, the host does not
    cuda::Stream stream() const { return stream_; }

   private:
    DeviceGroup& group_;
    const int track_;
    const uint32_t value_;
    const cuda::Event event_;
    const cuda::Stream stream_;
  };
  using EndPtr = std::shared_ptr<End>;

  // How the host's way says to a stream that it is over, and to whoever asks how it ended.
  enum Result : uint32_t { kGood = 1, kBad = 2 };

  struct Posted {  // a message, as it was asked for
    MessageKind kind;
    Span data;
    std::chrono::milliseconds timeout{0};  // 0: the group's
  };

  DeviceGroup(Communicator& group, cuda::Library& library, int device);
  ~DeviceGroup();
  DeviceGroup(const DeviceGroup&) = delete;
  DeviceGroup& operator=(const DeviceGroup&) = delete;

  int device() const { return device_; }
  // Operations that ranks have done without the host's way, which counts its own.
  uint64_t sequence() const { return sequence_.load(std::memory_order_relaxed); }
  // After what is in `caller` so far; in that stream itself, or beside it where `aside`. `finish`
  // may enqueue something more that belongs to it.
  using Finish = std::function<void(cuda::Stream)>;
  EndPtr enqueue(const Operation& operation, cuda::Stream caller, bool aside, const Finish& finish);
  // Messages that make progress side by side, beside `caller`.
  EndPtr enqueue(const std::vector<Posted>& messages, cuda::Stream caller, const Finish& finish);
  // In `caller`: dst[i] = src[i] * factor, rounded to the type.
  void scale(DType dtype, double factor, Span dst, const std::byte* src, cuda::Stream caller);
  // The host waits for what is in that stream.
  void synchronize(cuda::Stream stream) const;
  // Meets the others, if that has not been done. Every rank of the group must call it.
  void connect();

  bool pending();
  // Is there something that only needs time: the ranks have all called what is pending?
  bool expected();
  // How long the worker may sleep before it looks at this group again.
  Clock::duration nap();
  // Notes what is over and what of it is good. Peers may want to know how far this rank has come.
  void note_progress();
  // Posts what a stream has brought to the host. True when there was something.
  bool open_gates();
  bool gated();
  // The slow path: ends what is done, throws what is wrong with the rest.
  void look();
  // The group has failed: lets streams go on that wait for others. `patiently`: not before those
  // operations are over that can still end well.
  void release(bool patiently);
  // Within `grace`, lets go of peers' memory, waits until they have let go of ours, gives it back.
  void close(Clock::duration grace);
  void forked() { forked_.store(true); }
  std::vector<Record> records() const { return recorder_.records(); }

 private:
  struct Track {  // what is done in order: the group's operations; messages to or from one peer
    uint32_t issued = 0;
    cuda::Event event = nullptr;  // the end of the last one
    cuda::Stream own = nullptr;
  };
  struct Pending {
    Descriptor operation;
    int track;
    uint32_t value;
    Rank peer;  // of a message, else -1
    Clock::duration timeout;
    std::optional<Deadline> deadline;  // of a message: since somebody waits for it
    std::optional<uint64_t> ticket;    // the flight recorder's: none if the host's way records it
    uint64_t number = 0;               // of a message, among those to or from that peer
    uint64_t batch = 0;                // of what was enqueued together
    const std::atomic<uint32_t>* result = nullptr;  // the host's way: kGood if it has ended well

    bool sending() const { return track % 2 == 0; }  // see track_of()
  };
  struct Buffer {  // memory of the host through which an operation goes
    std::byte* memory;
    uint64_t bytes;
    int track;
    uint32_t value;  // free when this has been reached
  };
  struct Gate {
    const std::atomic<uint32_t>* open;
    std::function<void()> then;
  };

  bool reached(int track, uint32_t value) const;
  bool is_good(int track, uint32_t value);
  bool is_doomed(const Pending& pending) const;
  bool ended_well(const Pending& pending) const;
  bool has_let_go(Rank peer) const;
  PeerState state_of(Rank peer, uint64_t sequence) const;
  std::optional<Rank> spoiler(const Pending& pending) const;
  bool can_end_well(const Pending& pending);
  bool owed();
  void await_owed(const std::string& asked);
  void release_now();
  bool called(const Pending& pending) const;
  void expect(int track, uint32_t value);
  void keep(cuda::Event event);
  cuda::Event event();
  cuda::Stream own_stream(int track);
  cuda::Stream begin(const std::vector<int>& tracks, cuda::Stream caller, bool aside);
  EndPtr end(const std::vector<int>& tracks, cuda::Stream stream, std::vector<Pending> pending);
  template <typename Enqueue>
  EndPtr guarded(const std::string& asked, Enqueue&& enqueue);

  cuda::Circle circle_of(Rank peer) const;
  bool reach(Rank peer) const;
  void meet(const std::vector<cuda::Circle>& circles, const std::string& asked);
  std::string why_not(const cuda::Circle& circle) const;
  void await_step(const cuda::Circle& circle, uint32_t step, const Deadline& deadline,
                  const std::string& asked);
  void tell(const cuda::Circle& circle, const cuda::Found& found, const std::string& asked);

  void make_room();
  void announce(const Operation& operation, const Descriptor& descriptor);
  uint64_t compare(const Posted& message);
  std::optional<Algorithm> choose(const Shape& shape) const;
  void run(const Operation& operation, const Shape& shape, std::optional<Algorithm> algorithm,
           cuda::Stream stream);
  const std::atomic<uint32_t>* run_on_host(const Operation& operation, cuda::Stream stream);
  std::vector<const std::atomic<uint32_t>*> post_on_host(const std::vector<Posted>& messages,
                                                         cuda::Stream stream);
  std::shared_ptr<Message> message_for(const Posted& posted, std::byte* buffer) const;
  std::byte* buffer(uint64_t bytes, int track);
  void check_pending(const Pending& pending);
  void check_message(const Pending& pending) const;
  const cuda::Area& own() const { return area_; }
  cuda::Area area_of(Rank peer) const;
  void refuse_capture(cuda::Stream caller) const;
  void release_team();
  void give_back();

  Communicator& group_;
  cuda::Api& api_;
  const int device_;
  const cuda::Area area_;
  Recorder recorder_;
  Inquiry inquiry_;

  std::mutex enqueue_mutex_;          // guards what follows; CUDA may block whoever holds it
  std::unique_ptr<cuda::Team> team_;  // goes under mutex_, too
  PlanCache plans_;
  std::vector<Track> tracks_;
  std::map<int, bool> met_;            // circles, by this rank's card: do they reach one another?
  cuda::Found found_;                  // of the group's
  std::atomic<uint64_t> sequence_{0};  // written under the lock
  std::vector<uint64_t> sent_, received_;  // messages, by peer
  std::deque<Buffer> buffers_;
  bool streams_meet_ = false;  // words of the host, that is

  std::mutex mutex_;  // guards what follows; never held during a call of CUDA's
  std::deque<Pending> pending_;
  uint64_t batches_ = 0;
  std::vector<cuda::Event> events_;
  std::list<Gate> gates_;
  std::vector<uint32_t> good_until_;  // by track
  std::vector<bool> spoilt_;          // by track: after those, nothing is good
  std::atomic<bool> failed_{false};   // released, or soon; partner: look()
  std::atomic<bool> released_{false}, forked_{false};
  bool kept_ = false;  // streams or peers may still use what the team has: till the process ends
};

}  // namespace ringcomm
