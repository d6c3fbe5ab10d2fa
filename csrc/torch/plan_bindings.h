// The core seen from Python, for the benchmarks and the tests.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace ringcomm {

void bind_plans(pybind11::module_& module);

}  // namespace ringcomm
