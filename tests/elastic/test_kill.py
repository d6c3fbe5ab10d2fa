"""SIGKILL in every phase of a training: the others go on, nothing is lost, nothing counts twice."""

from __future__ import annotations

import random
import time

import pytest

from lab.limits import limit, seed
from lab.trainees import Trainees, trainees

UNDECIDED = ("forward", "bucket")  # the step is computed again
DECIDED = ("vote", "voting", "voted", "applying", "applied")  # it counts, with the dead one's part

# Each is a training of so many ranks, and its deaths: (number, phase, step).
DEATHS = [
    (4, [(0, "forward", 4), (3, "bucket", 8), (1, "vote", 12)]),
    (4, [(3, "voting", 4), (0, "voted", 8), (2, "applying", 12)]),
    (2, [(1, "applied", 4)]),
    (2, [(0, "bucket", 4)]),
    (2, [(0, "voted", 4)]),
    (4, [(1, "bucket", 4), (2, "bucket", 4)]),
    (4, [(0, "vote", 4), (1, "vote", 4), (3, "voted", 9)]),
    (4, [(3, "forward", 4), (0, "agree", 4), (1, "agree", 4)]),
    (4, [(3, "forward", 4), (0, "agreeing", 4)]),
    (4, [(2, "vote", 4), (0, "agreed", 4), (1, "made", 4)]),
    (4, [(1, "vote", 4), (0, "make", 4), (2, "made", 4)]),
    (4, [(1, "voted", 4), (0, "making", 4)]),
    (4, [(0, "applied", 4), (3, "making", 4), (1, "agreeing", 4)]),
]
OF_GUESTS = ["answered", "enter", "receive", "received", "agree", "agreed", "make", "made"]
SLOW = (pytest.mark.slow,)  # the guest waits for the dead one until a timeout
OF_GIVERS = [
    *[(number, phase, ()) for number in (0, 2) for phase in ("give", "given", "agreed")],
    *[(number, phase, SLOW[number:]) for number in (0, 2) for phase in ("make", "making")],
]


def id_of(case: tuple[int, list[tuple[int, str, int]]]) -> str:
    return f"{case[0]}-" + "-".join(f"{phase}{number}" for number, phase, _ in case[1])


def check_deaths(some: Trainees, fates: list[tuple[int, str, int]]) -> None:
    """Require that each death took place, and that the step then under way counts if it should."""
    dead = some.deaths()
    assert {(number, event["phase"]) for number, event in dead.items()} == {
        (number, phase) for number, phase, _ in fates
    }
    changes = some.all_events("change")
    for number, phase, step in fates:
        pid = dead[number]["pid"]
        steps = {change["step"] for change in changes if pid in change["lost"]}
        if phase in UNDECIDED:
            assert steps == {step - 1}
        if phase in DECIDED:
            assert steps == {step}


@pytest.mark.parametrize("case", DEATHS, ids=id_of)
def test_others_go_on(case: tuple[int, list[tuple[int, str, int]]]) -> None:
    size, fates = case
    numbers = [number for number, _, _ in fates]
    rest = [number for number in range(size) if number not in numbers]
    with trainees(size, epochs=2, fates=tuple(fates)) as some:
        ends = some.await_ends(rest)
        check_deaths(some, fates)
        some.check_equal()
        some.check_ledger(epochs=2)
        for end in ends:
            assert end["stats"]["aborted"] <= len(fates)


def test_guests_die() -> None:
    """While they ask, make the group, are given the state, and become members."""
    fates = tuple((2 + place, phase, 0) for place, phase in enumerate(OF_GUESTS))
    with trainees(2, epochs=10**6, fates=fates) as some:
        some.await_events([0, 1], "step")
        for place, phase in enumerate(OF_GUESTS):
            some.start()
            some.await_events([2 + place], "dies")
            assert some.deaths()[2 + place]["phase"] == phase
        some.start()
        last = len(some.processes) - 1
        some.await_events([last], "step", 3)
        end_well(some, [0, 1, last])


def end_well(some: Trainees, numbers: list[int]) -> None:
    """Have these leave, one after another, and look at what all have done."""
    for number in numbers:
        some.kill(number, 15)
    some.await_ends(numbers)
    some.check_equal()
    some.check_ledger()


@pytest.mark.parametrize(
    ("number", "phase"), [pytest.param(*case[:2], marks=case[2]) for case in OF_GIVERS]
)
def test_giver_dies(number: int, phase: str) -> None:
    """While a guest is on its way in: it is admitted all the same."""
    with trainees(3, epochs=10**6, fates=((number, phase, 2),)) as some:
        some.await_events([0, 1, 2], "step")
        some.start()
        some.await_events([3], "step", 3)
        assert some.deaths()[number]["phase"] == phase
        end_well(some, [n for n in range(4) if n != number])


def kill_at_random(kills: int) -> list[float]:
    """Kill members and guests at any time, and start others; returns how long changes took."""
    draw = random.Random(seed())
    took = []
    with trainees(4, epochs=10**6) as some:
        alive = [0, 1, 2, 3]
        some.await_events(alive, "step")
        for _ in range(kills):
            time.sleep(draw.uniform(0, 0.06))  # when, is for chance to decide
            victim = draw.choice(alive)
            alive.remove(victim)
            others = [number for number in alive if some.events(number, "tracked")]
            if not others:
                some.await_events(alive[:1], "tracked")
                others = alive[:1]
            was_member = bool(some.events(victim, "step"))
            at, pid = some.kill(victim), some.processes[victim].pid
            while was_member and not (told := of_death(some, others, pid)):
                assert time.monotonic() < at + limit(30), some.all_events()[-20:]
                time.sleep(0.001)
            if was_member:
                took.append(told - at)
            alive += some.start()
        some.await_events(alive, "step", 2)
        end_well(some, alive)
    return took


def of_death(some: Trainees, numbers: list[int], pid: int | None) -> float:
    """When the first of these went on without that process; 0 if none has yet."""
    changes = [change for number in numbers for change in some.events(number, "change")]
    return min((change["at"] for change in changes if pid in change["lost"]), default=0.0)


@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.timeout(600)
def test_at_random(kills: int) -> None:
    took = sorted(kill_at_random(kills))
    print(f"{len(took)} members killed: {took[len(took) // 2] * 1e3:.0f} ms to the new group")
