"""Whether the process that made a flight record still lives.

Only the host on which it ran can tell: numbers of processes mean nothing elsewhere, nor in another
container, nor after a restart of the host. This module needs neither torch nor the library.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MOST = 4096  # bytes of what a record says of its process


class Life(enum.Enum):
    """Tells whether a process still lives, as far as that is known."""

    LIVES = "lives"
    GONE = "gone"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Process:
    """A process, told apart from later ones that get the same number."""

    pid: int
    boot: str = ""  # the kernel's start; "": not known
    numbers: str = ""  # whose numbers `pid` is one of: the namespace
    started: str = ""  # in ticks since then
    snapshot: bool = field(default=False, compare=False)  # it went on after the record was made


def here() -> tuple[str, str]:
    """Return the boot and the namespace of this process."""
    boot = numbers = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        numbers = str(Path("/proc/self/ns/pid").readlink())
    return boot, numbers


def start_of(pid: int) -> str:
    """Return when a process of this host started. Raises OSError; "" for one that has ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return "" if fields[0] in ("Z", "X") else fields[19]


def this_process(*, snapshot: bool = False) -> Process:
    with contextlib.suppress(OSError):
        return Process(os.getpid(), *here(), start_of(os.getpid()), snapshot)
    return Process(os.getpid())


def written(process: Process) -> bytes:
    """Return what stands at the end of a record, for `read`."""
    known = {key: getattr(process, key) for key in ("boot", "numbers", "started", "snapshot")}
    return json.dumps(known).encode()


def read(pid: int, data: bytes) -> Process:
    """Read the end of a record; older ones say nothing there."""
    try:
        known: Any = json.loads(data[:MOST])
        boot, numbers, started = (str(known[key]) for key in ("boot", "numbers", "started"))
        return Process(pid, boot, numbers, started, bool(known["snapshot"]))
    except (ValueError, TypeError, LookupError, RecursionError):
        return Process(pid)


def is_stopped(process: Process) -> bool:
    """Tell whether a process that lives on this host is stopped, by a signal or a debugger."""
    try:
        stat = Path(f"/proc/{process.pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[:1] in (["T"], ["t"]) and life_of(process) == Life.LIVES


def life_of(process: Process) -> Life:
    known = process.boot and process.numbers and process.started
    if not known or (process.boot, process.numbers) != here():
        return Life.UNKNOWN
    try:
        os.kill(process.pid, 0)  # some hosts show only the processes of one user in /proc
    except (ProcessLookupError, OverflowError):
        return Life.GONE
    except OSError:
        pass  # somebody else's
    try:
        return Life.LIVES if start_of(process.pid) == process.started else Life.GONE
    except (OSError, IndexError):
        return Life.UNKNOWN
