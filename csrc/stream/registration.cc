// Memory that a program registers: all ranks map it at once, so that no operation copies it first.
// The ranks meet as at a capture (capture.cc). Then it stays as what a graph has, until the
// program says otherwise. What is under way ends first, for up to two seconds.
#include "stream/device_engine.h"

namespace ringcomm {

constexpr auto kQuiet = std::chrono::seconds(2);

void DeviceEngine::register_memory(const std::string& asked, const NamedMemory& memory) {
  guard(asked, [&] {
    enqueue_mutex_.assert_held();
    bootstrap({subgroup_of(-1)}, asked);
    for (const auto& each : memory) registered_.insert(each.first);
    if (!reach(-1)) {
      state_.logger().info(asked, " does nothing: tensors go through memory of the host, as ",
                           access_.why);
      return;
    }
    await_idle(Deadline(kQuiet));  // where there is no room, idle memory makes some
    std::vector<cuda::Registered> results;
    for (const auto& [name, spans] : memory) {
      results.push_back(comm_->exports().enroll(name, spans));
    }
    Operation meeting;
    meeting.purpose = Purpose::kMemory;
    Descriptor descriptor = make_descriptor(meeting, ++sequence_);
    set_plan(descriptor, kHandOver, 0);
    announce(meeting, descriptor);
    meet_at(sequence_, Deadline(state_.timeout()), asked);
    tell(asked, results);
    std::set<Rank> late;
    for (const auto& each : memory) {
      const std::vector<Rank> ranks = comm_->exports().without(each.first);
      late.insert(ranks.begin(), ranks.end());
    }
    for (const Rank rank : late) {
      state_.logger().warning(asked, ": rank ", rank, " has not mapped all of it: until it has, ",
                              "tensors there are copied once more");
    }
  });
}

void DeviceEngine::tell(const std::string& asked, const std::vector<cuda::Registered>& results) {
  cuda::Registered all;
  for (const cuda::Registered& each : results) {
    all.bytes += each.bytes;
    all.asked += each.asked;
    if (all.why.empty()) all.why = each.why;
  }
  if (all.why.empty()) {
    return state_.logger().info(asked, ": ", all.bytes, " bytes are registered");
  }
  state_.logger().warning(
      asked, ": ", all.asked - all.bytes, " of ", all.asked,
      " bytes are not registered, and tensors there may be copied once more: ", all.why);
}

bool DeviceEngine::deregister_memory(const std::string& name) {
  bool known = false;
  guard("deregistering memory", [&] {
    enqueue_mutex_.assert_held();
    known = registered_.erase(name) > 0;
    if (known && reach(-1)) comm_->exports().dismiss(name);
  });
  return known;
}

void DeviceEngine::offer(const Span& memory) {
  guard("allocate_tensor", [&] {
    enqueue_mutex_.assert_held();
    if (met_.contains(0) && reach(-1)) comm_->exports().offer(memory);
  });
}

}  // namespace ringcomm
