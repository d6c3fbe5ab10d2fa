#include "stream/registered_memory.h"

namespace ringcomm {

constexpr auto kLongest = std::chrono::seconds(2);  // for what is under way

void RegisteredMemory::add(const std::string& asked, const Named& memory,
                           const Deadline& deadline) {
  for (const auto& entry : memory) names_.insert(entry.first);
  if (!rendezvous_.reach(kGroup)) {
    logger_.info(asked, " does nothing: tensors go through memory of the host, as ",
                 rendezvous_.reason());
    return;
  }
  verdicts_.await_idle(kLongest);  // where there is no room, idle memory makes some
  std::vector<cuda::Registered> results;
  for (const auto& [name, spans] : memory) {
    results.push_back(peers_.exports().enroll(name, spans));
  }
  Operation meeting;
  meeting.purpose = Purpose::kMemory;
  const uint64_t sequence = announcements_.announce(meeting, kHandOver).sequence;
  rendezvous_.meet_at(sequence, deadline, asked);
  log_registration(asked, results);
  std::set<Rank> late;
  for (const auto& entry : memory) {
    const std::vector<Rank> ranks = peers_.exports().without(entry.first);
    late.insert(ranks.begin(), ranks.end());
  }
  for (const Rank rank : late) {
    logger_.warning(asked, ": rank ", rank, " has not mapped all of it: until it has, ",
                    "tensors there are copied once more");
  }
}

bool RegisteredMemory::remove(const std::string& name) {
  const bool known = names_.erase(name) > 0;
  if (known && rendezvous_.reach(kGroup)) peers_.exports().dismiss(name);
  return known;
}

void RegisteredMemory::log_registration(const std::string& asked,
                                        const std::vector<cuda::Registered>& results) const {
  cuda::Registered all;
  for (const cuda::Registered& result : results) {
    all.bytes += result.bytes;
    all.asked += result.asked;
    if (all.why.empty()) all.why = result.why;
  }
  if (all.why.empty()) {
    return logger_.info(asked, ": ", all.bytes, " bytes are registered");
  }
  logger_.warning(
      asked, ": ", all.asked - all.bytes, " of ", all.asked,
      " bytes are not registered, and tensors there may be copied once more: ", all.why);
}

}  // namespace ringcomm
