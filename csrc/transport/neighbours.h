// The other processes of this host, as a process sees them: one Unix socket to each that it shares
// a group with, kept for all their groups. Over it the two pass descriptors, of each group's memory
// above all, and its end is the other's death. A process has one listener and one epoll.
//
// The process with the lower name connects to the other. Each then tells its name and passes its
// doorbell. Any thread that looks takes messages, and keeps them until they are wanted, so groups
// meet in any order and on several threads at once.
#pragma once

#include <array>
#include <compare>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>

#include "base/deadline.h"
#include "base/doorbell.h"
#include "transport/arena.h"
#include "transport/host.h"

namespace ringcomm {

// The pages behind a doorbell's, which neighbours can read even when the process is dead
// (elastic/link.h). Then comes the arena, where there is one.
inline constexpr size_t kNoticeOffset = SegmentLayout::kPage;
inline constexpr size_t kNoticeBytes = 2 * SegmentLayout::kPage;
inline constexpr size_t kDoorbellBytes = kNoticeOffset + kNoticeBytes;
inline constexpr size_t kBytesWithArena = kDoorbellBytes + Arena::kBytes;

// The devices that a process uses, by hashes of their names; 0: none. It stands behind its bell.
struct UsedDevices {
  static constexpr size_t kOffset = 1024;
  std::array<std::atomic<uint64_t>, 16> names;
};
static_assert(sizeof(DoorbellPage) <= UsedDevices::kOffset);
static_assert(UsedDevices::kOffset + sizeof(UsedDevices) <= kNoticeOffset);

// A process's doorbell, shared by all its groups.
class DoorbellMemory {
 public:
  DoorbellMemory();
  Doorbell bell() const {
    return Doorbell(reinterpret_cast<DoorbellPage*>(mapping_.data()), event_.get());
  }
  const Fd& fd() const { return fd_; }
  std::byte* notice() const { return mapping_.data() + kNoticeOffset; }
  UsedDevices& devices() const {
    return *reinterpret_cast<UsedDevices*>(mapping_.data() + UsedDevices::kOffset);
  }
  Arena& arena() { return arena_; }

 private:
  Fd fd_, event_;
  Mapping mapping_;
  Arena arena_;
};

// A descriptor or words that one rank passes to another, by number.
struct Parcel {
  uint64_t group_id = 0;
  Rank from = 0, to = 0;
  int32_t what = 0;
  auto operator<=>(const Parcel&) const = default;
};

class Neighbours;

// A process of this host, as another one sees it.
class Neighbour {
 public:
  Neighbour(Neighbours& all, Fd socket, uint64_t number);

  const Doorbell& bell() const { return bell_; }
  std::byte* notice() const { return page_.data() + kNoticeOffset; }  // not this process's own
  bool uses_device(uint64_t name) const;
  std::span<std::byte> arena() const { return arena_; }  // empty: this process has not mapped it
  pid_t process() const { return process_; }
  const std::string& name() const { return name_; }  // its socket's
  bool lost() const;                                 // its process has ended
  // Sends the descriptor, or the words where it is empty. Returns false if there is no room now, or
  // its process has ended.
  bool send(const Parcel& parcel, const Fd& descriptor, const std::string& words = {});
  Fd take(const Parcel& parcel);  // the one that it has sent, or an empty one
  void forget() {                 // in a forked child
    page_.forget();
    arena_mapping_.forget();
  }

 private:
  friend class Neighbours;
  void map_arena(const Fd& page);

  Neighbours& all_;
  const uint64_t number_;
  Fd socket_;
  pid_t process_;
  std::string name_;   // "" until it has told it
  bool ours_ = false;  // this process has connected
  bool met_ = false;
  Mapping page_, arena_mapping_;
  std::span<std::byte> arena_;
  Doorbell bell_;
  std::atomic<bool> lost_{false};
};

class Neighbours {
 public:
  // Returns what this process tells the others, with a nonce of its own each time. Makes the
  // doorbell and opens the listener.
  Card card();
  Doorbell bell();  // makes it, too
  std::byte* notice();
  Arena& arena();
  // Tells the others that this process uses a device, by a hash of its name, from now on.
  void use_device(uint64_t name);
  // Tells whether another process uses it that this one shares a group with.
  bool shares_device(uint64_t name);

