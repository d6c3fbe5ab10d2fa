// A network in one thread: ranks, groups and sessions as they are shipped, over connections that a
// seed delays, cuts, corrupts and loses. Time is a number.
#pragma once

#include <array>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <unordered_map>

#include "cpp/oracle.h"
#include "message/mailbox.h"
#include "net/session.h"
#include "plan/select.h"
#include "transport/transport.h"

namespace ringcomm::testing {

// The settings of a simulation, and the rules that a test may switch off.
struct Setup {
  SessionRules session{.silence = std::chrono::seconds(5)};  // steps are few here
  bool reclaim_lent = true;  // lent memory is copied when an operation ends
  bool halves = true;        // operations alternate between the halves
  bool credits = true;       // writers wait until a slot has been read
  bool epochs = true;        // a group made anew has a channel of its own
  bool numbers = true;       // the numbers of a forgotten session are kept
  bool faults = true;
  int operations = 4;  // of each group and generation
};

// One direction of a connection: bytes that the receiver has not read yet.
struct Pipe {
  std::deque<std::byte> bytes;
  bool cut = false;          // nothing more gets in; after the last byte the reader may see the end
  Clock::time_point held{};  // nothing arrives before
  std::vector<std::byte> frame, last;  // being written, and the one before it: may come twice
};

struct Connection {
  uint64_t generation = 0;
  int initiator = 0;
  int phase = 0;           // of the handshake, 4: up on both sides
  Cursor theirs;           // of the last message of the handshake
  std::array<Pipe, 2> to;  // by receiving side
  bool repeats = false;    // the next frame that is written comes twice
  bool silent = false;     // its end shows nowhere: only silence tells
};

// Channels of one process at one end of a session.
class Channels final : public Receiver {
 public:
  void add(uint64_t channel, Receiver* receiver) { channels_[channel] = receiver; }
  void remove(uint64_t channel) { channels_.erase(channel); }
  std::byte* place(const Frame& frame) override {
    const auto channel = channels_.find(frame.channel);
    return channel == channels_.end() ? nullptr : channel->second->place(frame);
  }
  void deliver(const Frame& frame, std::span<const std::byte> payload) override {
    const auto channel = channels_.find(frame.channel);
    if (channel != channels_.end()) channel->second->deliver(frame, payload);
  }

 private:
  std::unordered_map<uint64_t, Receiver*> channels_;
};

// One process's end of a session, with the flows of both.
class End final : public Wire {
 public:
  End(int flows, const SessionRules& rules)
      : rules(rules), session(channels, flows, rules), window(rules.window) {
    connections.resize(static_cast<size_t>(flows));
  }
  void post(const Frame& frame, Payload payload) override {
    session.post(frame, std::move(payload));
  }
  void reclaim_lent(uint64_t channel) override { session.reclaim_lent(channel); }
  void open(uint64_t channel, Receiver* receiver) override { channels.add(channel, receiver); }
  void close(uint64_t channel) override { channels.remove(channel); }
  void flush() override {
    if (flushed) flushed();
  }
  bool reached() override {
    return session.posted() > 0 || session.last_heard() != Clock::time_point{};
  }
  uint64_t undelivered() override { return session.posted() - session.acknowledged(); }
  void need() override {}
  bool lost() override { return gone; }
  std::string condition() override { return gone ? "its process died" : "alive"; }

  bool any_up() const {
    bool any = false;
    for (int flow = 0; flow < session.flows(); ++flow) any = any || session.is_up(flow);
    return any;
  }
  // As the network does with a peer that nobody needs, and when that is needed again.
  void forget(bool keeps_numbers) {
    const SessionNumbers numbers = keeps_numbers ? session.numbers() : SessionNumbers();
    const int flows = session.flows();
    std::destroy_at(&session);
    std::construct_at(&session, channels, flows, rules, numbers);
  }

  Channels channels;
  const SessionRules rules;
  Session session;
  const uint64_t window;
  std::vector<std::shared_ptr<Connection>> connections;  // by flow
  std::function<void()> flushed;                         // frames are to be sent at once
  bool gone = false;
};

// Two ends and the connections between them.
class Pair {
 public:
  Pair(int flows, const SessionRules& rules) : ends{End(flows, rules), End(flows, rules)} {
    pending.resize(static_cast<size_t>(flows));
  }

  void connect(int flow, int initiator);
  void shake_hands(int flow, Clock::time_point now);
  void write(int side, int flow, Random& random);
  void read(int side, int flow, Random& random, Clock::time_point now);
  void tick(int side, Clock::time_point now, Clock::duration stalled);
  void cut(int flow, Random& random, Clock::time_point now);
  void corrupt(int side, int flow, Random& random);
  void repeat(int side, int flow);
  void forget(int side, bool keeps_numbers);

  std::array<End, 2> ends;
  std::vector<std::shared_ptr<Connection>> pending;
  uint64_t cuts = 0, corrupted = 0, parked = 0, forgotten = 0;

 protected:
  void detach(int side, int flow);

 private:
  static void carry(Connection& connection, Pipe& pipe, const std::byte* data, size_t bytes);
  void close_those_it_closed(int side);
};

}  // namespace ringcomm::testing
