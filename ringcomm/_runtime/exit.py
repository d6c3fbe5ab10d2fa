"""The end of a program that has not destroyed its groups.

Pending operations must end before Python does, because their tensors and callbacks are Python's.
The program's own handlers at exit may still use the groups.
"""

from __future__ import annotations

import atexit
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from ringcomm._runtime.lines import raised_at

LONGEST, MOMENT = 1.0, 0.02  # seconds for threads to return: for ours, and for the program's


def fatal_error() -> str:
    """Return the error that ends the program, as Python leaves it for handlers at exit; else "".

    It ends with the line of the program that raised it, so that the other ranks can tell it.
    """
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
    if error is None:
        return ""
    name = type(error).__name__
    try:
        text = str(error).partition("\n")[0]
        text.encode()
    except Exception:  # noqa: BLE001 - its __str__ raises, or yields no UTF-8
        return name
    at = raised_at(error.__traceback__)
    return f"{name}{f': {text}' if text else ''}{f' ({at})' if at else ''}"


class _Last:
    """A handler at exit that acts once all others have run.

    Python runs handlers in the opposite order of their registration, and ours is registered late:
    when the first group is made. But it lets go of all handlers together, after the last one has
    run and while threads still may take its lock. So the groups are closed as this one is
    released. A program that ends by an error closes them at once: no other rank shall wait until
    this one's handlers have returned.
    """

    def __init__(
        self, library: Any, before: Callable[[str], None], after: Callable[[], None]
    ) -> None:
        self.library, self.before, self.after, self.is_over = library, before, after, False

    def __call__(self) -> None:
        if fatal_error():
            self.close()
        else:
            self.is_over = True

    def __del__(self) -> None:
        if self.is_over:  # else the program has only forgotten its handlers
            self.close()

    def close(self) -> None:
        error = fatal_error()
        try:
            self.before(error)
        finally:
            self.library.close_groups(error)
            _let_threads_return()
            self.after()


def _let_threads_return() -> None:
    """Wait for threads that were in calls of the groups.

    They have to take Python's lock, and from the end of Python on a thread that takes it is ended
    on the spot. In the middle of a call into C++ that ends the whole program, by SIGABRT.
    """
    others = [t for t in threading.enumerate() if t is not threading.current_thread()]
    end = time.monotonic() + LONGEST
    for thread in others:
        if ask_to_end := getattr(thread, "ends_with_groups", None):
            ask_to_end()
            thread.join(max(0.0, end - time.monotonic()))
    if others:
        time.sleep(MOMENT)


_last: list[weakref.ref[_Last]] = []


def close_groups_with(
    library: Any, before: Callable[[str], None], after: Callable[[], None]
) -> None:
    """Have the library close all groups when the program ends.

    `before` is called before that, with the error that ends the program, or "", and `after` when
    all groups are closed.
    """
    if not _last or _last[0]() is None:
        last = _Last(library, before, after)
        _last[:] = [weakref.ref(last)]
        atexit.register(last)
