// A group of ranks: runs collectives in the order they are asked for, send/recv beside them, and
// ends both in time, with a text, when something is wrong.
//
// One thread at a time *drives* the collectives of a group: the caller of run() or wait(), or the
// process's worker when nobody waits. Once an operation has failed the group stays failed: peers
// may be anywhere in their programs. Any thread may call any function.
#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "base/log.h"
#include "comm/device.h"
#include "comm/inquiry.h"
#include "comm/mailbox.h"
#include "comm/operation.h"
#include "comm/recorder.h"
#include "comm/request.h"
#include "comm/runtime.h"
#include "comm/waiter.h"
#include "comm/wheel.h"
#include "exec/host_executor.h"
#include "plan/cache.h"
#include "plan/select.h"
#include "transport/rendezvous.h"

namespace ringcomm {

struct CommunicatorOptions {
  Rank rank = 0;
  int size = 1;
  std::string name = "default";
  std::chrono::milliseconds timeout{std::chrono::minutes(30)};
  std::optional<Algorithm> algorithm;  // wherever the collective has it; else as the table says
  std::optional<std::string> wish;     // the same by name; an unknown one is told to all ranks
  // Called now and then by a caller's thread that waits: what it throws ends the wait (Ctrl-C).
  std::function<void()> interrupt;
};

// Makes the operation that belongs together with the one that has just ended; false: none.
struct Sequel {
  std::function<bool(Operation&)> next;
  uint64_t operations = 0;  // how many it yields, the same on every rank
};

// A collective in the queue, with its sequels: nothing else of the queue comes between them.
struct Task final : Request {
  Task(Operation what, Clock::duration limit)
      : Request(limit),
        asked(make_descriptor(what, 0)),
        operation(std::move(what)),
        deadline(limit) {}
  const Descriptor asked;
  Operation operation;  // now: of a sequel, maybe
  Deadline deadline;
  Sequel sequel;
  const std::atomic<uint32_t>* gate = nullptr;  // not begun while this is 0
  bool blocking = false;  // it ends with the wait for it: then the memory is the caller's again
};
using TaskPtr = std::shared_ptr<Task>;

class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  // Collective over the group: meets the other ranks through `store` within the timeout.
  static std::shared_ptr<Communicator> create(Store& store, const CommunicatorOptions& options);
  // Over a transport that is there already (tests).
  Communicator(std::unique_ptr<Transport> transport, const Geometry& geometry,
               const CommunicatorOptions& options, Neighbourhood memory = {});
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int size() const { return options_.size; }
  Rank rank() const { return options_.rank; }
  const std::string& name() const { return options_.name; }
  const Geometry& geometry() const { return geometry_; }

  // Runs a collective and returns when it is done: on this thread when the group is idle. Throws
  // UsageError (nothing happened), MismatchError, PeerError, TimeoutError (the group has failed).
  void run(const Operation& operation);
  // Queues it. Memory lives until the task is done; on_done is called on the thread that ends it.
  TaskPtr submit(Operation operation, decltype(Request::on_done) on_done = nullptr,
                 Sequel sequel = {}, const std::atomic<uint32_t>* gate = nullptr,
                 std::function<void()> on_end = nullptr);
  // Starts a send or receive. A message with a timeout of 0 gets the group's.
  void post(const MessagePtr& message);
  // The same of one that was asked for before the group may have failed or left.
  void post_late(const MessagePtr& message);
  // Waits until `request` is done or `at_most` has passed: true when done. Throws nothing of it,
  // only what `interrupt` does; then messages and blocking tasks are done, too.
  // A message has no deadline but this: where there is no `at_most`, its timeout. Once that has
  // passed it ends with an error, and so does the group if a part of it has moved.
  bool wait(Request& request, Clock::duration at_most = Clock::duration::max());
  // The same, of what is enqueued on a device. An operation of a group that has failed may be over
  // and without a result: see failure().
  bool wait(const DeviceGroup::End& end, Clock::duration at_most = Clock::duration::max());
  // For operations on tensors of that device; made at first use.
  DeviceGroup& device(int index);
  DeviceGroup* device_in_use() { return device_.load(std::memory_order_acquire); }
  // Runs code of the caller's from on_done: it may block for what this very thread would drive, so
  // others do that meanwhile.
  static void call_out(const std::function<void()>& code);

  void set_timeout(std::chrono::milliseconds timeout) { timeout_ms_.store(timeout.count()); }
  std::chrono::milliseconds timeout() const {
    return std::chrono::milliseconds(timeout_ms_.load());
  }
  // Collectives asked for so far; the same on every rank of a correct program.
  uint64_t sequence() const;
  // Empty while the group works, else why it failed.
  std::string failure();
  std::exception_ptr error();
  // The same where a peer has failed and this rank has not yet looked: now it has failed, too.
  std::exception_ptr why_failed();
  // The last 256 operations, oldest first; then those that wait for their turn.
  std::vector<Record> records();

