// What ringcomm.elastic needs of the engine, as Python sees it (ringcomm/_C.pyi).
#pragma once

#include <pybind11/pybind11.h>

namespace ringcomm {

void bind_elastic(pybind11::module_& module);

}  // namespace ringcomm
