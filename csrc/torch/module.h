// The parts of the Python module ringcomm._C that have files of their own.
#pragma once

#include <pybind11/pybind11.h>

#include <vector>

namespace ringcomm {

// What ringcomm.elastic needs of the engine, as Python sees it (ringcomm/_C.pyi).
void bind_elastic(pybind11::module_& module);

// Threads, by their ids, that are in Python code of the user's while Python ends. Until 3.13 it
// ends such a thread when that next asks for Python's lock, by unwinding its stack; there are
// destructors on the way, from which nobody may leave like that, and the process would be aborted.
// So they stay where they are for good. The caller has Python's lock: none of them does.
void park(const std::vector<int>& threads);

}  // namespace ringcomm
