// The shortest of several runs that show a violation.
#include <algorithm>

#include "verify/sequence.h"

namespace ringcomm {
namespace {

constexpr uint32_t kNone = UINT32_MAX;
constexpr uint64_t kRuns = 24;  // interleavings; long programs have fewer
constexpr size_t kMostEvents = 1 << 20;

// Leaves the events that come before the last two in every run, and these.
void trim(Finding& finding) {
  std::vector<Event>& events = finding.events;
  const auto count = static_cast<uint32_t>(events.size());
  std::vector<bool> kept(count, false);
  for (const uint32_t last : {finding.event, finding.other}) {
    if (last < count) kept[last] = true;
  }
  std::vector<bool> later(256, false);  // by rank: something later is kept
  for (uint32_t i = count; i-- > 0;) {
    const auto rank = static_cast<size_t>(events[i].rank);
    if (rank >= later.size()) later.resize(rank + 1, false);
    kept[i] = kept[i] || later[rank];
    if (!kept[i]) continue;
    later[rank] = true;
    if (events[i].met < count) kept[events[i].met] = true;
  }
  std::vector<uint32_t> number(count, kNone);
  std::vector<Event> rest;
  for (uint32_t i = 0; i < count; ++i) {
    if (!kept[i]) continue;
    number[i] = static_cast<uint32_t>(rest.size());
    rest.push_back(events[i]);
    if (events[i].met < count) rest.back().met = number[events[i].met];
  }
  const auto moved = [&](uint32_t event) { return event < count ? number[event] : kNone; };
  finding.event = moved(finding.event);
  finding.other = moved(finding.other);
  events = std::move(rest);
}

}  // namespace

Finding find(const std::vector<Program>& sequence) {
  Finding shortest = verify_detail::found_by(sequence, 0);
  size_t spent = shortest.events.size();
  trim(shortest);
  for (uint64_t seed = 1; seed < kRuns && spent < kMostEvents && !shortest.stuck; ++seed) {
    Finding next = verify_detail::found_by(sequence, seed);
    spent += std::max<size_t>(1, next.events.size());
    trim(next);
    const bool shorter = next.events.size() < shortest.events.size();
    if (!next.text.empty() && shorter) shortest = std::move(next);
  }
  return shortest;
}

}  // namespace ringcomm
