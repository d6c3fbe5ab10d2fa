#include "comm/device.h"

#include <algorithm>
#include <thread>

#include "comm/communicator.h"

namespace ringcomm {
namespace {

constexpr auto kSlice = std::chrono::milliseconds(50);     // the worker's longest sleep
constexpr auto kParting = std::chrono::microseconds(100);  // between looks at what is still mapped
constexpr auto kGateNap = std::chrono::microseconds(50);   // streams ring no doorbell
constexpr auto kReleaseNap = std::chrono::milliseconds(1);

}  // namespace

void DeviceGroup::End::block(cuda::Stream stream) const {
  const cuda::OnDevice here(group_.api_, group_.device_);  // which the default stream is of
  group_.api_.wait(stream, event_);
}

bool DeviceGroup::End::good() const {
  group_.note_progress();
  return group_.is_good(track_, value_);
}

DeviceGroup::DeviceGroup(Communicator& group, cuda::Library& library, int device)
    : group_(group),
      api_(library.api()),
      device_(device),
      area_(group.transport().device_area(group.rank()), group.size()),
      inquiry_(group.transport(), recorder_, Board::kDevice,
               [this](Rank peer, uint64_t sequence) { return state_of(peer, sequence); }),
      plans_(group.rank()),
      tracks_(static_cast<size_t>(1 + 2 * group.size())),
      sent_(static_cast<size_t>(group.size())),
      received_(static_cast<size_t>(group.size())),
      good_until_(tracks_.size()),
      spoilt_(tracks_.size()) {
  cuda::TeamOptions options;
  options.rank = group.rank();
  options.device = device;
  const Config& config = Runtime::get().config();
  options.most_bytes = config.cuda_memory;
  if (config.cuda_mode == "host") options.refusal = "RINGCOMM_CUDA_MODE=host";
  for (Rank rank = 0; rank < group.size(); ++rank) {
    options.areas.push_back(group.transport().device_area(rank));
  }
  options.socket = [&group](Rank rank) { return group.transport().socket(rank); };
  team_ = library.make_team(options);
}

DeviceGroup::~DeviceGroup() {
  if (forked_ || kept_) {
    const cuda::Team* const kept = team_.release();
    static_cast<void>(kept);
    return;
  }
  if (team_) give_back();
  try {
    const cuda::OnDevice here(api_, device_);
    for (const cuda::Event event : events_) api_.destroy_event(event);
  } catch (const std::exception& error) {  // of the device, for good
    group_.logger().info("events cannot be given back to the device: ", error.what());
  }
}

// What waits for the device's streams: not for the worker, on which those may depend.
void DeviceGroup::give_back() {
  std::unique_ptr<cuda::Team> team;
  {
    const std::lock_guard lock(mutex_);
    team = std::move(team_);
  }
  try {
    const cuda::OnDevice here(api_, device_);
    for (Track& track : tracks_) {
      if (track.event != nullptr) api_.destroy_event(std::exchange(track.event, nullptr));
      if (track.own != nullptr) api_.destroy_stream(std::exchange(track.own, nullptr));
    }
    for (const Buffer& buffer : std::exchange(buffers_, {})) api_.release_pinned(buffer.memory);
  } catch (const std::exception& error) {
    group_.logger().info("nothing can be given back to the device: ", error.what());
  }
}

void DeviceGroup::synchronize(cuda::Stream stream) const {
  const cuda::OnDevice here(api_, device_);
  api_.synchronize(stream);
}

// ---- events, streams, counts

cuda::Area DeviceGroup::area_of(Rank peer) const {
  return cuda::Area(group_.transport().device_area(peer), group_.size());
}

bool DeviceGroup::reached(int track, uint32_t value) const {
  if (forked_) return true;  // that memory is the parent's alone
  const uint32_t done = own().done(track).load(std::memory_order_seq_cst);
  return static_cast<int32_t>(done - value) >= 0;
}

void DeviceGroup::keep(cuda::Event event) {
  if (forked_) return;
  const std::lock_guard lock(mutex_);
  events_.push_back(event);
}

cuda::Event DeviceGroup::event() {
  {
    const std::lock_guard lock(mutex_);
    if (!events_.empty()) {
      const cuda::Event event = events_.back();
      events_.pop_back();
      return event;
    }
  }
  return api_.make_event();
}

cuda::Stream DeviceGroup::own_stream(int index) {
  Track& track = tracks_[static_cast<size_t>(index)];
  if (track.own == nullptr) track.own = api_.make_stream();
  return track.own;
}

void DeviceGroup::refuse_capture(cuda::Stream caller) const {
  RINGCOMM_CHECK(!api_.is_capturing(caller),
                 "ringcomm cannot be captured into a CUDA graph: call it outside of the capture");
}

// The stream for what comes next in these tracks: after what came before in each of them.
cuda::Stream DeviceGroup::begin(const std::vector<int>& tracks, cuda::Stream caller, bool aside) {
  const cuda::Stream stream = aside ? own_stream(tracks[0]) : caller;
  if (aside) {
    const cuda::Event ready = event();
    api_.record(ready, caller);
    api_.wait(stream, ready);
    keep(ready);
  }
  for (const int index : tracks) {
    const Track& track = tracks_[static_cast<size_t>(index)];
    if (track.event != nullptr) api_.wait(stream, track.event);
  }
  return stream;
}

DeviceGroup::EndPtr DeviceGroup::end(const std::vector<int>& tracks, cuda::Stream stream,
                                     std::vector<Pending> pending) {
  for (const int index : tracks) {
    Track& track = tracks_[static_cast<size_t>(index)];
    if (track.event == nullptr) track.event = api_.make_event();
    ++track.issued;
    if (streams_meet_) {
      team_->mark(stream, index, track.issued);
    } else {
      api_.synchronize(stream);
      own().done(index).store(track.issued, std::memory_order_seq_cst);
    }
    api_.record(track.event, stream);
  }
  const cuda::Event over = event();
  api_.record(over, stream);
  const uint32_t value = tracks_[static_cast<size_t>(tracks[0])].issued;
  for (Pending& each : pending) each.value = tracks_[static_cast<size_t>(each.track)].issued;
  bool first = false;
  {
    const std::lock_guard lock(mutex_);
    first = pending_.empty();
    ++batches_;
    for (Pending& each : pending) {
      each.batch = batches_;
      pending_.push_back(each);
    }
  }
  if (first) group_.look_after();
  note_progress();
  return std::make_shared<End>(*this, tracks[0], value, over, stream);
}

// ---- watching

bool DeviceGroup::pending() {
  const std::lock_guard lock(mutex_);
  return !pending_.empty() || !gates_.empty();
}

Clock::duration DeviceGroup::nap() {
  const std::lock_guard lock(mutex_);
  if (!gates_.empty()) return kGateNap;
  return failed_ && !pending_.empty() ? Clock::duration(kReleaseNap) : Clock::duration(kSlice);
}

bool DeviceGroup::gated() {
  const std::lock_guard lock(mutex_);
  return !gates_.empty();
}

void DeviceGroup::expect(int track, uint32_t value) {
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(pending_.begin(), pending_.end(), [&](const Pending& each) {
    return each.track == track && each.value == value;
  });
  if (found == pending_.end()) return;  // it is over
  for (Pending& each : pending_) {
    if (each.batch == found->batch && !each.deadline) each.deadline.emplace(each.timeout);
  }
}

bool DeviceGroup::open_gates() {
  std::list<Gate> open;
  {
    const std::lock_guard lock(mutex_);
    for (auto gate = gates_.begin(); gate != gates_.end();) {
      const auto next = std::next(gate);
      if (gate->open->load(std::memory_order_seq_cst) != 0) open.splice(open.end(), gates_, gate);
      gate = next;
    }
  }
  for (const Gate& gate : open) gate.then();
  return !open.empty();
}

void DeviceGroup::close(Clock::duration grace) {
  const Deadline deadline(grace);
  Waiter waiter([&](Clock::time_point) { group_.watch(); });
  while (pending() && !deadline.passed()) {
    std::this_thread::sleep_for(kParting);
    waiter.look_when_due();
  }
  if (failed_) release_now();  // nobody looks any more
  std::unique_lock lock(enqueue_mutex_, std::defer_lock);
  while (!lock.try_lock()) {  // another thread waits for ranks to meet
    if (deadline.passed()) {
      const std::string why = str("group '", group_.name(), "' was destroyed by rank ",
                                  group_.rank(), " while its ranks met");
      group_.fail(std::make_exception_ptr(PeerError(group_.rank(), why)));
    }
    std::this_thread::sleep_for(kParting);
  }
  try {
    if (!pending()) team_->let_go();  // else streams may still use it
  } catch (const std::exception& error) {
    group_.logger().warning("letting go of peers' device memory: ", error.what());
  }
  // Memory that a peer has mapped is not freed under its feet.
  const auto gone = [&](Rank peer) {
    if (group_.transport().device_area(peer) == nullptr) return true;
    if (group_.transport().connection_lost(peer)) return true;
    for (const int card : {0, 1 + group_.rank()}) {
      const uint32_t step = area_of(peer).card(card).step.load(std::memory_order_acquire);
      if (step != 0 && step <= cuda::Team::kSteps) return false;
    }
    return true;
  };
  bool all = true;
  for (Rank peer = 0; peer < group_.size(); ++peer) {
    while (!(all = gone(peer)) && !deadline.passed()) std::this_thread::sleep_for(kParting);
    if (!all) break;
  }
  if (all && !pending()) return give_back();
  kept_ = true;
  group_.keep_memory();
}

}  // namespace ringcomm
