"""Threads of simulated processes in virtual time: one runs at a time, and a seed orders them.

A thread gives the baton away only where it sleeps, and then time jumps to whichever is due next. So
a minute takes milliseconds, and a seed gives the same run each time. A process that dies unwinds by
`Killed` where it sleeps, and nothing that it calls on its way out has an effect.
"""

from __future__ import annotations

import heapq
import itertools
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SECONDS_TO_UNWIND = 60.0  # of a thread that was killed; a guard against one that never sleeps


class Killed(BaseException):
    """Unwinds the threads of a process that is dead."""


@dataclass(eq=False)
class Owner:
    """A simulated process, as the scheduler knows it."""

    name: str
    alive: bool = True
    stopped_until: float = 0.0
    acts: int = -1  # sleeps until it dies; -1: it lives
    lag: float = 0.0  # seconds by which it sees the end of an operation later than others
    slowness: float = 1.0  # how many times as long as it should one of its threads waits
    main_ends: bool = False  # its program has come to an end, however
    in_operation: bool = False
    ended_at: float = 0.0  # when its last operation ended
    dawdles: float = 0.0  # seconds by which its main thread goes on later after one that failed
    more: Any = None


class Event:
    """Stands in for threading.Event. One that waits wakes when its time is over, and not before."""

    def __init__(self, time: Time) -> None:
        self._time, self._is_set = time, False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True

    def clear(self) -> None:
        self._is_set = False

    def wait(self, seconds: float) -> bool:
        self._time.sleep(seconds * self._time.owner.slowness)
        return self._is_set


@dataclass(eq=False)
class Task:
    owner: Owner
    function: Callable[[], None]
    baton: Any = field(default_factory=lambda: threading.Semaphore(0))
    hurried: bool = False  # it waits for a store only a while: see `within`


class Time:
    """The clock, and who runs."""

    def __init__(self, seed: int) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self.current: Any = None  # the Task that runs
        self.errors: list[BaseException] = []
        self._due: list[tuple[float, int, Task]] = []
        self._count = itertools.count()
        self._threads: list[threading.Thread] = []
        self._over = False
        self._end = threading.Semaphore(0)
        self._until = 0.0

    def monotonic(self) -> float:
        return self.now

    @property
    def owner(self) -> Owner:
        owner: Owner = self.current.owner
        return owner

    def spawn(self, owner: Owner, function: Callable[[], None]) -> None:
        """Have a thread of that process run `function` from now on."""
        task = Task(owner, function)
        thread = threading.Thread(target=self._run, args=(task,), daemon=True)
        self._threads.append(thread)
        thread.start()
        self._add(task, self.now)

    def check(self) -> None:
        """Raise Killed in a thread of a process that is dead: what it does has no effect."""
        if self._over or not self.owner.alive:
            raise Killed

    def sleep(self, seconds: float) -> None:
        """Let the others run for so long. The process may be stopped for longer, or die."""
        self.check()
        task, owner = self.current, self.owner
        if owner.acts >= 0:
            owner.acts -= 1
            owner.alive = owner.acts >= 0
        self._add(task, self.now + max(0.0, seconds))
        if (following := self._next()) is not task:
            self._give(following)
            task.baton.acquire()
            self.current = task
        self.check()

    def run(self, until: float) -> None:
        """Let all threads run until that time, and unwind them then. Raises what one raised."""
        self._until = until
        self._give(self._next())
        self._end.acquire()
        self._over = True
        for _, _, task in self._due:
            task.baton.release()
        for thread in self._threads:
            thread.join(SECONDS_TO_UNWIND)
            if thread.is_alive():
                raise RuntimeError(f"a thread does not end after {self.now:.1f} s")
        if self.errors:
            raise self.errors[0]

    def stop(self) -> None:
        """Have `run` end as soon as this thread sleeps or ends."""
        self._until = -1.0

    def _add(self, task: Task, due: float) -> None:
        heapq.heappush(self._due, (due, next(self._count), task))

    def _next(self) -> Task | None:
        """Return whose turn it is, and let time go on to there; None at the end."""
        while self._due and self._due[0][0] <= self._until and not self.errors:
            due, _, task = heapq.heappop(self._due)
            if task.owner.alive and task.owner.stopped_until > due:
                self._add(task, task.owner.stopped_until)
                continue
            self.now = max(self.now, due)
            return task
        return None

    def _give(self, following: Task | None) -> None:
        (following.baton if following else self._end).release()

    def _run(self, task: Task) -> None:
        task.baton.acquire()
        self.current = task
        try:
            self.check()
            task.function()
        except Killed:
            pass
        except BaseException as error:  # noqa: BLE001 - raised by `run`
            self.errors.append(error)
        if not self._over:
            self._give(self._next())
