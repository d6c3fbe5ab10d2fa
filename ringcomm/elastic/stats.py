"""The figures of a world, as one of its ranks knows them: `World.stats()`.

`History` keeps what changes leave behind. The main thread writes it and others read it, so lists
are replaced here and never altered.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypedDict

from ringcomm.elastic.agreement import ENDED, SILENT
from ringcomm.elastic.epochs import Epochs
from ringcomm.elastic.process import Process

# Why a member is gone, beside the reasons of agreement.py.
LEFT = "left"  # by a signal, a notice or world.leave()
HUNG = "hung"  # it made no progress in a step, and ended itself
TIMED_OUT = "timed out"  # an operation waited for it for too long
DIFFERS = "differs"  # its state or its program was not the others'
NOT_ENTERED = "did not enter"  # it was lost while it joined
UNKNOWN = "unknown"  # the others decided so, and this rank was not told why
KEPT = 200  # changes
RECENT = 11  # looks, a second apart
POINTS = 512  # of the steps over time


class Place(TypedDict):
    """A process of the world."""

    uuid: str
    host: str
    pid: int


class Lost(Place):
    """A process that is gone, and why: LEFT, ENDED and so on."""

    why: str


class PastChange(TypedDict):
    """A change of the world. `at` is when its new group worked, in seconds since 1970.

    `seconds`: from the failure, or the vote, until then.
    """

    epoch: int
    step: int
    at: float
    size: int
    lost: list[Lost]
    joined: list[Place]
    seconds: float


class Checkpoint(TypedDict):
    """A checkpoint, and when it was written, in seconds since 1970."""

    step: int
    path: str
    at: float


class Totals(TypedDict):
    """Sums over the changes that this rank knows of."""

    changes: int
    """How many there were."""
    lost: int
    """Members that are gone, for any reason."""
    joined: int
    """Members that came after the beginning."""
    seconds_lost: float
    """Time from failures, or votes, until the next group worked, without repeated steps."""


class Stats(Totals):
    """The figures of a world, from `World.stats`. Times are seconds."""

    epoch: int
    """How often the members have agreed on a change: a rank that joins takes two."""
    step: int
    """How many steps were applied since the beginning of the training."""
    steps_per_second: float
    """The pace of the last ten seconds, with all failures and pauses."""
    members: list[Place]
    """By rank."""
    guests: list[Place]
    """The processes that are getting the state, to become members."""
    aborted: int
    """Steps that did not count, and that this rank computed again."""
    steps_lost: int
    """Steps that this rank had applied and that were taken back: see `restored`. Else always 0."""
    change_seconds: float
    """The last change, from the failure or the vote until the next group worked."""
    agree_seconds: float
    """The part of it in which the members agreed."""
    regroup_seconds: float
    """The part of it in which they made the next group."""
    give_seconds: float
    """How long it took to give the state to the last guests."""
    sent_bytes: int
    """The state that this rank has sent to guests so far."""
    checkpoint: Checkpoint | None
    """The newest one that this rank knows of. Only rank 0 writes them, or one for each shard."""
    checkpoint_failures: int
    """Checkpoints that this rank could not write."""
    restored: str
    """How the last unit of sharded ranks went back to an earlier step, in a sentence; "": never."""
    history: list[PastChange]
    """The last 200 changes, by time."""


class HasPlace(Protocol):
    @property
    def uuid(self) -> str: ...
    @property
    def host(self) -> str: ...
    @property
    def pid(self) -> int: ...


def place(process: HasPlace) -> Place:
    return {"uuid": process.uuid, "host": process.host, "pid": process.pid}


def sums(changes: Iterable[PastChange], sign: int = 1) -> Totals:
    """Return the sums over changes, or what is to be taken away from sums."""
    listed = list(changes)
    lost = sum(lost["why"] != NOT_ENTERED for change in listed for lost in change["lost"])
    return {
        "changes": sign * len(listed),
        "lost": sign * lost,
        "joined": sign * sum(len(change["joined"]) for change in listed),
        "seconds_lost": sign * sum(change["seconds"] for change in listed),
    }


def added(before: Totals, more: Totals) -> Totals:
    return {
        "changes": before["changes"] + more["changes"],
        "lost": before["lost"] + more["lost"],
        "joined": before["joined"] + more["joined"],
        "seconds_lost": before["seconds_lost"] + more["seconds_lost"],
    }


@dataclass
class History:
    """The changes of a world and the time that they took, since this process is in it."""

    clock: Callable[[], float] = time.monotonic
    began: float = field(default_factory=time.time)
    entered: int = 0  # the epoch of this process's first group
    changes: list[PastChange] = field(default_factory=list)
    totals: Totals = field(default_factory=lambda: sums([]))
    aborted: int = 0
    steps_lost: int = 0
    restored: str = ""
    agree_seconds: float = 0.0
    regroup_seconds: float = 0.0
    give_seconds: float = 0.0
    sent_bytes: int = 0
    checkpoint: Checkpoint | None = None  # that another rank of this host has written
    reasons: dict[str, str] = field(default_factory=dict)  # by uuid, for the next change
    unsure: list[Lost] = field(default_factory=list)  # their processes ended: they may have hung
    recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RECENT))
    points: list[tuple[float, int]] = field(default_factory=list)  # the time, and the step
    spacing: float = 1.0  # seconds between points

    # ---- changes

    def expect(self, why: str, uuids: Iterable[str]) -> None:
        """Note why these will be gone with the next change."""
        self.reasons |= dict.fromkeys(uuids, why)

    def explain(
        self, lost: Iterable[Process], fates: dict[str, str], guests: set[str], late: bool
    ) -> None:
        """Note why each is gone. `late`: an operation of this rank has waited for too long."""
        for process in lost:
            fate = fates.get(process.uuid, ENDED if process.is_dead() else UNKNOWN)
            if process.uuid in guests and process.uuid not in fates:
                fate = NOT_ENTERED
            why = TIMED_OUT if late and fate == SILENT else fate
            self.reasons.setdefault(process.uuid, why)

    def add(self, change: PastChange) -> None:
        self.changes = [*self.changes, change][-KEPT:]
        self.totals = added(self.totals, sums([change]))
        self.unsure += [lost for lost in change["lost"] if lost["why"] == ENDED]
        self.reasons = {}

    def ask_why(self, has_hung: Callable[[str], bool]) -> None:
        """Correct the reasons of those that ended because they hung; raises as `has_hung` does."""
        while self.unsure:
            lost = self.unsure[0]
            if has_hung(lost["uuid"]):
                lost["why"] = HUNG
            self.unsure.pop(0)

    def adopt(self, earlier: Stats, points: list[tuple[float, int]], began: float) -> None:
        """Take over what another member has written down of the time before this process came."""
        self.checkpoint = earlier["checkpoint"]
        if self.entered == 0:  # a founder knows the rest
            return
        before = [change for change in earlier["history"] if change["epoch"] <= self.entered]
        both = [change for change in earlier["history"] if change["epoch"] > self.entered]
        self.totals = added(added(self.totals, earlier), sums(both, -1))
        self.changes = [*before, *self.changes][-KEPT:]
        self.points = [*(point for point in points if point[0] < self.began), *self.points]
        self.began = min(began, self.began)

    # ---- steps over time

    def sample(self, at: float, step: int) -> None:
        """Note which step the training is at. Called once a second, `at` in seconds since 1970."""
        self.recent.append((self.clock(), step))
        if self.points and at - self.points[-1][0] < self.spacing - 0.5:
            return
        self.points = [*self.points, (at, step)]
        if len(self.points) > POINTS:
            self.points, self.spacing = self.points[::2], self.spacing * 2

    def rate(self, step: int) -> float:
        """Return how many steps a second were made in the last ten seconds."""
        began = next(iter(self.recent), None)
        passed = self.clock() - began[0] if began else 0.0
        return (step - began[1]) / passed if began and passed > 0 else 0.0


def stats_of(
    history: History,
    epochs: Epochs | None,
    step: int,
    checkpoint: Checkpoint | None,
    checkpoint_failures: int,
) -> Stats:
    """Return the figures of a world; `epochs` is None before this process is in one."""
    return {
        **history.totals,
        "epoch": epochs.epoch if epochs else 0,
        "step": step,
        "steps_per_second": history.rate(step),
        "members": [place(process) for process in epochs.members] if epochs else [],
        "guests": [place(process) for process in epochs.guests] if epochs else [],
        "aborted": history.aborted,
        "steps_lost": history.steps_lost,
        "change_seconds": history.changes[-1]["seconds"] if history.changes else 0.0,
        "agree_seconds": history.agree_seconds,
        "regroup_seconds": history.regroup_seconds,
        "give_seconds": history.give_seconds,
        "sent_bytes": history.sent_bytes,
        "checkpoint": checkpoint or history.checkpoint,
        "checkpoint_failures": checkpoint_failures,
        "restored": history.restored,
        "history": history.changes,
    }
