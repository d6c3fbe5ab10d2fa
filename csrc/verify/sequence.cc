#include "verify/sequence.h"

#include <unordered_map>

#include "plan/cursor.h"
#include "plan/select.h"
#include "verify/memory.h"

namespace ringcomm {
namespace verify_detail {
namespace {

// As many signals as waits on every lane of every pair.
void check_balance(const Program& program) {
  const size_t size = program.plans.size();
  std::unordered_map<size_t, int64_t> balance;
  for (const Plan& plan : program.plans) {
    for (PlanCursor step(plan); step; step.next()) {
      const size_t me = static_cast<size_t>(plan.rank), peer = static_cast<size_t>(step->peer);
      if (step->verb == Verb::kSignal) ++balance[(me * size + peer) * kLanes + step->lane];
      if (step->verb == Verb::kWait) --balance[(peer * size + me) * kLanes + step->lane];
    }
  }
  for (const auto& [i, signals] : balance) {
    if (signals == 0) continue;
    const size_t from = i / kLanes / size, to = i / kLanes % size;
    if (signals < 0) {
      throw Violation(str(to_string(program.plans.front().collective), ": rank ", to, " waits for ",
                          -signals, " signals that rank ", from,
                          " does not send: it has signals left over to wait for"));
    }
    throw Violation(str(to_string(program.plans.front().collective), ": ", signals,
                        " signals left over from rank ", from, " to ", to));
  }
}

}  // namespace

void check_sequence(const std::vector<Program>& sequence) {
  for (const Program& program : sequence) {
    const size_t size = sequence.front().shapes.size();
    if (size == 0 || size > kMostRanks || program.shapes.size() != size ||
        program.plans.size() != size) {
      throw Violation("a sequence needs one shape and plan a rank, for at most 4,096 ranks");
    }
    Geometry geometry = sequence.front().shapes.front().geometry;
    geometry.segment_bytes = program.shapes.front().geometry.segment_bytes;  // an operation's own
    if (!(program.shapes.front().geometry == geometry) ||
        geometry.window_room() != sequence.front().shapes.front().geometry.window_room()) {
      throw Violation("operations of one group share one geometry, but for the segments");
    }
    check_balance(program);
  }
}

}  // namespace verify_detail

Program program_of(std::vector<Shape> shapes, Algorithm algorithm, bool in_place) {
  Program program{std::move(shapes), {}, in_place};
  for (size_t r = 0; r < program.shapes.size(); ++r) {
    program.plans.push_back(make_plan(program.shapes[r], static_cast<Rank>(r), algorithm));
  }
  return program;
}

Program program_of(const Shape& shape, Algorithm algorithm, bool in_place) {
  return program_of(std::vector<Shape>(static_cast<size_t>(shape.size), shape), algorithm,
                    in_place);
}

}  // namespace ringcomm
