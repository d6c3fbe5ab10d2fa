"""How processes that wait at a store know whether a world still runs.

A member's process can be looked at from its own host only. So members that end say so in the store;
and the one that leads counts up there once a second. Where the count stands still for long, the
world has lost its lease: those that wait may found another one. If it runs after all, cut off from
the store, it stops as soon as it reaches it again. Where nobody has founded another one, as too few
have waited, it takes back that it is lost.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from ringcomm.elastic.process import Process

LOOK_SECONDS = 1.0
GONE, ENDED = "1", "ended"  # of a process: for whatever reason; at the end of its program


def beat(keys: Any, life: int, members: Sequence[Process]) -> bool:
    """Say that the world of that life runs; returns whether another one was founded since.

    The first of its members does so.
    """
    keys.add(f"alive/{life}", 1)
    if keys.check([f"over/{life}"]):
        return True
    take_back(keys, members)
    return False


def take_back(keys: Any, members: Sequence[Process]) -> None:
    """Take back that a world is lost, if its lease has lapsed: the first of its members lives.

    Should others have died, that is forgotten, too. If all do, the lease lapses once more.
    """
    if keys.check([f"dead/{members[0].uuid}"]):
        for process in members:
            keys.delete_key(f"dead/{process.uuid}")


def succeed(keys: Any, life: int) -> None:
    """Have the world of that life stop, should it run."""
    keys.set(f"over/{life}", "1")


def tell_end(keys: Any, process: Process, well: bool) -> None:
    """Say that a process is in no world any more; `well`: its program came to its end."""
    with contextlib.suppress(RuntimeError):
        keys.set(f"dead/{process.uuid}", ENDED if well else GONE)


def are_gone(keys: Any, processes: Sequence[Process]) -> bool:
    """Tell whether all are known to be gone, by themselves or by any process that waits."""
    names = [f"dead/{process.uuid}" for process in processes]
    for name, process in zip(names, processes, strict=True):
        if process.is_dead() and not keys.check([name]):
            keys.set(name, GONE)
    return not names or bool(keys.check(names))


def give_up(keys: Any, members: Sequence[Process]) -> None:
    """Say that a world is taken to be lost, or that another has its place."""
    for process in members:
        keys.set(f"dead/{process.uuid}", GONE)


def were_given_up(keys: Any, members: Sequence[Process]) -> bool:
    """Tell whether any of a world that runs was taken for dead, as when its lease has lapsed."""
    return any(keys.check([f"dead/{process.uuid}"]) for process in members)


def have_ended(keys: Any, processes: Sequence[Process]) -> bool:
    """Tell whether the programs of all came to their end. They are gone, or were taken to be."""
    names = [f"dead/{process.uuid}" for process in processes]
    return bool(keys.check(names)) and all(keys.get(name) == ENDED.encode() for name in names)


class Lapse:
    """Watches the count of a world, on behalf of a process that waits."""

    def __init__(self, seconds: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`seconds`: how long the count may stand still; None: for ever."""
        self._seconds, self._clock = seconds, clock
        self._seen: tuple[int, bytes] | None = None  # the life, and its count
        self._since = self._looked = 0.0

    @classmethod
    def of(cls, lease: timedelta | None) -> Lapse:
        """Make it by an argument of `join`."""
        if lease is not None and lease < timedelta(seconds=1):
            raise ValueError(f"lease={lease}: at least a second, or None for no end")
        return cls(lease.total_seconds() if lease else None)

    def is_due(self) -> bool:
        """Tell whether it is time for another look."""
        first = self._seen is None
        return self._seconds is not None and (first or self._clock() - self._looked >= LOOK_SECONDS)

    def look(self, keys: Any, life: int, members: Sequence[Process]) -> bool:
        """Tell whether a world's lease has lapsed; its members are written down as gone then."""
        now = self._looked = self._clock()
        if self._seconds is None:
            return False
        key = f"alive/{life}"
        seen = life, keys.get(key) if keys.check([key]) else b""
        if seen != self._seen:
            self._seen, self._since = seen, now
        if now - self._since < self._seconds:
            return False
        give_up(keys, members)
        return True
