// The Python module ringcomm._verifier (see ringcomm/_verifier.pyi): the verifier, without the
// engine and without torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "plan/cursor.h"
#include "verify/plan_text.h"
#include "verify/proof.h"

namespace ringcomm {
namespace {

namespace py = pybind11;

// A call of ringcomm/algorithms/call.py, and the geometry.
using Counts = std::vector<uint64_t>;
using ShapeTuple =
    std::tuple<int, int, int, uint64_t, Rank, uint64_t, Counts, Counts, Counts, Counts>;
using Words = std::vector<std::vector<int64_t>>;

Shape shape_of(const ShapeTuple& given) {
  Shape shape;
  int collective = 0;
  Counts geometry;
  std::tie(collective, shape.size, shape.local, shape.element, shape.root, shape.bytes,
           shape.shards, shape.send, shape.recv, geometry) = given;
  RINGCOMM_CHECK(geometry.size() == 6, "a geometry of ", geometry.size(), " numbers");
  shape.collective = static_cast<Collective>(collective);
  shape.geometry = {shape.size,  geometry[0], geometry[1], geometry[2],
                    geometry[3], geometry[4], geometry[5]};
  return shape;
}

std::vector<Script> scripts_of(const Words& words) {
  std::vector<Script> scripts;
  for (const std::vector<int64_t>& script : words) scripts.push_back({script});
  return scripts;
}

auto with_errors(const auto& function) {
  try {
    const py::gil_scoped_release no_gil;
    return function();
  } catch (const UsageError& error) {
    throw py::value_error(error.what());
  }
}

int64_t number_of(uint32_t event) { return event == UINT32_MAX ? -1 : int64_t{event}; }

Counts geometry(int size, bool mapped) {
  const Geometry made = mapped ? Geometry::for_ranks(size) : Geometry::across_hosts(size);
  return {made.segment_bytes, made.room_bytes, made.inbox_bytes,
          made.slots,         made.line_bytes, made.one_shot_bytes};
}

py::object prove_scripts(const ShapeTuple& given, const Words& words) {
  const Shape shape = shape_of(given);
  const std::vector<Script> scripts = scripts_of(words);
  const Verdict verdict = with_errors([&] { return prove(shape, scripts); });
  const Finding& finding = verdict.finding;
  if (finding.text.empty()) return py::none();
  const Scripted made = scripted(shape, scripts, false);
  // The rank, the operation of the sequence, that of the script or -1, the pass, the signal that a
  // wait meets or -1, and the step in words.
  const auto event_tuple = [&](const Event& event) {
    const auto rank = static_cast<size_t>(event.rank);
    const bool own = event.operation - verdict.own < verdict.count;
    const Plan& plan = made.program.plans[rank];
    return py::make_tuple(event.rank, event.operation,
                          own ? int64_t{made.origins[rank][event.step]} : -1, event.pass,
                          number_of(event.met), own ? to_text(plan, plan.steps[event.step]) : "");
  };
  const auto event_list = [&](const std::vector<Event>& events) {
    py::list list;
    for (const Event& event : events) list.append(event_tuple(event));
    return list;
  };
  return py::make_tuple(verdict.when, finding.text, finding.stuck, number_of(finding.event),
                        number_of(finding.other), event_list(finding.events),
                        event_list(finding.places));
}

py::tuple mutants_of(const ShapeTuple& given, const Words& words) {
  const Shape shape = shape_of(given);
  const std::vector<Script> scripts = scripts_of(words);
  const Mutants result = with_errors([&] { return mutants(shape, scripts); });
  const Scripted made = scripted(shape, scripts, false);
  py::list spare;
  for (const Spare& signal : result.spare) {
    const auto& origins = made.origins[static_cast<size_t>(signal.from)];
    spare.append(py::make_tuple(signal.from, signal.to, int{signal.lane}, signal.index,
                                origins[signal.step]));
  }
  return py::make_tuple(result.dropped, spare);
}

// The steps of one rank's plan, as _C.plan has them.
py::list steps_of(const ShapeTuple& given, Rank rank, const std::vector<int64_t>& words) {
  const Shape shape = shape_of(given);
  const Plan plan =
      with_errors([&] { return scripted_plan(shape, rank, Algorithm::kTree, {words}); });
  py::list steps;
  for (PlanCursor step(plan); step; step.next()) {
    py::list operands;
    for (uint32_t i = 0; i < uint32_t{step->dst_count} + step->src_count; ++i) {
      const Ref& ref = plan.refs[step->first_ref + i];
      operands.append(
          py::make_tuple(static_cast<int>(ref.space), ref.rank, ref.from, step.offset(ref)));
    }
    steps.append(py::make_tuple(static_cast<int>(step->verb), step->peer, int{step->lane},
                                step.bytes(), int{step->dst_count}, operands));
  }
  return steps;
}

// The plan in words, with its loops.
std::string text_of(const ShapeTuple& given, Rank rank, const std::vector<int64_t>& words) {
  const Shape shape = shape_of(given);
  return with_errors(
      [&] { return to_text(scripted_plan(shape, rank, Algorithm::kTree, {words})); });
}

}  // namespace

PYBIND11_MODULE(_verifier, module) {
  module.def("geometry", &geometry, py::arg("size"), py::arg("mapped"));
  module.def("prove", &prove_scripts, py::arg("shape"), py::arg("scripts"));
  module.def("mutants", &mutants_of, py::arg("shape"), py::arg("scripts"));
  module.def("steps", &steps_of, py::arg("shape"), py::arg("rank"), py::arg("script"));
  module.def("text", &text_of, py::arg("shape"), py::arg("rank"), py::arg("script"));
}

}  // namespace ringcomm
