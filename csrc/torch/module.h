// The part of the Python module ringcomm._C that has a file of its own.
#pragma once

#include <pybind11/pybind11.h>

namespace ringcomm {

// Binds what ringcomm.elastic needs of the engine, as Python sees it (ringcomm/_C.pyi).
void bind_elastic(pybind11::module_& module);

}  // namespace ringcomm
