// The end of a program whose callbacks are not over.
#pragma once

#include <vector>

namespace ringcomm {

// Threads, by their ids, that are in Python code of the user's while Python ends. Until 3.13 it
// ends such a thread when that next asks for Python's lock, by unwinding its stack; there are
// destructors on the way, from which nobody may leave like that, and the process would be aborted.
// So they stay where they are for good. The caller has Python's lock: none of them does.
void park(const std::vector<int>& threads);

}  // namespace ringcomm
