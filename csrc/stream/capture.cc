// Operations that are captured into CUDA graphs. The host takes part once, at the capture: ranks
// meet and map one another's memory. At each replay streams do the same work again, with the same
// words (device/handover.cc), and no host knows of it. Only kernels that meet have a deadline. The
// worker looks now and then whether a replay waits for a rank that is gone.
#include "stream/device_engine.h"

namespace ringcomm {

constexpr auto kIdle = std::chrono::seconds(2);

DeviceEngine::CompletionPtr DeviceEngine::capture(const Operation& operation, uint64_t capture,
                                                  cuda::Stream caller, const std::string& asked,
                                                  const Finish& finish) {
  bootstrap({subgroup_of(-1)}, asked);
  RINGCOMM_CHECK(reach(-1), asked,
                 " cannot be captured into a CUDA graph: its tensors go through memory of the "
                 "host, as ",
                 access_.why);
  RINGCOMM_CHECK(!by_hand(operation), asked,
                 " cannot be captured into a CUDA graph: it runs by an algorithm by hand, whose "
                 "tensors go through memory of the host");
  Timeline& timeline = timelines_[0];
  if (timeline.capture == capture) api_.wait(caller, timeline.captured);
  Descriptor descriptor = make_descriptor(operation, ++sequence_);
  set_plan(descriptor, kByGraph, 0);
  // Others work in the group's own memory.
  if (const auto by = kernel_of(operation); by == kByTwoShot || by == kHandOver)
    comm_->offer(shape_of(operation), Spans(operation.input), Spans(operation.output));
  announce(operation, descriptor);
  meet_at(sequence_, Deadline(state_.timeout_or(operation.timeout)), asked);
  captured_.store(true, std::memory_order_seq_cst);  // partner: watched()
  state_.kick();
  comm_->watch(true);
  run_kernels(operation, caller, true);
  finish_in(caller, finish);
  comm_->watch(false);
  comm_->flush(caller);
  if (timeline.captured == nullptr) timeline.captured = api_.make_event();
  timeline.capture = capture;
  api_.record(timeline.captured, caller);
  const cuda::Event over = event();
  api_.record(over, caller);
  return std::make_shared<Completion>(*this, 0, std::vector<HostStaging::Point>(), over, caller);
}

// Until all have come to this operation and have mapped what others need them to. What is under way
// ends first, for closing a mapping may wait for it.
void DeviceEngine::meet_at(uint64_t sequence, const Deadline& deadline, const std::string& asked) {
  const Deadline idle(kIdle);
  await_ranks(asked, deadline, subgroup_of(-1), [&](Rank peer) {
    return state_.transport().state(peer, Board::kDevice).called >= sequence;
  });
  if (await_idle(idle)) {
    comm_->look();
    state_.transport().finish(Board::kDevice, sequence);  // of the host's part nothing is left
  }
  own_.mapped_for().store(sequence, std::memory_order_release);
  await_ranks(asked, deadline, subgroup_of(-1), [&](Rank peer) {
    return area_of(peer).mapped_for().load(std::memory_order_acquire) >= sequence;
  });
}

}  // namespace ringcomm
