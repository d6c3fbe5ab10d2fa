"""A rank that hangs ends itself, so that the others go on without it and it can be started anew.

Nobody else can tell a rank that hangs from one that computes for long. So each rank watches itself,
in a thread: while a step is under way, or its batches are being loaded, its main thread has to come
by one place or another. If it does not for long, and others have waited for as long, it hangs. A
rank that waits in an operation waits for others, and says so in the store; those that only wait do
not hang, and no rank does while nobody waits for it: all may be compiling. If its steps usually
take long, the others may give up waiting first, and go on without it; then it ends as well.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from ringcomm._flight.recorder import stacks_of_threads
from ringcomm._flight.records import read_ring
from ringcomm._runtime.library import load_library
from ringcomm.elastic.store import within

USUAL_STEPS = 20  # a step that takes so many times as long as the usual one is no longer slow
FEWEST = 10  # steps, before their usual time is known: the first ones compile
REMEMBERED = 50
NEWEST = 8  # operations that are looked at
STOPPED_SECONDS = 5.0  # without a look: the process was stopped, or the store was slow


class Progress:
    """The main thread's way through the steps of a training. Other threads read it."""

    def __init__(self, least: float | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`least`: seconds without progress that are none too many in any case; None: no end."""
        self._least, self._clock = least, clock
        self._since: float | None = None  # the last progress; None: the program does what it likes
        self._began = 0.0
        self._steps: deque[float] = deque(maxlen=REMEMBERED)

    @classmethod
    def of(cls, hung_after: timedelta | None) -> Progress:
        """Make it by an argument of `join`."""
        if hung_after is not None and hung_after <= timedelta(0):
            raise ValueError(f"hung_after={hung_after}: give a time, or None for never")
        return cls(hung_after.total_seconds() if hung_after else None)

    def begin(self) -> None:
        """A step begins, or the loading of its batches does."""
        self._began = self._since = self._clock()

    def move(self) -> None:
        """Come by, within a step."""
        if self._since is not None:
            self._since = self._clock()

    def end(self, counted: bool = False) -> None:
        """The program goes on on its own."""
        if counted and self._since is not None:
            self._steps.append(self._clock() - self._began)
        self._since = None

    def pass_over(self, seconds: float) -> None:
        """Count no time in which the whole process was stopped."""
        if self._since is not None:
            self._since += seconds

    def still_for(self, usually: bool = True, after: float = float("-inf")) -> float:
        """Return how long there was no progress, if that is too long, else 0.

        `usually`: too long for steps that take as long as these usually do. No time before `after`
        counts.
        """
        since = self._since
        if self._least is None or since is None or (usually and len(self._steps) < FEWEST):
            return 0.0
        seconds = self._clock() - max(since, after)
        usual = statistics.median(tuple(self._steps)) if usually else 0.0
        return seconds if seconds > max(self._least, USUAL_STEPS * usual) else 0.0


def operations() -> tuple[bool, float]:
    """Tell whether a collective of this rank waits for others, and when the last one ended.

    It is as far as the records say, by `time.monotonic()`.
    """
    waits, ended = False, 0
    for ring in load_library().flight_rings():
        record = read_ring(ring, newest=NEWEST)
        for operation in record.operations:
            ended = max(ended, operation.ended_ns or 0)
            is_under_way = operation.state in ("queued", "running")
            waits |= is_under_way and not (operation.is_message or record.failure)
    return waits, ended * 1e-9


class Hang:
    """A rank's part in a hang: it says that it waits, or it ends itself."""

    def __init__(
        self,
        progress: Progress,
        meets: Callable[[], bool],
        uuid: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`meets`: whether the main thread waits for others to agree on a change."""
        self._progress, self._meets, self._uuid = progress, meets, uuid
        self._clock, self._looked = clock, clock()
        self._waited = float("-inf")  # when it last waited for a change
        self._told = ""

    def look(self, keys: Any, place: str, is_left: Callable[[], bool] = lambda: False) -> None:
        """Look once. Ends the process if it hangs.

        `keys` are those of the store; `place`, the epoch and the commits so far, is that of all
        whose step this rank is in. `is_left` tells whether the others have gone on without it.
        Raises dist.DistStoreError where the store does not answer.
        """
        now = self._clock()
        since, self._looked = now - self._looked, now
        if since > STOPPED_SECONDS:
            self._progress.pass_over(since)
        if self._meets():
            self._waited = now
        if not self._progress.still_for(usually=False):
            return
        key, (waits, ended) = f"waits/{place}", operations()
        if waits or self._waited == now:
            if self._told != key and self._progress.still_for():
                within(lambda: keys.set(key, "1"))
                self._told = key
            return
        # The time it waited was the others'. Their coming, or their end, has ended the wait, and
        # the main thread is about to go on; the key may be this rank's own.
        still_for = partial(self._progress.still_for, after=max(ended, self._waited))
        seconds = still_for(usually=False)
        waited = bool(still_for()) and within(lambda: keys.check([key]))
        if seconds and (waited or is_left()) and still_for(usually=waited):
            with contextlib.suppress(dist.DistError):
                within(lambda: keys.set(hung(self._uuid), "1"))  # the others see why it is gone
            end_of_a_hang(seconds, "waited for it" if waited else "gave it up")


def hung(uuid: str) -> str:
    """Return the key by which a process says that it ends because it hung."""
    return f"hung/{uuid}"


def end_of_a_hang(seconds: float, meanwhile: str) -> None:
    """Write the stacks of this process, and end it. `meanwhile`: the others' part."""
    text = (
        f"ringcomm ERROR elastic: this rank (process {os.getpid()}) has hung for {seconds:.0f} s "
        f"while others {meanwhile}: it ends itself; start it anew to join. Its stacks:\n"
    )
    sys.stderr.flush()
    os.write(2, text.encode() + stacks_of_threads())
    os._exit(1)
