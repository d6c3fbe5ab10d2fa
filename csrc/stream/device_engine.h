// A group's operations on tensors of a device: work that its streams do, in the order of the calls.
// The host enqueues and goes on; it waits for other ranks once, when they first meet here.
//
// Of two ranks that call different collectives at least one notices before it enqueues anything:
// each writes its board before it reads the other's. So neither gets a result.
#pragma once

#include <set>

#include "device/device_comm.h"
#include "group/group_state.h"
#include "group/waiter.h"
#include "stream/staged.h"

namespace ringcomm {

// The library for devices, opened at the first call. Throws UsageError, in one sentence, where this
// build has none, or this machine no device that it could use.
cuda::Api& device_api();
// Do tensors of the CPU stand in for those of a device? In tests: RINGCOMM_CUDA_LIBRARY.
bool device_is_simulated();

class DeviceEngine final : public Engine {
 public:
  // The end of an operation, or of a batch of messages: an event in its stream, and counts in
  // memory of the host, one of each timeline; none of what is captured.
  class Completion {
   public:
    Completion(DeviceEngine& engine, uint64_t batch, std::vector<HostStaging::Point> points,
               cuda::Event event, cuda::Stream stream)
        : engine_(engine),
          batch_(batch),
          points_(std::move(points)),
          event_(event),
          stream_(stream) {}
    ~Completion() { engine_.keep(event_); }
    Completion(const Completion&) = delete;

    bool reached() const;
    // Somebody waits for it: from now on, if not since before, its messages have a deadline.
    void expect() const { engine_.expect(batch_); }
    bool good() const;                      // of what was reached: not because the group failed
    void block(cuda::Stream stream) const;  // the stream waits for it, the host does not
    cuda::Stream stream() const { return stream_; }

   private:
    DeviceEngine& engine_;
    const uint64_t batch_;
    const std::vector<HostStaging::Point> points_;
    const cuda::Event event_;
    const cuda::Stream stream_;
  };
  using CompletionPtr = std::shared_ptr<Completion>;

  // `group` is the one of that state: for operations through memory of the host.
  DeviceEngine(GroupState& state, Progress& group, cuda::Api& api, int device);
  ~DeviceEngine();

  int device() const { return device_; }
  // Operations that ranks have done without the host's way, which counts its own.
  uint64_t sequence() const { return sequence_ - by_hand_; }
  // After what is in `caller` so far; in that stream itself, or beside it where `on_own_stream`.
  // `finish` may enqueue something more that belongs to it.
  using Finish = std::function<void(cuda::Stream)>;
  CompletionPtr enqueue(const Operation& operation, cuda::Stream caller, bool on_own_stream,
                        const Finish& finish);
  // Messages that make progress side by side, beside `caller`.
  CompletionPtr enqueue(const std::vector<DeviceMessage>& messages, cuda::Stream caller,
                        const Finish& finish);
  // The host waits for what is in that stream.
  void synchronize(cuda::Stream stream) const;
  // Meets the others, if that has not been done. Every rank of the group must call it. True:
  // kernels run collectives; else they go through the host's memory.
  bool connect();
  // The registered algorithm that was asked for. It is a plan, and those need the host's memory.
  std::optional<Algorithm> by_hand(const Operation& operation) const;
  Algorithm kernel_of(const Operation& operation) const;  // where ranks reach one another

  // Has all ranks map that memory, and keeps it mapped, under its names, in place of what these had
  // before. Every rank of the group must call it: they meet. `asked` is its name in texts. Through
  // memory of the host it does nothing.
  using NamedMemory = std::map<std::string, std::vector<Span>>;
  void register_memory(const std::string& asked, const NamedMemory& memory);
  // Lets it be exchanged for other memory again. False: it was not registered. Nobody waits.
  bool deregister_memory(const std::string& name);
  // Others may map it at their next call. Nothing, before the ranks have met.
  void offer(const Span& memory);

  // Has every rank called all that is pending?
  bool expected();
  // From now on that batch has a deadline; or all that is pending.
  void expect(std::optional<uint64_t> batch = std::nullopt);
  // Within `grace`, lets go of peers' memory, waits until they have let go of ours, gives it back.
  // False: streams may still use what is mapped.
  bool close(Clock::duration grace);
  std::string flight_ring() const { return recorder_.bytes(); }

