#include "torch/plan_bindings.h"

#include "plan/select.h"
#include "plan/shape.h"
#include "torch/backend.h"
#include "torch/errors.h"

namespace ringcomm {
namespace {

namespace py = pybind11;

Collective collective_called(const std::string& name) {
  std::string known;
  for (int i = 0; i < kCollectives; ++i) {
    const auto collective = static_cast<Collective>(i);
    if (name == to_string(collective)) return collective;
    known += str(i == 0 ? "" : ", ", to_string(collective));
  }
  TORCH_CHECK_VALUE(false, "there is no collective '", name, "': use one of ", known);
}

Algorithm choose(const Shape& shape, const std::optional<std::string>& name) {
  if (name) return algorithm_called(*name);
  return select(shape, Reach{true});
}

Plan planned(const Shape& shape, Rank rank, const std::optional<std::string>& algorithm) {
  return with_value_errors([&] { return make_plan(shape, rank, choose(shape, algorithm)); });
}

std::vector<std::string> names_of_algorithms(const std::string& collective) {
  std::vector<std::string> names;
  for (const Algorithm algorithm : algorithms_of(collective_called(collective))) {
    names.emplace_back(to_string(algorithm));
  }
  return names;
}

void bind_geometry(py::module_& module) {
  py::class_<Geometry>(module, "Geometry")
      .def(py::init(&Geometry::for_ranks), py::arg("size"))
      .def_readwrite("segment_bytes", &Geometry::segment_bytes)
      .def_readwrite("inbox_bytes", &Geometry::inbox_bytes)
      .def_readwrite("slots", &Geometry::slots)
      .def_readwrite("line_bytes", &Geometry::line_bytes)
      .def_readwrite("one_shot_bytes", &Geometry::one_shot_bytes)
      .def_property_readonly("half_bytes", &Geometry::half_bytes);
}

void bind_shape(py::module_& module) {
  py::class_<Shape>(module, "Shape")
      .def(py::init([](const std::string& collective, int size) {
             Shape shape;
             shape.collective = collective_called(collective);
             shape.size = size;
             shape.geometry = Geometry::for_ranks(size);
             return shape;
           }),
           py::arg("collective"), py::arg("size"))
      .def_property_readonly("collective",
                             [](const Shape& self) { return to_string(self.collective); })
      .def_readonly("size", &Shape::size)
      .def_readwrite("root", &Shape::root)
      .def_readwrite("element", &Shape::element)
      .def_readwrite("bytes", &Shape::bytes)
      .def_readwrite("shards", &Shape::shards)
      .def_readwrite("send", &Shape::send)
      .def_readwrite("recv", &Shape::recv)
      .def_readwrite("local", &Shape::local)
      .def_readwrite("geometry", &Shape::geometry);
}

}  // namespace

void bind_plans(py::module_& module) {
  bind_geometry(module);
  bind_shape(module);
  module.def(
      "plan_text",
      [](const Shape& shape, Rank rank, const std::optional<std::string>& algorithm) {
        return to_text(planned(shape, rank, algorithm));
      },
      py::arg("shape"), py::arg("rank"), py::arg("algorithm") = py::none());
  module.def(
      "plan_json",
      [](const Shape& shape, Rank rank, const std::optional<std::string>& algorithm) {
        return to_json(planned(shape, rank, algorithm));
      },
      py::arg("shape"), py::arg("rank"), py::arg("algorithm") = py::none());
  module.def("algorithms", &names_of_algorithms, py::arg("collective"));
  module.def(
      "selected", [](const Shape& shape) { return to_string(choose(shape, std::nullopt)); },
      py::arg("shape"));
  module.def(
      "selection_text",
      [](int size, const std::string& costs) {
        return with_value_errors(
            [&] { return selection_text(size, costs.empty() ? Costs{} : parse_costs(costs)); });
      },
      py::arg("size"), py::arg("costs") = "");
  module.def("instruction_set", &instruction_set);
  module.def("instruction_sets", &instruction_sets);
  module.def(
      "use_instruction_set",
      [](const std::string& name) { with_value_errors([&] { use_instruction_set(name); }); },
      py::arg("name"));
}

}  // namespace ringcomm