  struct Reached {
    std::shared_ptr<Neighbour> neighbour;  // null: not yet
    bool gone = false;                     // nobody listens there any more
    std::string apart;                     // why they cannot share memory though both live
  };
  // Finds the process of that name. Connects if that is this one's part.
  Reached reach(const std::string& name);
  bool is_gone(const std::string& name) const;  // by a trial
  void set_apart(const std::string& name, const std::string& why) {
    const std::lock_guard lock(mutex_);
    known_[name].set_apart(why);
  }

  // Waits for a message to come, and takes it. Returns at once if any thread has taken one since
  // `news` was read.
  void wait(Clock::duration most, uint64_t news);
  uint64_t news() const { return news_.load(std::memory_order_relaxed); }
  // Takes messages that have come, at most once a millisecond, by one system call however many
  // there are.
  void take_arrived();
  Fd take(const Parcel& parcel);  // empty: it has not come. Throws SystemError when it is lost
  // Takes words likewise. Returns "" if they have not come.
  std::string take_words(const Parcel& parcel) {
    const std::lock_guard lock(mutex_);
    const auto node = arrived_.extract(parcel);
    return node ? node.mapped().words : "";
  }
  void end(uint64_t group_id);               // wants nothing of it any more
  static constexpr size_t kMostWords = 464;  // bytes of one parcel
  // Returns the errno for which connections of others cannot be taken, or 0.
  int deaf() const { return deaf_.load(std::memory_order_relaxed); }
  // Tells whether this is the first time that somebody says so.
  bool first_time(const std::string& text) {
    const std::lock_guard lock(mutex_);
    return said_.insert(text).second;
  }

  void before_fork() { mutex_.lock(); }
  void after_fork() { mutex_.unlock(); }
  // Closes the sockets in a forked child, where nothing else of this may be used.
  void forked();

 private:
  friend class Neighbour;
  struct Datagram;
  struct Arrived {
    Fd descriptor;
    int error = 0;  // it was lost
    std::string words;
  };
  using NeighbourPtr = std::shared_ptr<Neighbour>;
  struct Known {  // this process's knowledge of another, by its name
    NeighbourPtr process;
    std::string apart;                   // see Reached
    std::optional<SystemError> trouble;  // this process's own, in meeting that one
    int refused = 0;                     // closed before it said its name, so many times
    void set_apart(const std::string& why) {
      if (apart.empty()) apart = why;
    }
    bool nothing() const { return !process && apart.empty() && !trouble && refused == 0; }
  };

  void open();
  NeighbourPtr add(Fd socket);
  void drop(const NeighbourPtr& other);
  void greet(const NeighbourPtr& other);
  Reached connect(const std::string& name);
  void drop_strangers();
  void progress();
  void accept_all();
  void read_from(const NeighbourPtr& other);
  bool hear(const NeighbourPtr& other, const Datagram& message, Fd& descriptor);
  void meet(const NeighbourPtr& other, const std::string& name, const Fd& page);
  bool send(Neighbour& other, const Parcel& parcel, const Fd& descriptor, const std::string& words);
  void note(const std::string& name, const SystemError& error);

  std::atomic<int64_t> looked_{0};  // when, for take_arrived()
  std::atomic<int> deaf_{0};
  std::atomic<uint64_t> news_{0};  // how often something had come

  std::mutex mutex_;  // guards what follows
  std::optional<DoorbellMemory> doorbell_;
  Fd listener_, epoll_;
  Card card_;
  uint64_t next_ = 1;                         // 0 is the listener
  std::map<uint64_t, NeighbourPtr> sockets_;  // by number
  std::map<std::string, Known> known_;
  NeighbourPtr self_;  // ranks of one process meet without a socket
  std::map<Parcel, Arrived> arrived_;
  std::deque<Parcel> kept_;   // words that may be for groups which this process never makes
  std::set<uint64_t> ended_;  // groups that were given up
  std::set<std::string> said_;
};

}  // namespace ringcomm
