"""Proves the rules of membership by simulation: the shipped Python code, in virtual time.

Processes found a world, wait for places, are admitted, die at any point, stop and wake, hang, leave
and are started anew; joiners differ, or die as they join; hosts are cut off from the store, so that
a lease lapses while its world lives. What must hold:

  - A step is applied in one epoch of its world, and no two worlds of a run go on side by side.
  - All members of an epoch stand in whole units, and each place of a unit has one holder.
  - When faults have ended, all are members of one world soon, but for those that are too few for
    a unit, and those whose entrances fail.
  - Joiners that fail cost the members a bounded number of changes, and success is forgiven.
  - A rank that hangs ends, and none does that only waits, was stopped, or is slow.
  - The mates of a member that died live on, and come in again as guests.
  - A member has the state. One that takes it slowly becomes a member, and the others don't wait
    long for one that is frozen, or makes no progress.
  - Those that come after the end of the training end, too.

    python -m lab.membership FIRST COUNT                   so many seeds
    python -m lab.membership --without RULE FIRST COUNT    a rule switched off: exits 1 with the
                                                           seed that fails
    python -m lab.membership --tell SEED                   what happens in it
"""

from __future__ import annotations

import random
import sys
from collections import Counter

from lab.membership_rules import without
from lab.membership_trials import HANG_SECONDS, SLOW_STEP, Trials
from lab.simulated_store import HOME
from lab.simulated_time import Owner
from lab.simulated_world import (
    LEASE,
    OPERATION,
    TROUBLES,
    Course,
    Spec,
    epoch_of,
    is_member,
    leaders_unit,
    place_of,
    process_of,
    require,
)
from ringcomm.elastic.rendezvous import Record

RESTART_SECONDS = 1.0  # until a launcher starts a process anew
CALM_SECONDS = 200.0  # within which all is well after the last fault
RELAPSE_SECONDS = 3000.0  # within which those die for the last time that do so again and again
FAILING_SECONDS = 120.0  # that those whose entrances fail go on with that
LAG_SECONDS = 10.0  # of a world that reaches the store and was succeeded
MOST_FAILURES = 8  # entrances of a process that fail in one world, in some minutes
LONG = (LEASE + 5.0, LEASE + 25.0)  # for a lease to lapse
RELAPSES = ("guest", "later") * 5