  // Waits for what devices still have to do, as long as it only needs time: CUDA calls return
  // early.
  void settle();
  // Ends a message as if its time had passed.
  void give_up(Message& message, const std::exception_ptr& error);
  // Fails the group because an exception of the user's has ended `during`.
  void give_up(const std::exception& by, const std::string& during);
  // Fails everything pending here and tells the peers. Returns at once.
  void abort(const std::string& reason);
  // Lets what is pending end for at most `grace`, fails the rest, says goodbye. Idempotent.
  void shutdown(Clock::duration grace = std::chrono::seconds(1));

  // For the worker. kIdle: nothing to do here, or somebody else drives and will kick() it.
  enum class Driven { kIdle, kBlocked, kMoved };
  Driven drive();
  bool ready();
  bool sleep(const std::function<bool()>& awake, Clock::duration most);
  uint32_t news() const;
  bool busy();
  void watch();  // the slow path: peers, deadlines
  // How long the worker may sleep before it drives this group again.
  Clock::duration nap();
  // The program ends without a goodbye: remote ranks get what is on its way.
  void drain();
  // In a forked child: the group is dead here, and the parent's peers must not notice.
  void forked();

  // For DeviceGroup: the worker watches what has been enqueued; throws where a wait is in vain;
  // fails the group, and returns the error; what was asked for by options.
  void look_after() { Runtime::get().kick(shared_from_this()); }
  void check_waiting(const std::string& during);
  void keep_memory() {  // streams may still use it: it stays mapped
    for (Mapping& mapping : memory_.mappings) mapping.forget();
  }
  std::exception_ptr fail(const std::exception_ptr& error);
  std::optional<Algorithm> wished(Collective collective) const;
  const Logger& logger() const { return logger_; }

  // For DeviceGroup, tests and the benchmark's ladder.
  Transport& transport() { return *transport_; }

 private:
  void check_usable();
  void begin(const Operation& operation);
  bool scale_input(const Operation& operation);
  bool advance();  // true when the operation is done
  void end(bool good);
  void run_here(const Operation& operation);
  bool advance_queue(Driver& driver);
  TaskPtr front();
  bool next_task();
  bool takes_over(Driver& driver);
  bool has_messages() const;
  Rank awaited(const Driver& driver) const;
  template <typename Move>
  bool move_messages(Move&& move);
  void complete(const TaskPtr& task, const std::exception_ptr& error);
  void hand_over();
  void fail_messages();
  class Waiting;
  struct HandOver {  // at the end of a scope that drove
    Communicator& group;
    ~HandOver() { group.hand_over(); }
  };

  std::string choice_text(const Shape& shape, const Plan& plan) const;
  void tell_first(const std::string& text);
  void check_interrupt(const std::string& during);
  void check_interrupt(Request& request);
  void check_no_handler();
  PeerError interrupted(const std::exception& by, const std::string& during) const;
  std::exception_ptr late_error(const Message& message, Clock::duration waited) const;
  void look_around(const Deadline* deadline);
  void watch_messages();
  void watch_device();
  bool needs_only_time() const;
  std::vector<bool> gone_peers() const;
  void check_source(const Message& message, const std::vector<bool>& gone);
  Patience patience() const;

  CommunicatorOptions options_;
  Geometry geometry_;
  Logger logger_;
  Reach reach_;
  int neighbours_;  // ranks on this host, this one included
  Costs costs_;
  uint64_t terms_;  // hash_of_terms(), where each operation adds its segment
  Neighbourhood memory_;
  std::unique_ptr<Transport> transport_;
  Recorder recorder_;
  Inquiry inquiry_;
  Mailbox mailbox_;
  std::atomic<int64_t> timeout_ms_;

  Wheel wheel_;  // the driving thread's; guards what follows
  HostExecutor executor_;
  Tuner tuner_;
  PlanCache plans_;
  uint64_t sequence_ = 0;
  uint64_t warned_ = 0;  // the operation of which the log says that it waits
  Descriptor current_;
  std::optional<uint64_t> ticket_;  // the flight recorder's, of the current operation
  TaskPtr task_;                    // what advance_queue() is in
  std::vector<std::byte> scratch_;
  Patience patience_;

  std::mutex queue_mutex_;  // guards what follows
  std::deque<TaskPtr> queue_;
  std::exception_ptr error_;
  std::string failure_;

  std::mutex device_mutex_;  // held to make the next; it lives as long as the group
  std::atomic<DeviceGroup*> device_{nullptr};

  std::atomic<std::thread::id> in_handler_;  // it drives, and runs a signal handler
  std::atomic<uint64_t> asked_{0};
  std::atomic<int> queued_{0};                          // tasks not yet ended; partner: hand_over()
  std::atomic<int> waiting_{0}, waiting_for_tasks_{0};  // threads in wait(); partner: drive()
  std::atomic<bool> failed_{false}, left_{false}, forked_{false}, told_{false};
};

}  // namespace ringcomm
