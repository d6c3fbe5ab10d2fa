// Threads that are still in Python code of the user's while Python ends.
#pragma once

#include <vector>

namespace ringcomm {

// Stops threads, by their ids, that are in Python code of the user's while Python ends: they stay
// where they are for good. Until 3.13 Python ends such a thread by unwinding its stack when it next
// asks for Python's lock. There are destructors on the way, from which nobody may leave like that,
// and the process would be aborted. The caller has Python's lock: none of the threads does.
void park(const std::vector<int>& threads);

}  // namespace ringcomm
