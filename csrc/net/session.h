// A session joins two processes and outlives its connections. All posted frames arrive once and in
// order, or the session is given up as a whole.
//
// This is the protocol alone: no sockets, no threads, no clock. Its owner moves bytes between
// it and its *flows* (connections), says when a flow has gone or come, and tells the time. So the
// simulator (tests/cpp/net/session_sim.cc) runs the code that production runs.
//
// Any flow that can take bytes takes the next frame, unless another would bring it and all behind
// it sooner: a slow one does not set the pace. Frames are numbered.
//
// `post` does not copy the payload. The memory must not change until the frame is acknowledged, or
// until the peer's own words prove that it came. A duplicate may carry changed bytes; its number
// identifies it before its checksum is looked at.
//
// When a flow is lost, the peer first closes it and then says which frames came. The others are
// sent again. In the other order, bytes under way could fall into memory that is in use again.
#pragma once

#include <sys/uio.h>

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <utility>

#include "base/deadline.h"
#include "net/frame.h"

namespace ringcomm {

// The channels' side: gives memory to payloads, and hears of frames.
class Receiver {
 public:
  virtual ~Receiver() = default;
  // Gives memory to the payload of a put or stream frame; null where the channel is not known (any
  // more): then it is dropped. Throws FlowError when the peer may not write there.
  virtual std::byte* place(const Frame& frame) = 0;
  // Takes each frame once, in the order of posting. `payload` is given for kState only.
  virtual void deliver(const Frame& frame, std::span<const std::byte> payload) = 0;
  // Returns the payload of a kState frame, if the peer has not heard the latest. Asked now and
  // then.
  virtual std::vector<std::byte> news() { return {}; }
  // Tells whether the connections may be parked: nobody here is likely to need them soon.
  virtual bool idle() { return true; }
};

// The invariants, for the tests that switch one off and must then fail.
struct SessionRules {
  bool apply_once = true;  // a frame whose number has come before is dropped
  bool fence = true;       // no cursor is told before the flow it is about is closed
  bool verify = true;      // payloads have a checksum; nothing is delivered whose is wrong
  bool bounded = true;     // at most `window` frames wait for their acknowledgement
  bool latest = true;      // lent memory is copied nowhere that a later frame's bytes lie already
  bool rest = true;  // connections are parked only while nothing waits for its acknowledgement
  uint64_t window = kFrameWindow;
  Clock::duration silence = std::chrono::seconds(2);  // of a flow: then it is closed
};

// The speed of a flow's connection, and its backlog.
struct Pace {
  uint64_t bytes_per_second = 0;  // 0: not known yet
  uint64_t queued = 0;            // bytes that it had been given and that had not arrived
};

// The rest of a session without connections: all that a later one has to know.
struct SessionNumbers {
  uint64_t posted = 0, come = 0;  // frames
  uint64_t generation = 0;        // the last of any flow
  bool operator==(const SessionNumbers&) const = default;
};

class Session {
 public:
  Session(Receiver& receiver, int flows, const SessionRules& rules = {},
          const SessionNumbers& numbers = {});

  // ---- frames
  // Posts a frame, which names type, channel, offset, stamp, lane and half, and the bytes of lent
  // memory.
  void post(const Frame& frame, Payload payload = {});
  // Ends the channel's loans: afterwards the lender may change its memory again.
  void reclaim_lent(uint64_t channel);
  // Copies the payloads that the peer may not have yet: the channel's memory goes.
  void release(uint64_t channel);
  void ask_for_ack() { say({.stamp = 1}); }
  uint64_t posted() const { return first_ + items_.size() - 1; }  // the last frame's number
  uint64_t acknowledged() const { return first_ - 1; }            // all up to this one
  uint64_t unacknowledged() const { return next_ - first_; }      // sent, and waiting for it

  // ---- flows
  int flows() const { return static_cast<int>(flows_.size()); }
  bool is_up(int flow) const { return at(flow).up; }
  // Has so many of them carry new frames, the first ones. Others are idle while one of these is up.
  void use(int count) { used_ = count; }
  int used() const { return used_; }
  // Tells whether this flow is to be connected while it is down: it is used, or frames wait for
  // word of which came over it.
  bool needs(int flow) const { return flow < used_ || !at(flow).fenced; }
  uint64_t generation(int flow) const { return std::max(at(flow).generation, before_); }
  // Notes that it has gone, or is to be replaced: bytes half-read are forgotten, its frames wait
  // for the peer's cursor. Its socket is closed before this.
  void down(int flow);
  // Begins a new connection. `theirs` was taken by the peer after it had called down(). Returns
  // false if the peer has given this very connection up already.
  bool up(int flow, uint64_t generation, const Cursor& theirs, Clock::time_point now);
  Cursor cursor() const;
  // Names flows that are closed here (as by down()), because the peer says so or was silent for
  // long. The caller closes their sockets.
  std::vector<int> take_closed() { return std::exchange(closed_, {}); }