  bool pending() override { return pending(UINT64_MAX); }
  bool pending(uint64_t until_batch);  // of what was enqueued until then
  uint64_t last_batch() {
    const Lock lock(mutex_);
    return batches_;
  }
  // There may be a replay of a graph.
  bool watched() const override { return captured_.load(std::memory_order_seq_cst); }
  // Posts messages whose data a stream has brought to the host.
  bool progress(Driver& driver) override;
  void check() override;
  // Was all good that streams have done so far?
  bool is_all_good();
  // Notes what is over and what of it is good. Peers may want to know how far this rank has come.
  void note_progress() override;
  // Lets streams go on that wait for others. Where a peer has failed first, not before those
  // operations are over that can still end well.
  void fail(const std::exception_ptr& error) override;
  Clock::duration poll_interval() override;

 private:
  struct Timeline {  // what is done in order: the group's operations; messages to or from one peer
    uint32_t issued = 0;
    cuda::Event event = nullptr;  // the end of the last one
    cuda::Stream own = nullptr;
    uint64_t capture = 0;            // of graphs, the last
    cuda::Event captured = nullptr;  // the end of the last operation in that
  };
  struct Pending {
    Descriptor operation;
    int timeline;
    uint32_t value;
    Rank peer;  // of a message, else -1
    Clock::duration timeout;
    std::optional<Deadline> deadline;  // of a message: since somebody waits for it
    std::optional<uint64_t> ticket;    // the flight recorder's: none if the host's way records it
    uint64_t number = 0;               // of a message, among those to or from that peer; of an
                                       // operation, in the group, where ranks reach one another
    uint64_t batch = 0;                // of what was enqueued together
    HostStaging::ResultWord result = nullptr;  // staged: kGood if it has ended well

    bool sending() const { return timeline == DeviceMessage::timeline_of(peer, true); }
  };
  bool reached(int timeline, uint32_t value) const;
  HostStaging::Point next_point(int timeline) const RINGCOMM_REQUIRES(enqueue_mutex_) {
    return {timeline, timelines_[static_cast<size_t>(timeline)].issued + 1};
  }
  bool is_good(int timeline, uint32_t value);
  bool is_doomed(const Pending& pending) const;
  bool ended_well(const Pending& pending) const;
  bool has_let_go(Rank peer) const {
    return state_.transport().device_area(peer) != nullptr &&
           area_of(peer).abort().load(std::memory_order_seq_cst) != 0;
  }
  PeerState state_of(Rank peer, uint64_t sequence) const;
  bool has_said(const Pending& pending, uint64_t number) const;
  std::optional<Rank> spoiler(const Pending& pending) const;
  bool can_end_well(const Pending& pending);
  bool owed();
  std::vector<Pending> unfinished();
  void await_owed(const std::string& asked);
  void check_operations();
  void release_now();
  bool failed() const { return release_ != Release::kNot; }
  bool released() const { return release_ == Release::kDone; }
  // A kernel that has waited too long, and for whom: what came after it is garbage.
  std::optional<Rank> gave_up() const {
    // Partner: await() in cuda/meetings.inc.h. Peers can write there, too.
    const uint32_t word = own_.abort().load(std::memory_order_seq_cst);
    if (word < cuda::kGaveUp) return std::nullopt;
    return std::min(static_cast<Rank>(word - cuda::kGaveUp), state_.size() - 1);
  }
  bool called(const Pending& pending) const;
  void keep(cuda::Event event) {
    if (state_.forked()) return;
    const Lock lock(mutex_);
    events_.push_back(event);
  }
  cuda::Event event();
  void make_streams() RINGCOMM_REQUIRES(enqueue_mutex_);
  Timeline& timeline(Rank peer, bool sending) RINGCOMM_REQUIRES(enqueue_mutex_) {
    return timelines_[static_cast<size_t>(DeviceMessage::timeline_of(peer, sending))];
  }
  void look() RINGCOMM_REQUIRES(enqueue_mutex_);
  bool await_idle(const Deadline& deadline);  // true: nothing is under way any more
  cuda::Stream begin(const std::vector<int>& timelines, cuda::Stream caller, bool on_own_stream)
      RINGCOMM_REQUIRES(enqueue_mutex_);
  CompletionPtr end(const std::vector<int>& timelines, cuda::Stream stream,
                    std::vector<Pending> pending) RINGCOMM_REQUIRES(enqueue_mutex_);
  CompletionPtr guarded(const std::string& asked, auto&& enqueue);
  void guard(const std::string& asked, const std::function<void()>& call);  // enqueues nothing

