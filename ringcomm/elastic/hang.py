"""A rank that hangs ends itself, so that the others go on without it and it can be started anew.

Nobody else can tell a rank that hangs from one that computes for long. So each rank watches itself,
in a thread: while a step is under way, or its batches are being loaded, its main thread has to come
by one place or another, or an operation has to end. If none does for long, and others have waited
for as long, it hangs. A rank that waits in an operation waits for others, and says so in the store;
those that only wait do not hang, and no rank does while nobody waits for it: all may be compiling.
The end of any operation counts, because no rank that is well may end: a rank whose other threads go
on with operations is left to the others, whose own will time out. If its steps usually
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
    """Tell whether a collective of this rank waits for others, and when its last operation ended.

    As far as its flight records say; the time is that of `time.monotonic()`. Where a group fails,
    its operations end a moment later, and wait until then.
    """
    waits, ended = False, 0
    for ring in load_library().flight_rings():
        for operation in read_ring(ring, newest=NEWEST).operations:
            ended = max(ended, operation.ended_ns or 0)
            waits |= operation.ended_ns is None and not operation.is_message
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
        self._met = float("-inf")  # when its main thread was last seen to meet others
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
        if meets := self._meets():
            self._met = now
        if not self._progress.still_for(usually=False):
            return
        key, (waits, ended) = f"waits/{place}", operations()
        if waits or meets:
            if self._told != key and self._progress.still_for():
                within(lambda: keys.set(key, "1"))
                self._told = key
            return
        # Time that it spent waiting was the others'. They came, or ended, so its main thread is
        # about to go on, and the key may be this rank's own.
        still_for = partial(self._progress.still_for, after=max(ended, self._met))
        if not still_for(usually=False):
            return
        waited = bool(still_for()) and within(lambda: keys.check([key]))
        # The store took its time, in which the main thread may have gone on.
        if (waited or is_left()) and (seconds := still_for(usually=waited)):
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
