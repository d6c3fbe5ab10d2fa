"""Signs of life of a process that enters a world, without which its members do not wait for it.

All members stand still while a guest gets the state. So the guest counts up in the store: a thread
does, which stands still where the process is stopped, frozen or killed, and goes on where it is
slow. Rank 0 looks at the counts, and gives the guests up if one is silent, or makes no progress.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ringcomm._runtime.process import say

if TYPE_CHECKING:
    from ringcomm.elastic.process import Process

BEAT_SECONDS = 0.05  # between two signs of life, and between two looks
MISSED = 6  # looks in a row without a sign: not seconds, for a busy machine delays both sides
TRIPS = 8  # round trips to the store that a guest needs before its first sign, and more
MOST_DOUBLINGS = 6  # of all that, for a process that was given up before
STEP = 1 << 32  # a piece of the state, in a count whose lower half has the signs of life
# How long a guest may live without progress: seconds, and bytes of the state a second, to load it.
STILL_SECONDS, STILL_RATE = 10.0, 20e6


def _key(uuid: str) -> str:
    return f"pulse/{uuid}"


class Pulse:
    """The signs of life of this process, from now until `end`."""

    def __init__(self, keys: Any, uuid: str) -> None:
        """`keys` are those of the store; `uuid` is the name by which this process was called."""
        self._keys, self._key, self._steps = keys, _key(uuid), 0
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="ringcomm elastic pulse").start()

    def step(self) -> None:
        """Tell of progress with the next sign."""
        self._steps += 1

    def end(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        told = 0
        with contextlib.suppress(RuntimeError):  # of the store: then the members give up
            while not self._ended.is_set() and threading.main_thread().is_alive():
                steps = self._steps
                self._keys.add(self._key, 1 + (steps - told) * STEP)
                told = steps
                self._ended.wait(BEAT_SECONDS)


class Signs:
    """The signs of one guest as they are seen, look by look."""

    def __init__(
        self, failures: int, trip: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`trip`: seconds of its round trips to the store.

        `failures`: how often it was given up before; it lived, so it is given more time.
        """
        most = MISSED + math.ceil(TRIPS * trip / BEAT_SECONDS)
        self._most = most << min(failures, MOST_DOUBLINGS)
        self._clock = clock
        self._count, self._missed = 0, 0
        self.moved = clock()  # when there was progress

    def fault(self, count: int, state_bytes: int) -> str:
        """Note a look at its count; returns why it is to be given up, or ""."""
        self._missed = self._missed + 1 if count == self._count else 0
        if count // STEP != self._count // STEP:
            self.moved = self._clock()
        self._count, still = count, self._clock() - self.moved
        if self._missed >= self._most:
            return "gives no sign of life"
        if still > STILL_SECONDS + state_bytes / STILL_RATE:
            return f"lives, and makes no progress for {still:.0f} s"
        return ""


class Pulses:
    """The pulses of an epoch's guests, as rank 0 looks at them, for all members."""

    def __init__(
        self,
        keys: Any,
        epoch: str,
        guests: Sequence[tuple[Process, int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`guests` come with their failures so far; `epoch` is a name that no other epoch has."""
        self._keys, self._epoch = keys, epoch
        self._guests = [(guest, Signs(failures, guest.trip, clock)) for guest, failures in guests]
        self.state_bytes = 0  # of the state that they load

    def fault(self) -> str:
        """Look once; returns why the guests are to be given up, or "". The others hear of it."""
        for guest, signs in self._guests:
            count = int(self._keys.add(_key(guest.uuid), 0))
            if fault := signs.fault(count, self.state_bytes):
                fault = f"{guest.host} process {guest.pid} {fault} while it enters"
                say(f"elastic: {fault}")
                self._keys.set(f"given-up/{self._epoch}", fault)
                return fault
        self._move_together()
        return ""

    def _move_together(self) -> None:
        """Have the progress of one guest be that of all: those that are ready wait for others."""
        moved = max((signs.moved for _, signs in self._guests), default=0.0)
        for _, signs in self._guests:
            signs.moved = moved


def heard(keys: Any, epoch: str) -> str:
    """Return what rank 0 has said of the epoch's guests: why they are given up, or ""."""
    key = f"given-up/{epoch}"
    return keys.get(key).decode() if keys.check([key]) else ""


class Guard:
    """Ends what waits for the guests of an epoch when they are to be given up, until `end`.

    A message to a guest waits for that alone, so each member has one.
    """

    def __init__(self, fault: Callable[[], str], give_up: Callable[[], None]) -> None:
        """Begin. `fault` tells why, or ""; `give_up` ends the operations that are under way.

        A thread calls both. Where no operation is under way yet, `check` tells.
        """
        self._look, self._give_up = fault, give_up
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._fault = ""
        threading.Thread(target=self._run, name="ringcomm elastic guard").start()

    def check(self) -> None:
        """Raise DistBackendError if the guests were given up."""
        if self._fault:
            raise dist.DistBackendError(self._fault)

    def end(self) -> None:
        """Give up nobody from now on."""
        with self._lock:
            self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(BEAT_SECONDS) and threading.main_thread().is_alive():
            try:
                fault = self._look()
            except RuntimeError as error:
                fault = f"the store does not tell whether the guests live: {error}"
            if fault:
                with self._lock:
                    if not self._ended.is_set():
                        self._fault = fault
                        self._give_up()
                return
