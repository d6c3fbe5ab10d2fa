"""Trials of a world that is well: a single fault, and how soon its members go on after it."""

from __future__ import annotations

import random
from collections.abc import Callable

from lab.simulated_time import Owner
from lab.simulated_world import OPERATION, Course, is_member, require
from ringcomm.elastic import hang

HANG_SECONDS = 60.0  # within which a rank that hangs has ended
LAG_SECONDS = 3.0  # longer than a guest may give no sign of life
ENTER_SECONDS = 60.0  # within which all enter that are well
SLOW_STEP = 6.0  # seconds: longer than HUNG_AFTER, and not for USUAL_STEPS
# Seconds within which members go on that wait for a guest in trouble: sooner than an operation
# times out. One that makes no progress is given more time than one that gives no sign of life.
WAIT_FOR = {"frozen": 12.0, "stuck": OPERATION - 2.0}


class Trials:
    """The trials of one run, of which it makes one."""

    def __init__(
        self,
        course: Course,
        chance: random.Random,
        start: Callable[..., int],
        await_calm: Callable[[], None],
    ) -> None:
        """`start` starts a process; `await_calm` waits until all are members, and well."""
        self.course, self.chance = course, chance
        self._start, self._await_calm = start, await_calm

    def make_one(self) -> None:
        trial = self.chance.choice(
            (
                *(self.frozen, self.stuck, self.slow, self.faint, self.lags),
                *(self.hangs, self.computes, self.breaks),
            )
        )
        if not self._members() or self._is_doomed():
            return
        self.course.note(f"trial: {trial.__name__}")
        self.course.pause, self.course.applied_at = 0.0, self.course.time.now
        trial()

    def _members(self) -> list[Owner]:
        return [owner for owner in self.course.owners if owner.alive and is_member(owner)]

    def _is_doomed(self) -> bool:
        """Tell whether a process still has something in store for it that is no part of a trial."""
        return any(
            owner.acts >= 0
            or owner.more.fates
            or owner.more.hangs_at < float("inf")
            or (owner.more.world is not None and owner.more.world._leaving)
            for owner in self.course.owners
            if owner.alive
        )

    def _wait(self, until: Callable[[], bool], seconds: float) -> bool:
        began = self.course.time.now
        while not until() and self.course.time.now - began < seconds:
            self.course.time.sleep(0.5)
        return until()

    # ---- guests

    def frozen(self) -> None:
        self._let_in("frozen")

    def stuck(self) -> None:
        self._let_in("stuck")

    def slow(self) -> None:
        self._let_in("slow")

    def faint(self) -> None:
        self._let_in("faint")

    def _let_in(self, trouble: str) -> None:
        """A unit comes, and one of its ranks is in trouble as it takes the state."""
        for place in range(self.course.unit):
            self._start(fates=(trouble,) if place == 0 else ())
        self.course.time.sleep(5.0)
        self._await_calm()
        pause, most = self.course.pause, WAIT_FOR.get(trouble, float("inf"))
        require(pause < most, f"members wait {pause:.0f} s for a guest that is {trouble}")

    def lags(self) -> None:
        """Guests come, and the rank that looks at them sees the end of each operation late."""
        leads = [o for o in self._members() if o.more.world._changes.epochs.rank == 0]
        known, (leader, *_) = len(self.course.owners), leads or self._members()
        for _ in range(self.course.unit):
            self._start()
        leader.lag, events = LAG_SECONDS, len(self.course.events)
        self._wait(lambda: all(map(is_member, self.course.owners[known:])), ENTER_SECONDS)
        leader.lag = 0.0
        self._await_calm()
        failed = [event for event in self.course.events[events:] if "no sign of life" in event]
        require(not failed, f"a guest is given up that is well: {failed}")

    # ---- members

    def hangs(self) -> None:
        """A rank hangs, and others wait for it."""
        if (owner := self._slowable()) is None:
            return
        owner.more.hangs_at = self.course.time.now
        if self._wait(lambda: owner.more.hangs or not owner.alive, HANG_SECONDS):
            ended = self._wait(lambda: not owner.alive, HANG_SECONDS)
            require(ended, f"{owner.name} hangs, others have waited for it, and it does not end")
        self._await_calm()

    def computes(self) -> None:
        """A step takes long on one rank."""
        if (owner := self._slowable()) is None:
            return
        owner.more.slow = SLOW_STEP
        self.course.time.sleep(4 * SLOW_STEP)
        require(owner.alive, f"{owner.name} ends because it is slow")
        self._await_calm()

    def _slowable(self) -> Owner | None:
        """Return a member that others wait for, where all know how long a step takes."""
        members = self._members()
        steps = min(len(owner.more.world._progress._steps) for owner in members)
        if len(members) < 2 or steps < hang.FEWEST:
            return None
        return self.chance.choice(members)

    def breaks(self) -> None:
        """A member dies that has mates, and other units are whole."""
        owner = self.chance.choice(self._members())
        me, others = owner.more.world._changes.epochs.me, self._members()
        if len(others) < 2 * self.course.unit:
            return
        mates = [
            other
            for other in others
            if other is not owner and other.more.world._changes.epochs.me.unit == me.unit
        ]
        owner.more.supervised = True
        self.course.kill(owner)
        self.course.time.sleep(5.0)
        self._await_calm()
        for mate in mates if self.course.unit > 1 else ():
            require(mate.alive, f"{mate.name} ends because a rank of its unit died")
