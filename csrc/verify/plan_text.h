// Plans as text.
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

// Writes " (+1024 a pass)"; " (1 of 8 slots of 512, +4 a pass, +2 a round)"
inline void write_text(std::ostream& out, const Plan& plan, uint8_t number) {
  if (number == 0) return;
  const Motion& motion = plan.motions[number - 1u];
  if (motion.slots == 0) {
    out << " (+" << motion.bytes << " a pass)";
    return;
  }
  out << " (" << motion.first << " of " << motion.slots << " slots of " << motion.bytes;
  if (motion.pass > 0) out << ", +" << motion.pass << " a pass";
  if (motion.round > 0) out << ", +" << motion.round << " a round";
  out << ')';
}

// Writes window[2]+64; inbox[2<1]+0: rank 2's, written by 1; input+128; input{3}+128: in extent 3
inline void write_text(std::ostream& out, const Plan& plan, const Ref& ref) {
  out << name(kSpaceNames, ref.space);
  if (ref.space == Space::kWindow) out << '[' << ref.rank << ']';
  if (ref.space == Space::kInbox || ref.space == Space::kLine) {
    out << '[' << ref.rank << '<' << ref.from << ']';
  }
  if (ref.extent > 0) out << '{' << ref.extent << '}';
  out << '+' << ref.offset;
  write_text(out, plan, ref.motion);
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
    write_text(out, plan, plan.refs[i]);
  }
  out << "  " << step.bytes << " B" << (step.final ? " final" : "");
  if (step.extent > 0) {
    out << ", to the end of extent {" << step.extent << "} from " << step.at;
    write_text(out, plan, step.motion);
  }
}

inline void write_text(std::ostream& out, const Plan& plan, const Loop& loop) {
  std::string indent = "  ";
  if (loop.passes > 1) out << "in " << loop.passes << " passes:\n", indent += "  ";
  for (uint32_t b = loop.first_block; b < loop.first_block + loop.block_count; ++b) {
    const Block& block = plan.blocks[b];
    const bool rounds = block.rounds > 1;
    if (rounds) out << indent << "in " << block.rounds << " rounds, an extent further each:\n";
    for (uint32_t i = 0; i < block.step_count; ++i) {
      out << indent << (rounds ? "  " : "");
      write_text(out, plan, plan.steps[block.first_step + i]);
      out << '\n';
    }
  }
}

inline std::string to_text(const Plan& plan) {
  std::ostringstream out;
  out << to_string(plan.collective) << ' ' << to_string(plan.algorithm) << ", rank " << plan.rank
      << " of " << plan.size << '\n';
  for (size_t i = 0; i < plan.extents.size(); ++i) {
    const Extent& extent = plan.extents[i];
    out << "extent {" << i + 1 << "}: " << extent.bytes << " B from " << extent.offset << '\n';
  }
  for (const Loop& loop : plan.loops) write_text(out, plan, loop);
  return out.str();
}

inline std::string to_text(const Plan& plan, const Step& step) {
  std::ostringstream out;
  write_text(out, plan, step);
  return out.str();
}

}  // namespace ringcomm
