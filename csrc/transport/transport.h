// What an executor needs of whatever joins the ranks of one group.
//
// Contract: signal() is a release of everything this rank did before it, as seen by `peer` once
// arrived() there returns the new count. Counters are 64-bit, per (ordered pair, lane), and only
// grow. `half` is the operation's sequence number mod 2: each half has its own memory and lines.
// One thread drives a transport at a time, except where a function says otherwise.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "base/doorbell.h"
#include "base/error.h"
#include "base/fd.h"

namespace ringcomm {

// The operation a rank is in, as its peers see it: written by its owner at the start of each
// operation, read by peers that wait too long or found another stamp than theirs.
struct Descriptor {
  static constexpr int kWords = 6;
  uint64_t sequence = 0;
  uint64_t words[kWords] = {};  // the meaning is comm/operation.h's
  bool operator==(const Descriptor&) const = default;
};

// Operations on memory of the host and on that of devices are counted apart: the host runs ahead of
// its devices, so of the latter many are begun at once.
enum class Board : uint8_t { kHost, kDevice };
inline constexpr int kBoards = 2;
inline constexpr uint64_t kHostEntries = 2, kDeviceEntries = 64;  // operations that stand on each

// What a peer says of itself; only grows.
struct PeerState {
  uint64_t called = 0;    // sequence of the operation it is in or was in last
  uint64_t finished = 0;  // sequence of the last one it finished
  bool left = false;      // said goodbye
  bool failed = false;    // its group failed there: see failure()
};

class Transport {
 public:
  virtual ~Transport() = default;

  int size() const { return size_; }
  Rank rank() const { return rank_; }

  // Start of `owner`'s half, laid out as Geometry says; of a remote rank it is a copy here, of
  // which only what put() names is ever seen by its owner.
  virtual std::byte* memory(Rank owner, int half) = 0;
  // The bytes that ride with `from`'s data signals to `owner`; as above.
  virtual std::byte* line(Rank owner, Rank from, int half) = 0;
  // Loads and stores do not reach it.
  virtual bool is_remote(Rank rank) const = 0;
  // `target`, in memory or line of the remote rank `to`, is what it shall have at the next signal.
  // With a `source` the bytes are there: this memory is lent until settle().
  virtual void put(Rank to, std::byte* target, uint64_t bytes, const std::byte* source) = 0;
  virtual void settle() = 0;

  // The stamp says which operation the signal belongs to.
  virtual void signal(Rank peer, int lane, int half, uint64_t stamp) = 0;
  virtual uint64_t arrived(Rank peer, int lane, int half) = 0;
  virtual uint64_t stamp(Rank peer, int lane, int half) = 0;  // of the last signal that arrived

  // Moves what comes from remote ranks and goes to them; true when something came. A thread that
  // calls it often says so, and whether it sleeps afterwards.
  virtual bool progress() = 0;
  virtual void begin_driving() = 0;
  virtual void end_driving(bool rest) = 0;
  virtual int descriptor_to_poll() const = 0;  // readable: progress() has something to do
  virtual void need(Rank peer) = 0;            // somebody waits for it
  virtual uint64_t undelivered() = 0;          // frames that remote ranks may not have yet

  // A bounded byte stream to and from each peer, for send/recv; safe beside a running operation,
  // one thread at a time. write and read return how many bytes they took; 0: full, or empty.
  virtual size_t stream_write(Rank to, const std::byte* data, size_t bytes) = 0;
  virtual size_t stream_read(Rank from, std::byte* data, size_t bytes) = 0;
  virtual size_t stream_space(Rank to) = 0;
  virtual size_t stream_available(Rank from) = 0;

  // The slow path: what a waiting rank looks at, and what it tells. Any thread may call these.
  virtual void announce(Board board, const Descriptor& descriptor) = 0;  // I am in this one now
  virtual void finish(Board board, uint64_t sequence) = 0;               // and now it is done
  virtual PeerState state(Rank peer, Board board) = 0;
  virtual std::optional<Descriptor> descriptor(Rank peer, Board board, uint64_t sequence) = 0;
  virtual std::string failure(Rank peer) = 0;
  virtual void fail(const std::string& reason) = 0;  // tells every peer, wakes them
  virtual std::optional<Rank> first_failed() = 0;    // a peer that called fail()
  virtual bool connection_lost(Rank peer) = 0;       // it is gone, with or without goodbye
  virtual std::string condition(Rank peer) = 0;      // "alive", "stopped by a signal"
  virtual std::string loss(Rank peer) = 0;           // of a connection that is lost: why
  virtual void leave() = 0;                          // goodbye
  // In a forked child: closes what would keep this rank looking alive, touches nothing shared.
  virtual void forget() = 0;

  // The part of `owner`'s memory that is for devices (cuda/area.h), whole pages, and the socket to
  // it. Null for ranks of other hosts.
  virtual std::byte* device_area(Rank owner) = 0;
  virtual const Fd* socket(Rank peer) const = 0;

  virtual const char* name() const = 0;  // for people: "shared memory"
  const Doorbell& doorbell() const { return doorbell_; }

 protected:
  Transport(int size, Rank rank, Doorbell doorbell)
      : size_(size), rank_(rank), doorbell_(doorbell) {}

 private:
  int size_;
  Rank rank_;
  Doorbell doorbell_;  // of this process
};

// A thread that drives, for a scope.
class Driving {
 public:
  explicit Driving(Transport& transport) : transport_(transport) { transport_.begin_driving(); }
  ~Driving() { transport_.end_driving(false); }
  Driving(const Driving&) = delete;
  Driving& operator=(const Driving&) = delete;

  // On this process's doorbell, and where a remote rank is awaited on the network as well: else
  // others drive meanwhile. True when something came from there.
  template <typename Ready>
  bool sleep(Rank awaited, Ready&& ready, Clock::duration most) {
    if (awaited >= 0 && transport_.is_remote(awaited) &&
        transport_.doorbell().sleep_with(transport_.descriptor_to_poll(), ready, most)) {
      return transport_.progress();
    }
    transport_.end_driving(true);
    transport_.doorbell().sleep(ready, most);
    transport_.begin_driving();
    return false;
  }

 private:
  Transport& transport_;
};

}  // namespace ringcomm
