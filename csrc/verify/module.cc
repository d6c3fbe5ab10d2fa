// The Python module ringcomm._planner (see ringcomm/_planner.pyi): plans, the table that selects
// them, and the verifier. It needs neither torch nor a group, so commands that use it start at
// once.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "plan/cursor.h"
#include "plan/topology.h"
#include "verify/plan_text.h"
#include "verify/proof.h"

namespace ringcomm {
namespace {

namespace py = pybind11;
using namespace py::literals;

using Counts = std::vector<uint64_t>;
// ringcomm/algorithms/call.py has the same fields in the same order.
using CallTuple = std::tuple<int, int, int, uint64_t, Rank, uint64_t, Counts, Counts, Counts>;
using Words = std::vector<std::vector<int64_t>>;

Shape shape_of(const CallTuple& call) {
  Shape shape;
  int collective = 0;
  std::tie(collective, shape.size, shape.local, shape.element, shape.root, shape.bytes,
           shape.shards, shape.send, shape.recv) = call;
  shape.collective = static_cast<Collective>(collective);
  return shape;
}

Shape shape_of(const CallTuple& call, const Counts& geometry) {
  RINGCOMM_CHECK(geometry.size() == 6, "a geometry of ", geometry.size(), " numbers");
  Shape shape = shape_of(call);
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

py::object prove_scripts(const CallTuple& call, const Counts& geometry, const Words& words) {
  const Shape shape = shape_of(call, geometry);
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

py::tuple mutants_of(const CallTuple& call, const Counts& geometry, const Words& words) {
  const Shape shape = shape_of(call, geometry);
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

// The steps of a plan, one after another.
py::list steps_of(const Plan& plan) {
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

py::list script_steps(const CallTuple& call, const Counts& geometry, Rank rank,
                      const std::vector<int64_t>& words) {
  const Shape shape = shape_of(call, geometry);
  return steps_of(
      with_errors([&] { return scripted_plan(shape, rank, Algorithm::kTree, {words}); }));
}

// Hosts have `local` ranks each, and the ranks of one host have mapped windows. `costs` and `names`
// are those of the hosts' network.
Reach reach_on_hosts(int size, int local, const std::string& costs,
                     const std::vector<std::string>& names) {
  RINGCOMM_CHECK(size > 0, "no group has ", size, " ranks");
  RINGCOMM_CHECK(local > 0 && size % local == 0, size, " ranks do not fill hosts of ", local);
  std::vector<int> host_of;
  for (Rank r = 0; r < size; ++r) host_of.push_back(r / local);
  return reach_of(parse_topology(costs), host_of, names);
}

py::tuple plan_of(const CallTuple& call, const std::string& costs,
                  const std::vector<std::string>& names, Rank rank,
                  const std::optional<std::string>& asked) {
  Shape shape = shape_of(call);
  Reach reach;
  Algorithm algorithm{};
  const Plan plan = with_errors([&] {
    reach = reach_on_hosts(shape.size, shape.local, costs, names);
    static_cast<Levels&>(shape) = static_cast<const Levels&>(reach);
    shape.geometry =
        reach.mapped ? Geometry::for_ranks(shape.size) : Geometry::across_hosts(shape.size);
    algorithm = asked ? algorithm_called(*asked) : select(shape, reach.mapped);
    return make_plan(shape, rank, algorithm);
  });
  return py::make_tuple(to_string(algorithm), selection_reason(shape, reach.mapped),
                        steps_of(plan));
}

std::vector<py::dict> rows_of_selection(int size, const std::string& costs, int local,
                                        const std::vector<std::string>& names) {
  const auto choose = [&] { return selection(size, reach_on_hosts(size, local, costs, names)); };
  std::vector<py::dict> rows;
  for (const SelectionRow& row : with_errors(choose)) {
    rows.emplace_back("collective"_a = to_string(row.collective),
                      "algorithm"_a = to_string(row.algorithm), "limit"_a = row.limit,
                      "needs"_a = row.needs, "fits"_a = row.fits, "text"_a = row.text);
  }
  return rows;
}

// The plan in words, with its loops.
std::string text_of(const CallTuple& call, const Counts& geometry, Rank rank,
                    const std::vector<int64_t>& words) {
  const Shape shape = shape_of(call, geometry);
  return with_errors(
      [&] { return to_text(scripted_plan(shape, rank, Algorithm::kTree, {words})); });
}

// Names and numbers that Python needs are taken from here, so that no list is kept twice.
void bind_names(py::module_& module) {
  py::list collectives, rooted, sharded, algorithms, kernels;
  for (int i = 0; i < kCollectives; ++i) {
    const auto collective = static_cast<Collective>(i);
    const py::str name(to_string(collective));
    collectives.append(name);
    if (ringcomm::rooted(collective)) rooted.append(name);
    if (ringcomm::sharded(collective)) sharded.append(name);
  }
  for (const char* const name : algorithm_names())
    (std::ssize(algorithms) < kAlgorithms ? algorithms : kernels).append(name);
  module.attr("COLLECTIVES") = py::tuple(collectives);
  module.attr("ROOTED") = py::tuple(rooted);
  module.attr("SHARDED") = py::tuple(sharded);
  module.attr("ALGORITHMS") = py::tuple(algorithms);
  module.attr("KERNELS") = py::tuple(kernels);
  module.attr("VERBS") = py::tuple(py::cast(kVerbNames));
  module.attr("SPACES") = py::tuple(py::cast(kSpaceNames));
  module.attr("LANES") = py::tuple(py::cast(kLaneNames));
  const Geometry mapped = Geometry::for_ranks(2), network = Geometry::across_hosts(2);
  module.attr("LIMITS") =
      py::dict("any_size"_a = kAnySize, "few_ends"_a = kFewEnds,
               "few_host_ranks"_a = kFewEnds * kFewEnds, "inbox_bytes"_a = network.inbox_bytes,
               "line_bytes"_a = kLineBytes, "most_ranks"_a = kMostRanks,
               "one_shot_bytes"_a = kOneShotBytes, "segment_bytes"_a = mapped.segment_bytes,
               "slot_bytes"_a = network.inbox_bytes / network.slots);
  const Costs costs;
  module.attr("DEFAULT_COSTS") = py::make_tuple(costs.alpha, costs.beta, costs.gamma);
  module.attr("INCAST") = kIncast;
}

}  // namespace

PYBIND11_MODULE(_planner, module) {
  bind_names(module);
  module.def("plan", &plan_of, py::arg("call"), py::arg("costs"), py::arg("names"), py::arg("rank"),
             py::arg("algorithm"));
  module.def("selection", &rows_of_selection, py::arg("size"), py::arg("costs") = "",
             py::arg("local") = 1, py::arg("names") = std::vector<std::string>());
  module.def("geometry", &geometry, py::arg("size"), py::arg("mapped"));
  module.def("prove", &prove_scripts, py::arg("call"), py::arg("geometry"), py::arg("scripts"));
  module.def("mutants", &mutants_of, py::arg("call"), py::arg("geometry"), py::arg("scripts"));
  module.def("steps", &script_steps, py::arg("call"), py::arg("geometry"), py::arg("rank"),
             py::arg("script"));
  module.def("text", &text_of, py::arg("call"), py::arg("geometry"), py::arg("rank"),
             py::arg("script"));
}

}  // namespace ringcomm