class Run:
    """One run: the faults that a seed has in store for it, and what must hold."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        unit = self.chance.choice((1, 1, 2, 2, 3))
        count = unit * self.chance.randint(1, 6 // unit)
        self.course = Course(seed, unit, count)
        self.course.may_lag = self._may_lag  # type: ignore[method-assign]
        self.per_host = self.chance.choice((1, 1, 2))
        self.numbers = 0  # of processes that launchers have started
        self.failing: set[int] = set()  # ranks whose entrances fail
        self.healed = -1e9  # when the last cut or stop ends
        self.seen = (-1, 0)  # the newest life, and its steps

    def __call__(self) -> None:
        """Raises AssertionError where something does not hold."""
        course = self.course
        for _ in range(course.start):
            self.start()
        for name, function in (("launcher", self._supervise), ("faults", self._drive)):
            course.time.spawn(Owner(name, more=Spec("nowhere")), function)
        course.time.run(1e6)

    def start(self, **more: object) -> int:
        """Start a process that was not there before; returns its rank."""
        rank, self.numbers = self.numbers, self.numbers + 1
        self.course.launch(Spec(f"h{rank // self.per_host}", rank, **more))  # type: ignore[arg-type]
        return rank

    def _supervise(self) -> None:
        """Start processes anew, as launchers do."""
        while True:
            self.course.time.sleep(self.course.time.random.uniform(0.1, RESTART_SECONDS))
            for owner in self.course.owners:
                spec = owner.more
                if spec.supervised and not owner.alive and spec.status != 0:
                    spec.supervised = False
                    anew = Spec(spec.host, spec.rank, True, spec.differs, spec.fates[1:])
                    self.course.launch(anew)

    def _drive(self) -> None:
        """Let the faults happen, and wait until all is well."""
        time, chance = self.course.time, self.chance
        time.sleep(chance.uniform(0.0, 12.0))
        for _ in range(chance.randint(1, 5)):
            fault = chance.choice(FAULTS)
            self.course.note(f"fault: {fault.__name__}")
            fault(self)
            time.sleep(chance.choice((0.0, chance.uniform(0.0, 3.0), chance.uniform(3.0, 25.0))))
        if chance.random() < 0.3:
            self.course.goal = 15 + max(
                (max(line) for line in self.course.lines.values()), default=0
            )
        self.course.note("no more faults")
        time.sleep(max(0.0, self.healed - time.now))
        if self.failing:
            time.sleep(FAILING_SECONDS)
        self._end_hangs()
        self._await_calm()
        if self.course.goal == 10**9 and not self.failing:
            Trials(self.course, self.chance, self.start, self._await_calm).make_one()
        if self._has_ended():
            self.start()
            time.sleep(RESTART_SECONDS)
            self._await_calm()
        self._check_failures()
        time.stop()

    def _await_calm(self) -> None:
        """Wait until all is well. Some die again and again for a while: it counts from the last."""
        time, began, starts = self.course.time, self.course.time.now, 0
        latest = began + RELAPSE_SECONDS
        self.seen = self._newest_step()
        while (wrong := self._what_is_wrong()) and time.now - began < CALM_SECONDS:
            time.sleep(RESTART_SECONDS)
            before, starts = (
                starts,
                sum(o.more.rank not in self.failing for o in self.course.owners),
            )
            began = time.now if starts > before and time.now < latest else began
        require(not wrong, wrong)

    def _end_hangs(self) -> None:
        """End those that hang and are alone: nobody waits for them."""
        never = float("inf")
        hanging = [o for o in self.course.owners if o.alive and o.more.hangs_at < never]
        if hanging:
            self.course.time.sleep(HANG_SECONDS)
        for owner in hanging:
            owner.more.hangs_at = never
        if any(owner.alive and owner.more.hangs for owner in hanging):
            self.course.time.sleep(HANG_SECONDS)  # some have begun to hang only meanwhile
        for owner in hanging:
            if owner.alive and owner.more.hangs:
                members = [o for o in self.course.owners if o.alive and is_member(o)]
                waits = [o for o in members if o not in hanging and epoch_of(o) == epoch_of(owner)]
                require(not waits, f"{owner.name} hangs, and others wait for it")
                self.course.kill(owner)

    # ---- what must hold

    def _may_lag(self) -> bool:
        """Tell whether a world may not know yet that another was founded in its place.

        Its members learn it from a vote, which waits for a rank that hangs.
        """
        hangs = any(owner.more.hangs for owner in self.course.owners)
        lag = LAG_SECONDS + (2 * OPERATION if hangs else 0.0)
        return self.course.time.now < max(self.healed, self.course.succeeded) + lag

    def _has_ended(self) -> bool:
        """Tell whether the last world has come to the end of its training, and knows it."""
        _, keys = self.course.network.stores[HOME]
        members = Record.from_text(keys["world"].decode()).members if "world" in keys else ()
        return bool(members) and all(keys.get(f"dead/{p.uuid}") == b"ended" for p in members)

    def _newest_step(self) -> tuple[int, int]:
        """Return the newest life that has applied steps, and the last of them."""
        newest = self.course.newest
        return newest, max(self.course.lines.get(newest, (0,)))

    def _what_is_wrong(self) -> str:
        course = self.course
        owners = [o for o in course.owners if o.more.rank not in self.failing]
        if any(not o.alive and o.more.supervised and o.more.status != 0 for o in owners):
            return "a process is about to be started anew"
        alive = [owner for owner in owners if owner.alive]
        if course.goal < 10**9:
            enough = len(alive) >= course.start or any(map(is_member, alive))
            ends = enough or self._has_ended()
            return f"{alive[0].name} does not end" if alive and ends else ""
        inside = [owner for owner in alive if is_member(owner)]
        if any(owner.more.fates[:1] == ("later",) for owner in inside):
            return "a member is about to die"
        if not inside:
            return f"{len(alive)} found no world" if len(alive) >= course.start else ""
        worlds = {epoch_of(owner) for owner in inside}
        if len(worlds) > 1:
            return f"members are in different epochs {worlds}"
        seen, self.seen = self.seen, self._newest_step()
        if seen >= self.seen:
            return f"no steps after {seen}"
        if self._is_odd():
            return ""
        return self._who_waits([owner for owner in alive if not is_member(owner)])

    def _is_odd(self) -> bool:
        """Tell whether all that hold some shard differ from the others: these can't enter then.

        One that differed had become a member, and the others died before a vote had compared them.
        """
        members = [owner for owner in self.course.owners if owner.alive and is_member(owner)]
        alike = {process_of(owner).place for owner in members if not owner.more.differs}
        return any(process_of(owner).place not in alike for owner in members)

    def _who_waits(self, waits: list[Owner]) -> str:
        """Tell whether some wait that could make a unit, or that were given places unevenly.

        Places are even if they are with those of some of the processes that went for good: others
        may have come in the place of the rest. The founders of another world get others than they
        had.
        """
        unit, failing = self.course.unit, len(self.failing)
        held = {owner.name: place_of(owner) for owner in waits}
        if unit == 1:
            return f"these wait for ever: {held}" if waits else ""
        newest = {(owner.more.host, owner.more.rank): owner for owner in self.course.owners}
        gone = [place_of(owner) for owner in newest.values() if not owner.alive]
        there = [*held.values()]
        most = max(there.count(place) for place in range(unit))
        least = min((there + gone).count(place) for place in range(unit))
        many = len(waits) >= unit + failing * (unit - 1)
        uneven = many and self.course.newest <= 0 and most - least > 1 + failing
        whole = -1 in there or set(there) == set(range(unit))
        return f"these wait for ever: {held}, gone are {gone}" if whole or uneven else ""

    def _check_failures(self) -> None:
        """Joiners that fail are called ever less often, where there is somebody to call them.

        Founders aren't called by members, and hold none up.
        """
        if not any(o.alive and o.more.rank not in self.failing for o in self.course.owners):
            return
        specs = [owner.more for owner in self.course.owners if owner.more.rank in self.failing]
        starts = Counter(s.rank for s in specs if not (s.world and s.world._founder))
        for rank, count in starts.items():
            most = MOST_FAILURES * (2 + self.course.newest)
            require(count <= most, f"rank {rank} failed to enter {count} times")

    # ---- faults

    def _one(self) -> Owner | None:
        alive = [o for o in self.course.owners if o.alive and o.more.rank not in self.failing]
        return self.chance.choice(alive) if alive else None

    def kill(self) -> None:
        if owner := self._one():
            owner.more.supervised = owner.more.supervised and self.chance.random() < 0.8
            self.course.kill(owner)

    def kill_at_some_point(self) -> None:
        if owner := self._one():
            owner.acts = self.chance.randint(0, 40)

    def kill_two(self) -> None:
        self.kill()
        self.kill()

    def kill_all(self) -> None:
        for owner in self.course.owners:
            self.course.kill(owner)

    def stop(self) -> None:
        self._stop([self._one()], *self.chance.choice(((0.5, 5.0), (5.0, 40.0))))

    def stop_all(self) -> None:
        self._stop(list(self.course.owners), 1.0, 8.0)

    def _stop(self, owners: list[Owner | None], least: float, most: float) -> None:
        until = self.course.time.now + self.chance.uniform(least, most)
        for owner in owners:
            if owner is not None:
                owner.stopped_until = max(owner.stopped_until, until)
        self.healed = max(self.healed, until)

    def hang(self) -> None:
        if owner := self._one():
            owner.more.hangs_at = self.course.time.now

    def leave(self) -> None:
        if (owner := self._one()) and owner.more.world is not None:
            owner.more.world._leaving = True

    def newcomer(self) -> None:
        self.start(supervised=self.chance.random() < 0.5)

    def newcomers(self) -> None:
        for _ in range(self.course.unit):
            self.newcomer()

    def fails(self) -> None:
        self.failing.add(self.start(fates=(self.chance.choice(("guest", "member")),) * 99))

    def has_trouble(self) -> None:
        self.start(fates=(self.chance.choice(TROUBLES),))

    def slow_step(self) -> None:
        if owner := self._one():
            owner.more.slow = SLOW_STEP

    def differs(self) -> None:
        self.failing.add(self.start(differs=True))

    def starts_at_once(self) -> None:
        """One that died asks for a place before the members know of its death."""
        if owner := self._one():
            owner.more.supervised = False
            self.course.kill(owner)
            self.course.launch(Spec(owner.more.host, owner.more.rank))

    def leader_dies_as_others_come(self) -> None:
        """Its unit does, and it has given a place to a newcomer that still makes its model."""
        self.newcomer()
        self.course.time.sleep(self.chance.uniform(1.0, 5.0))
        members = [owner for owner in self.course.owners if owner.alive and is_member(owner)]
        for owner in leaders_unit(members):
            owner.more.supervised = False
            self.course.kill(owner)
        for _ in range(max(1, self.course.unit - 1)):
            self.newcomer()

    def relapses(self) -> None:
        if owner := self._one():
            owner.more.supervised, owner.more.fates = True, ("", *RELAPSES)
            self.course.kill(owner)

    def cut(self) -> None:
        if owner := self._one():
            self._cut({owner.more.host}, 1.0, 10.0)

    def succeeded(self) -> None:
        """A world is cut off from the store, or stops, until others have founded another one."""
        old = [owner for owner in self.course.owners if owner.alive]
        if self.chance.random() < 0.5:
            self._stop(list(old), *LONG)
        else:
            self._cut({owner.more.host for owner in old}, *LONG)
        self.numbers += 2  # on other hosts
        for _ in range(self.course.start):
            self.start()

    def _cut(self, hosts: set[str], least: float, most: float) -> None:
        time, cut = self.course.time, self.course.network.cut
        until = time.now + self.chance.uniform(least, most)
        cut |= hosts
        self.healed = max(self.healed, until)

        def heal() -> None:
            time.sleep(until - time.now)
            cut.difference_update(hosts)

        time.spawn(Owner("heals", more=Spec("nowhere")), heal)


FAULTS = (
    *(Run.kill, Run.kill_at_some_point, Run.kill_two, Run.kill_all, Run.stop, Run.stop_all),
    *(Run.hang, Run.leave, Run.newcomer, Run.newcomers, Run.fails, Run.differs, Run.relapses),
    *(Run.cut, Run.succeeded, Run.starts_at_once, Run.leader_dies_as_others_come),
    *(Run.has_trouble, Run.slow_step),
)


def simulate(seed: int, rule: str = "", tells: bool = False) -> None:
    """Simulate one seed. Raises AssertionError whatever fails, with how to see it again."""
    run = Run(seed)
    try:
        with run.course.stands_in(), without(rule):
            run()
    except Exception as error:
        options = f"--tell {seed}{f' {rule}' if rule else ''}"
        text = f"{error}" if isinstance(error, AssertionError) else repr(error)
        raise AssertionError(f"seed {seed}: {text} (python -m lab.membership {options})") from error
    finally:
        if tells:
            print("\n".join(run.course.events))


def shows(rule: str, seed: int) -> bool:
    """Tell whether a seed fails if the rule is left out, and only then."""
    return bool(failing_seed(rule, seed, 1)) and not failing_seed("", seed, 1)


def failing_seed(rule: str, first: int, count: int) -> str:
    """Return what fails in the first seed that does; "" where none fails."""
    for seed in range(first, first + count):
        try:
            simulate(seed, rule)
        except AssertionError as error:
            return str(error)
    return ""


def main(words: list[str]) -> int:
    if words[0] == "--tell":
        simulate(int(words[1]), "".join(words[2:]), tells=True)
        return 0
    rule = words[1] if words[0] == "--without" else ""
    first, count = map(int, words[-2:])
    failed = failing_seed(rule, first, count)
    print(f"{f'without {rule}: ' if rule else ''}{failed or f'{count} seeds: nothing fails'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
