"""Trials of a world that is well: a single fault, and how soon its members go on after it."""

from __future__ import annotations

import random
from collections.abc import Callable

from lab.simulated_time import Owner
from lab.simulated_world import (
    OPERATION,
    Course,
    is_member,
    leaders_unit,
    place_of,
    process_of,
    require,
)
from ringcomm.elastic import hang

DAWDLES = 2.0  # seconds: longer than between two looks of the thread that watches the main one
HANG_SECONDS = 60.0  # within which a rank that hangs has ended
LAG_SECONDS = 3.0  # longer than a guest may give no sign of life
MODEL_SECONDS = 15.0  # longer than a newcomer waits for a place
ENTER_SECONDS = 60.0  # within which all enter that are well
SLOW_STEP = 6.0  # seconds: longer than HUNG_AFTER, and not for USUAL_STEPS
COMPILING_STEP = 16.0  # and this is longer than USUAL_STEPS: nobody waits for the others then
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
                *(self.hangs, self.computes, self.breaks, self.hands_over, self.outlives),
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
        members, known = self._members(), len(self.course.owners)
        leader = [*leaders_unit(members), *members][0]
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
        for other in self.course.owners:
            other.dawdles = DAWDLES
        if self._wait(lambda: owner.more.hangs or not owner.alive, HANG_SECONDS):
            ended = self._wait(lambda: not owner.alive, HANG_SECONDS)
            require(ended, f"{owner.name} hangs, others have waited for it, and it does not end")
        self._await_calm()

    def computes(self) -> None:
        """A step takes long on a rank, or very long on all, as when they compile."""
        if (owner := self._slowable()) is None:
            return
        alone = self.chance.random() < 0.5
        slow = [owner] if alone else self._members()
        same = 1 + max(owner.more.world.step_number for owner in slow)  # that none has begun
        for owner in slow:
            owner.more.slow_after = same
            owner.more.slow = SLOW_STEP if alone else COMPILING_STEP
        self.course.time.sleep(2 * COMPILING_STEP)
        for owner in slow:
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
        """A member dies that has mates, and other units are whole. It is started anew.

        Or another comes in its place, before the members know that it has died.
        """
        members, owners = self._members(), self.course.owners
        if self.course.unit == 1 or len(members) < 2 * self.course.unit or self._waiting():
            return
        owner = self.chance.choice([owner for owner in members if place_of(owner) > 0])
        unit, known = process_of(owner).unit, len(owners)
        mates = [o for o in members if o is not owner and process_of(o).unit == unit]
        owner.more.supervised = self.chance.random() < 0.3
        if not owner.more.supervised:
            self._start()
            self.course.time.sleep(self.chance.uniform(0.1, 0.4))
        self.course.kill(owner)
        self.course.time.sleep(5.0)
        for mate in mates:
            require(mate.alive, f"{mate.name} ends because a rank of its unit died")
        entered = self._wait(lambda: all(map(is_member, mates + owners[known:])), ENTER_SECONDS)
        require(entered, "a unit that lost a rank does not come in again with another")

    def hands_over(self) -> None:
        """The unit dies that leads, as a newcomer makes its model for the place that it was given.

        The others of its unit come then, and get the other places.
        """
        owners, unit = self.course.owners, self.course.unit
        if unit == 1 or len(self._members()) < 2 * unit or self._waiting():
            return
        if any(owner.more.world._store.address for owner in self._members()):
            return  # one of them serves the store, and those that wait there would end with it
        known = len(owners)
        self._start(model=MODEL_SECONDS)
        if not self._wait(lambda: place_of(owners[known]) >= 0, ENTER_SECONDS):
            return
        for owner in leaders_unit(self._members()):
            owner.more.supervised = False
            self.course.kill(owner)
        for _ in range(unit - 1):
            self._start()
        entered = self._wait(lambda: all(map(is_member, owners[known:])), ENTER_SECONDS)
        require(entered, f"these get no places together: {list(map(place_of, owners[known:]))}")

    def outlives(self) -> None:
        """A member waits for its unit to be whole again, and all others die."""
        members = self._members()
        mates = leaders_unit(members)
        if len(mates) < 2 or len(members) < 2 * self.course.unit or self._waiting():
            return
        for owner in members:
            owner.more.supervised = owner is not mates[0]
        self.course.kill(mates[0])
        self._wait(lambda: not is_member(mates[1]), ENTER_SECONDS)
        for owner in members:
            if owner not in mates:
                self.course.kill(owner)
        self.course.time.sleep(5.0)
        self._await_calm()

    def _waiting(self) -> bool:
        return any(owner.alive and not is_member(owner) for owner in self.course.owners)