  // ---- parking: both close their connections, and connect when one has something to say. That is
  // never worse than a lost connection, after which both would connect at once.
  bool at_rest() const { return items_.empty() && waiting_.empty(); }
  void ask_to_park() { say({.type = FrameType::kPark}); }
  bool parked() const { return parked_; }
  void unpark() { parked_ = false; }
  SessionNumbers numbers() const;

  // ---- writing: gather() names the next bytes, and wrote() says how many of them were taken. A
  // flow takes no frame that would arrive sooner over another flow, behind all frames there.
  void pace(int flow, const Pace& pace) { at(flow).pace = pace; }
  size_t gather(int flow, std::span<iovec> parts);
  void wrote(int flow, size_t bytes);
  bool has_output(int flow) const;

  // ---- reading: the rest of a payload may be read straight into landing(); all other bytes go
  // through read(). Both throw FlowError: then call down().
  std::span<std::byte> landing(int flow);
  void landed(int flow, size_t bytes);
  // Tells how many bytes will come in any case: the rest of a header or of a payload.
  size_t expected(int flow) const;
  void read(int flow, std::span<const std::byte> bytes, Clock::time_point now);

  // Tells the time; call it now and then. `stalled`: how long this process itself did not run. A
  // peer is not blamed for that silence.
  void tick(Clock::time_point now, Clock::duration stalled);
  Clock::time_point last_heard() const { return last_heard_; }
  Clock::duration silence() const { return rules_.silence; }

  struct Counters {
    std::atomic<uint64_t> resent{0};  // any thread may read it
    uint64_t duplicates = 0;
  };
  const Counters& counters() const { return counters_; }

 private:
  struct Item {  // posted, not yet acknowledged
    Frame frame;
    Payload payload;
    int flow = -1;  // that carries or carried it
    bool acknowledged = false;
  };
  struct Writing {  // on its way into a flow
    Frame header;
    Payload payload;
    size_t done = 0;
  };
  struct Reading {
    Frame frame;
    size_t header = 0, body = 0;  // bytes so far
    std::byte* to = nullptr;      // null: dropped
    std::vector<std::byte> own;
  };
  struct Flow {
    bool up = false;
    bool fenced = true;  // the peer has said what came over it
    uint64_t generation = 0;
    uint64_t refused = 0;  // a generation that the peer has given up, maybe before it came up here
    std::deque<Writing> writing;
    size_t writing_bytes = 0;
    Pace pace;
    Reading reading;
    Clock::time_point heard, spoke;
  };
  struct Delivery {
    Frame frame;
    std::vector<std::byte> payload;
  };

  // Made when it is first needed: most processes of a large job never talk with one another.
  Flow& at(int index) {
    auto& flow = flows_[static_cast<size_t>(index)];
    if (!flow) flow = std::make_unique<Flow>();
    return *flow;
  }
  const Flow& at(int index) const {
    static const Flow kUnused;
    const auto& flow = flows_[static_cast<size_t>(index)];
    return flow ? *flow : kUnused;
  }
  Item& item(uint64_t sequence) { return items_[sequence - first_]; }  // posted and not yet gone
  bool waits_to_be_sent() const {
    const bool window_open = !rules_.bounded || next_ - first_ < rules_.window;
    return !again_.empty() || (next_ - first_ < items_.size() && window_open);
  }
  bool declines(int flow) const;
  std::optional<uint64_t> next_to_send();
  void each_writing(uint64_t channel, const std::function<void(Writing&)>& act);
  void fill(int flow);
  void write_control(int flow, Frame frame, bool with_cursor);
  void say(const Frame& frame);
  void answer(int flow, const Frame& frame, bool with_cursor);
  void park(int flow, bool asked);
  void push(int flow, Writing writing);
  void acknowledge(uint64_t all);
  void acknowledge(const Cursor& theirs);
  void resolve(int flow, const Cursor& theirs);
  void open(Reading& reading);
  void close(int flow, Reading& reading);
  void apply(Delivery delivery);
  void control(int flow, const Frame& frame, std::span<const std::byte> payload);
  void flow_down(const Frame& frame);

  Receiver& receiver_;
  const SessionRules rules_;
  std::vector<std::unique_ptr<Flow>> flows_;
  int used_;
  const uint64_t ack_every_;
  const uint64_t before_;  // no flow had a later generation before this session was at rest
  bool parked_ = false;
  std::vector<int> closed_;
  Clock::time_point last_heard_;

  uint64_t first_;  // number of items_.front()
  std::deque<Item> items_;
  uint64_t next_;             // the first that was never sent
  std::set<uint64_t> again_;  // to be sent once more

  uint64_t all_;                          // applied: all up to this one,
  std::map<uint64_t, Delivery> waiting_;  // and these, which wait for those between
  uint64_t unacknowledged_ = 0;           // frames that came and that the peer was not told of
  bool ack_now_ = false;
  Counters counters_;
};

}  // namespace ringcomm
