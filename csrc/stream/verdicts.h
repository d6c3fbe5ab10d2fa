// Decides which operations on a device have ended well, and why the others have not.
//
// A rank that fails lets its streams go on although the words that they await have not come. From
// then on they write garbage: they signal, and write to windows, as if all were well. So an
// operation that a peer had not finished by then is lost; and so is one that it had, once anybody
// has begun the operation after next, which uses the same half of all memory.
#pragma once

#include <deque>

#include "group/waiter.h"
#include "stream/device_group.h"

namespace ringcomm {

// Any thread may call any function. None of them makes a CUDA call.
class Verdicts {
 public:
  explicit Verdicts(DeviceGroup& group)
      : group_(group),
        state_(group.state),
        good_until_(static_cast<size_t>(1 + 2 * state_.size())),
        spoilt_(good_until_.size()) {}

  // Adds what was enqueued together: a batch. Returns its number, and whether nothing else is
  // pending.
  std::pair<uint64_t, bool> add(std::vector<Pending> pending);
  // Tells whether something is pending that was enqueued until then.
  bool pending(uint64_t until_batch = UINT64_MAX);
  uint64_t last_batch() {
    const Lock lock(mutex_);
    return batches_;
  }
  // Tells whether every rank has called all that is pending.
  bool expected();
  // Gives that batch a deadline from now on, or all that is pending.
  void expect(std::optional<uint64_t> batch = std::nullopt);
  // Forgets all that is pending, at the end: streams do no more of it.
  void forget();

  // Tells whether that place is behind the device.
  bool reached(const Point& point) const;
  // Tells whether it is good. After a failure it is only if it has ended well or still can.
  bool is_good(const Point& point);
  // Tells whether all is good that streams have done so far.
  bool is_all_good();
  // Notes which operations are over, and which of those are good. Peers may want to know how far
  // this rank has come.
  void note_progress();
  // Tells whether this process has ended all that it has enqueued, in all groups.
  bool is_idle();
  // Waits for that. Returns false if it has not come within that time.
  bool await_idle(Clock::duration at_most);
  // Waits until all has ended that still can, before an error that concerns `asked`.
  void await_owed(const std::string& asked);

  // Notes whether there may be a replay of a graph from now on.
  void watch_replays(bool watched) { watched_.store(watched, std::memory_order_seq_cst); }
  bool watched() const { return watched_.load(std::memory_order_seq_cst); }
  // Returns the rank for which a kernel has waited too long: all that came after it is garbage.
  std::optional<Rank> gave_up() const;

  // Takes the slow path: looks at peers and deadlines, and fails the group where they say so.
  void check();
  // Lets streams go on that wait for others. Where a peer has failed first, not before those
  // operations are over that can still end well.
  void fail(const std::exception_ptr& error);
  bool failed() const { return release_ != Release::kNot; }
  void release_now();

 private:
  bool is_doomed(const Pending& pending) const;
  bool ended_well(const Pending& pending) const;
  bool can_end_well(const Pending& pending) const;
  bool owed();
  std::vector<Pending> unfinished();
  bool released() const { return release_ == Release::kDone; }
  void check_operations();
  void check_pending(const Pending& pending) const;
  void check_message(const Pending& pending) const;

  DeviceGroup& group_;
  GroupState& state_;

  Mutex mutex_;
  std::deque<Pending> pending_ RINGCOMM_GUARDED_BY(mutex_);
  inline static std::atomic<int64_t> under_way{0};  // pending, of the process; partner: is_idle()
  uint64_t batches_ RINGCOMM_GUARDED_BY(mutex_) = 0;
  // By timeline: so far all is good, or nothing is from there on.
  std::vector<uint32_t> good_until_ RINGCOMM_GUARDED_BY(mutex_);
  std::vector<bool> spoilt_ RINGCOMM_GUARDED_BY(mutex_);
  // The group has failed if streams are to be released (kDue), or were (kDone).
  enum class Release : uint8_t { kNot, kDue, kDone };
  std::atomic<Release> release_{Release::kNot};  // partner: check_operations()
  std::atomic<bool> watched_{false};             // partner: the worker, which asks watched()
};

}  // namespace ringcomm
