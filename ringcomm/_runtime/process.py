"""The state of this process: the settings of its first group, and lines on stderr."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from typing import Any

from ringcomm.options import ATTRIBUTES, LEVELS

configured: Any = None  # the Options of this process's first group


def setting(name: str) -> Any:
    """Return the value in this process: as code has set it, else the variable."""
    return ATTRIBUTES[name].read() if configured is None else getattr(configured, name)


def say(text: str, level: str = "warning") -> None:
    """Write a line to stderr, as the library does, unless code or RINGCOMM_LOG asks for less.

    It never raises, nor waits for a reader that has stopped.
    """
    given = configured is not None and "log" in configured._given
    least = str(configured.log) if given else os.environ.get("RINGCOMM_LOG")
    if least in LEVELS[LEVELS.index(level) + 1 :]:
        return
    # One call, so that lines of several ranks do not mix. Their reader may have gone.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        if sys.stderr is sys.__stderr__:  # else it is something of the program's
            poll = select.poll()
            poll.register(sys.stderr.fileno(), select.POLLOUT)
            if [event for _, event in poll.poll(100)] != [select.POLLOUT]:
                return
        sys.stderr.write(f"ringcomm {text}\n")


def _forget() -> None:
    global configured
    configured = None  # a forked child makes groups, and a network, of its own


os.register_at_fork(after_in_child=_forget)
