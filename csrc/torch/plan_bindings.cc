#include "torch/plan_bindings.h"

#include "plan/select.h"
#include "reduce/reduce.h"
#include "torch/errors.h"

namespace ringcomm {

namespace py = pybind11;

void bind_plans(py::module_& module) {
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
