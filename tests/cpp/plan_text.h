// Plans as text, for people, and as JSON, for programs.
#pragma once

#include <array>
#include <sstream>
#include <string>

#include "plan/plan.h"

namespace ringcomm {

inline constexpr std::array<const char*, 4> kVerbNames = {"copy", "reduce", "signal", "wait"};
inline constexpr std::array<const char*, 5> kSpaceNames = {"input", "output", "window", "inbox",
                                                           "line"};
inline constexpr std::array<const char*, kLanes> kLaneNames = {"data", "credit"};

template <typename Names, typename Index>
const char* name(const Names& names, Index index) {
  return names[static_cast<size_t>(index)];
}

inline bool moves_bytes(const Step& step) {
  return step.verb == Verb::kCopy || step.verb == Verb::kReduce;
}

// window[2]+64, inbox[2<1]+0 (memory of 2, written by 1), input+128
inline void write_text(std::ostream& out, const Ref& ref) {
  out << name(kSpaceNames, ref.space);
  if (ref.space == Space::kWindow) out << '[' << ref.rank << ']';
  if (ref.space == Space::kInbox || ref.space == Space::kLine) {
    out << '[' << ref.rank << '<' << ref.from << ']';
  }
  out << '+' << ref.offset;
}

inline void write_text(std::ostream& out, const Plan& plan, const Step& step) {
  out << name(kVerbNames, step.verb);
  if (!moves_bytes(step)) {
    out << (step.verb == Verb::kSignal ? " -> " : " <- ") << step.peer;
    if (step.lane != kData) out << ' ' << name(kLaneNames, step.lane);
    return;
  }
  const uint32_t sources = step.first_ref + step.dst_count;
  for (uint32_t i = step.first_ref; i < sources + step.src_count; ++i) {
    out << (i == sources ? " <- " : i == step.first_ref ? " " : ", ");
    write_text(out, plan.refs[i]);
  }
  out << "  " << step.bytes << " B" << (step.final ? " final" : "");
}

inline void write_json(std::ostream& out, const Ref& ref) {
  out << "{\"space\":\"" << name(kSpaceNames, ref.space) << "\",\"rank\":" << ref.rank
      << ",\"from\":" << ref.from << ",\"offset\":" << ref.offset << '}';
}

inline void write_json(std::ostream& out, const Plan& plan, uint32_t first, uint32_t count) {
  out << '[';
  for (uint32_t i = first; i < first + count; ++i) {
    if (i > first) out << ',';
    write_json(out, plan.refs[i]);
  }
  out << ']';
}

inline void write_json(std::ostream& out, const Plan& plan, const Step& step) {
  out << "{\"verb\":\"" << name(kVerbNames, step.verb) << '"';
  if (moves_bytes(step)) {
    out << ",\"dst\":";
    write_json(out, plan, step.first_ref, step.dst_count);
    out << ",\"src\":";
    write_json(out, plan, step.first_ref + step.dst_count, step.src_count);
    out << ",\"bytes\":" << step.bytes;
    if (step.verb == Verb::kReduce) out << ",\"final\":" << (step.final ? "true" : "false");
  } else {
    out << ",\"peer\":" << step.peer << ",\"lane\":\"" << name(kLaneNames, step.lane) << '"';
  }
  out << '}';
}

inline std::string to_text(const Plan& plan) {
  std::ostringstream out;
  out << to_string(plan.collective) << ' ' << to_string(plan.algorithm) << ", rank " << plan.rank
      << " of " << plan.size << '\n';
  for (const Block& block : plan.blocks) {
    const bool repeated = block.repetitions > 1;
    if (repeated) {
      out << "repeat " << block.repetitions << " times, " << block.stride << " B further each:\n";
    }
    for (uint32_t i = 0; i < block.step_count; ++i) {
      out << (repeated ? "    " : "  ");
      write_text(out, plan, plan.steps[block.first_step + i]);
      out << '\n';
    }
  }
  return out.str();
}

inline std::string to_text(const Plan& plan, const Step& step) {
  std::ostringstream out;
  write_text(out, plan, step);
  return out.str();
}

inline std::string to_json(const Plan& plan) {
  std::ostringstream out;
  out << "{\"collective\":\"" << to_string(plan.collective) << "\",\"algorithm\":\""
      << to_string(plan.algorithm) << "\",\"size\":" << plan.size << ",\"rank\":" << plan.rank
      << ",\"blocks\":[";
  for (size_t b = 0; b < plan.blocks.size(); ++b) {
    const Block& block = plan.blocks[b];
    out << (b ? "," : "") << "{\"repetitions\":" << block.repetitions
        << ",\"stride\":" << block.stride << ",\"steps\":[";
    for (uint32_t i = 0; i < block.step_count; ++i) {
      if (i > 0) out << ',';
      write_json(out, plan, plan.steps[block.first_step + i]);
    }
    out << "]}";
  }
  out << "]}";
  return out.str();
}

}  // namespace ringcomm