  cuda::Subgroup subgroup_of(Rank peer) const;
  bool reach(Rank peer) const RINGCOMM_REQUIRES(enqueue_mutex_);
  void bootstrap(const std::vector<cuda::Subgroup>& subgroups, const std::string& asked)
      RINGCOMM_REQUIRES(enqueue_mutex_);
  std::string why_not(const cuda::Subgroup& subgroup) const;
  void await_ranks(const std::string& asked, const Deadline& deadline,
                   const cuda::Subgroup& subgroup, const std::function<bool(Rank peer)>& has_come);
  void tell(const cuda::Subgroup& subgroup, const cuda::PeerAccess& found,
            const std::string& asked);

  void finish_in(cuda::Stream stream, const Finish& finish) RINGCOMM_REQUIRES(enqueue_mutex_);
  void make_room() RINGCOMM_REQUIRES(enqueue_mutex_);
  void announce(const Operation& operation, const Descriptor& descriptor);
  void announce(Pending& pending) RINGCOMM_REQUIRES(enqueue_mutex_);  // a message
  void compare(const Pending& pending) const;
  void run_kernels(const Operation& operation, cuda::Stream stream, bool captured)
      RINGCOMM_REQUIRES(enqueue_mutex_);
  Shape shape_of(const Operation& operation) const {
    return make_shape(operation, {.size = state_.size()});
  }
  CompletionPtr capture(const Operation& operation, uint64_t capture, cuda::Stream caller,
                        const std::string& asked, const Finish& finish)
      RINGCOMM_REQUIRES(enqueue_mutex_);
  void meet_at(uint64_t sequence, const Deadline& deadline, const std::string& asked)
      RINGCOMM_REQUIRES(enqueue_mutex_);
  void tell(const std::string& asked, const std::vector<cuda::Registered>& results);
  void check_pending(const Pending& pending);
  void check_message(const Pending& pending) const;
  cuda::Area area_of(Rank peer) const {
    return cuda::Area(state_.transport().device_area(peer), state_.size());
  }
  void release_streams() { cuda::DeviceComm::release(own_, state_.size()); }
  void give_back() RINGCOMM_REQUIRES(enqueue_mutex_);

  GroupState& state_;
  cuda::Api& api_;
  const int device_;
  const cuda::Area own_;  // the part of this rank's memory that is for devices
  Recorder recorder_;
  Diagnosis diagnosis_;

  Mutex enqueue_mutex_;  // CUDA may block its holder
  // Used under that lock. Given back under both, for release_streams() holds the other.
  std::unique_ptr<cuda::DeviceComm> comm_;
  std::vector<Timeline> timelines_ RINGCOMM_GUARDED_BY(enqueue_mutex_);
  std::vector<cuda::Stream> streams_ RINGCOMM_GUARDED_BY(enqueue_mutex_);  // the group's own
  // Subgroups, by this rank's info: do they reach one another?
  std::map<int, bool> met_ RINGCOMM_GUARDED_BY(enqueue_mutex_);
  cuda::PeerAccess access_ RINGCOMM_GUARDED_BY(enqueue_mutex_);           // of the group's
  std::set<std::string> registered_ RINGCOMM_GUARDED_BY(enqueue_mutex_);  // by name
  std::atomic<uint64_t> sequence_{0};                                     // written under the lock
  std::atomic<uint64_t> by_hand_{0};                                      // of those
  uint64_t busy_looks_ RINGCOMM_GUARDED_BY(enqueue_mutex_) = 0;
  // Messages, by peer.
  std::vector<uint64_t> sent_ RINGCOMM_GUARDED_BY(enqueue_mutex_);
  std::vector<uint64_t> received_ RINGCOMM_GUARDED_BY(enqueue_mutex_);
  HostStaging staging_;

  Mutex mutex_;  // never held during a call of CUDA's
  std::deque<Pending> pending_ RINGCOMM_GUARDED_BY(mutex_);
  inline static std::atomic<int64_t> under_way{0};  // pending, of the process; partner: look()
  uint64_t batches_ RINGCOMM_GUARDED_BY(mutex_) = 0;
  std::vector<cuda::Event> events_ RINGCOMM_GUARDED_BY(mutex_);
  // By timeline: so far all is good, or nothing is from there on.
  std::vector<uint32_t> good_until_ RINGCOMM_GUARDED_BY(mutex_);
  std::vector<bool> spoilt_ RINGCOMM_GUARDED_BY(mutex_);
  // What streams wait for of other ranks: kDue and kDone are of a group that has failed.
  enum class Release : uint8_t { kNot, kDue, kDone };
  std::atomic<Release> release_{Release::kNot};  // partner: check_operations()
  std::atomic<bool> captured_{false};            // something, until the group is closed
  bool kept_ = false;  // streams or peers may still use the memory: until the process ends
};

}  // namespace ringcomm
