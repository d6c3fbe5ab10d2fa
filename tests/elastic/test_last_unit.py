"""The last unit of a sharded world: each shard has a copy, and a death in it loses no shard.

All ranks of a world of two lose a step's state with either of them, unless the other one holds it.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from lab.course import Starters, starters
from lab.limits import limit
from lab.sharded import BATCH, Part, train
from lab.trainees import Event

STEPS, AT = 10, 5
Steps = dict[int, dict[int, Event]]  # what was written down, by step and place


def copies(steps: int) -> dict[str, str]:
    return {"RINGCOMM_ELASTIC_COPY_STEPS": str(steps)}


def last(some: Starters) -> Steps:
    """Return what was written down of each step, when it was made for the last time."""
    told: Steps = defaultdict(dict)
    for event in sorted(some.all_events("step"), key=lambda event: float(event["at"])):
        told[event["step"]][event["place"]] = event
    return told


def samples(places: dict[int, Event]) -> set[int]:
    return {sample for event in places.values() for sample in event["samples"]}


@functools.cache
def planned(kind: str, drops: float) -> Steps:
    """Return the steps of a run in which nothing happens, without copies."""
    part = Part(kind, STEPS, drops=drops)
    with starters(2, partial(train, part=part), unit=2, settings=copies(0)) as some:
        some.await_ends([0, 1])
        return last(some)


def check_bits(some: Starters, kind: str = "shard", drops: float = Part.drops) -> None:
    """Require the planned bits of each step, whenever it was made, and the planned samples."""
    expected, told = planned(kind, drops), last(some)
    for event in some.all_events("step"):
        assert event["digest"] == expected[event["step"]][event["place"]]["digest"], event
    assert sorted(told) == list(range(1, STEPS + 1))
    for step, places in told.items():
        assert sorted(places) == [0, 1], step
        assert samples(places) == samples(expected[step]), step


def await_death(some: Starters, number: int) -> None:
    some.processes[number].join(limit(60))
    assert some.processes[number].exitcode == -9


def told_by(some: Starters, number: int) -> list[int]:
    return [event["step"] for event in some.events(number, "step")]


@pytest.mark.parametrize(
    ("kind", "place", "dies", "every", "back"),
    [
        ("shard", "backward", 1, 1, AT),
        ("shard", "end", 0, 1, AT),
        ("shard", "backward", 0, 3, 3),
        ("shard", "copy", 1, 1, AT - 1),
        ("both", "between", 1, 2, 4),
        pytest.param("shard", "copy", 0, 1, AT - 1, marks=pytest.mark.slow),
        pytest.param("tensor", "forward", 0, 1, AT, marks=pytest.mark.slow),
    ],
)
def test_a_death_in_the_last_unit(kind: str, place: str, dies: int, every: int, back: int) -> None:
    """Another process comes, and both go on from the step of the last copy that is whole."""
    part = Part(kind, STEPS, dies, place, at=AT)
    with starters(2, partial(train, part=part), unit=2, settings=copies(every)) as some:
        await_death(some, dies)
        (joiner,) = some.start()
        ends = some.await_ends([1 - dies, joiner])
        assert [end["what"] for end in ends] == ["end"] * 2, ends
        check_bits(some, kind)
        # Survivors that hold all gradients have voted for the step, and it counts at first.
        reached = AT + 1 if place in ("between", "end") else AT
        assert told_by(some, 1 - dies) == [*range(1, reached + 1), *range(back + 1, STEPS + 1)]
        assert told_by(some, joiner) == list(range(back + 1, STEPS + 1))
        assert [tracked["step"] for tracked in some.events(joiner, "tracked")] == [back]
    assert [end["steps_lost"] for end in ends] == [reached - back, 0]
    assert {end["restored"] for end in ends} == {
        f"Rank {dies} died and its unit was the last one; training goes on from step {back}, which "
        "rank 0 held in memory."
    }


def test_deaths_again_and_again(tmp_path: Path) -> None:
    """The one that came holds copies, too, as soon as it trains."""
    gate = tmp_path / "gate"
    part = Part("shard", STEPS, 1, "backward", at=2)
    with starters(2, partial(train, part=part), unit=2, settings=copies(1)) as some:
        await_death(some, 1)
        some.program = partial(train, part=Part("shard", STEPS, gate=str(gate)))
        (second,) = some.start()
        some.await_events([second], "tracked")
        some.kill(0)
        gate.touch()
        (third,) = some.start()
        ends = some.await_ends([second, third])
        assert [end["what"] for end in ends] == ["end"] * 2, ends
        check_bits(some)


@pytest.mark.parametrize(("first", "second", "are_made"), [(1, 0, False), (3, 2, True)])
def test_ranks_with_different_settings(first: int, second: int, are_made: bool) -> None:
    """No rank waits for another one's copy: they make those that all of them want."""
    program = partial(train, part=Part("shard", STEPS))
    with starters(1, program, start=2, unit=2, settings=copies(first)) as some:
        some.plan = replace(some.plan, settings=copies(second))
        some.start()
        ends = some.await_ends([0, 1])
        assert [end["what"] for end in ends] == ["end"] * 2, ends
        check_bits(some)
    assert [end["copied"] > 0 for end in ends] == [are_made] * 2


def test_copies_end_when_there_is_a_second_unit() -> None:
    part = Part("shard", STEPS, grows=AT, below=2)
    with starters(2, partial(train, part=part), unit=2, settings=copies(1)) as some:
        some.await_events([0], "step", count=1)
        joiners = some.start(2)
        ends = some.await_ends([0, 1, *joiners])
        assert [(end["size"], end["copied"]) for end in ends] == [(4, 0)] * 4, ends


def test_the_last_one_of_two_units_makes_copies() -> None:
    part = Part("shard", STEPS, 3, "backward", at=2)
    with starters(4, partial(train, part=part), unit=2, settings=copies(1)) as some:
        ends = some.await_ends([0, 1])
        assert all(end["copied"] > 0 for end in ends), ends


def test_the_rank_that_waits_completes_the_last_unit(tmp_path: Path) -> None:
    """It is the mate of one that died before, in another unit, and holds an older state."""
    gate = tmp_path / "gate"
    part = Part("shard", 60, at=50, gate=str(gate), pause=0.02)
    with starters(4, partial(train, part=part), unit=2, settings=copies(1)) as some:
        for number in range(4):
            some.await_events([number], "step", count=2)
        some.kill(0)
        some.await_events([2, 3], "change")
        at = len(some.events(2, "step"))
        some.await_events([2], "step", count=at + 3)
        some.kill(3)
        gate.touch()
        ends = some.await_ends([1, 2])
        assert [end["what"] for end in ends] == ["end"] * 2, ends
        assert max(end["steps_lost"] for end in ends) <= 2
        told = last(some)
        assert sorted(told) == list(range(1, 61))
        assert all(sorted(places) == [0, 1] for places in told.values())
    assert "died and its unit was the last one; training goes on from step" in ends[0]["restored"]


@pytest.mark.parametrize("place", ["backward", "attempt"])
def test_a_world_that_cannot_go_back_ends(place: str) -> None:
    """No copies are made, or what the ranks did together after them would be done once more."""
    validates = AT if place == "attempt" else -1
    part = Part("shard", STEPS, 1, place, at=AT, validates=validates)
    every = 1 if place == "attempt" else 0
    with starters(2, partial(train, part=part), unit=2, settings=copies(every)) as some:
        await_death(some, 1)
        some.processes[0].join(limit(60))
        (end,) = some.events(0, "raised")
    says = "outside of a step" if place == "attempt" else "hold only shard 0; start them again"
    assert end["kind"] == "TooFew"
    assert says in end["text"]


def test_a_death_after_an_attempt_is_survived() -> None:
    part = Part("shard", STEPS, 1, "backward", at=AT, validates=AT)
    with starters(2, partial(train, part=part), unit=2, settings=copies(STEPS)) as some:
        await_death(some, 1)
        (joiner,) = some.start()
        some.await_ends([0, joiner])
        check_bits(some)
        assert told_by(some, joiner) == list(range(AT + 1, STEPS + 1))


def test_a_checkpoint_that_is_newer_than_the_copies(tmp_path: Path) -> None:
    part = Part("shard", STEPS, 1, "backward", at=AT, checkpoints=str(tmp_path), waits=True)
    part = replace(part, drops=0.0)
    with starters(2, partial(train, part=part), unit=2, settings=copies(STEPS)) as some:
        await_death(some, 1)
        (joiner,) = some.start()
        ends = some.await_ends([0, joiner])
        check_bits(some, drops=0.0)
        assert told_by(some, joiner) == list(range(5, STEPS + 1))
    assert {end["restored"] for end in ends} == {
        "Rank 1 died and its unit was the last one; training goes on from step 4, of which there "
        "is a checkpoint."
    }


@pytest.mark.parametrize(
    ("unit", "die"), [(3, [2]), pytest.param(4, [1, 3], marks=pytest.mark.slow)]
)
def test_deaths_in_a_larger_unit(unit: int, die: list[int], tmp_path: Path) -> None:
    """Each rank holds the copy of another one, so those of which no holder died come back."""
    gate = tmp_path / "gate"
    part = Part("shard", STEPS, at=STEPS - 1, gate=str(gate), pause=0.02)
    with starters(unit, partial(train, part=part), unit=unit, settings=copies(1)) as some:
        for number in range(unit):
            some.await_events([number], "step", count=3)
        for number in die:
            some.kill(number)
        gate.touch()
        joiners = some.start(len(die))
        stay = [number for number in range(unit) if number not in die]
        ends = some.await_ends([*stay, *joiners])
        assert [end["what"] for end in ends] == ["end"] * unit, ends
        for places in last(some).values():
            assert sorted(places) == list(range(unit))
        used = [s for places in last(some).values() for e in places.values() for s in e["samples"]]
        assert len(set(used)) == len(used) == STEPS * unit * BATCH
        assert max(end["steps_lost"] for end in ends) <= 2


def test_a_shard_whose_holder_died_too_is_lost() -> None:
    part = Part("shard", 1000, pause=0.02)
    with starters(3, partial(train, part=part), unit=3, settings=copies(1)) as some:
        for number in range(3):
            some.await_events([number], "step", count=3)
        for number in (1, 2):
            some.kill(number)
        some.processes[0].join(limit(60))
        (end,) = some.events(0, "raised")
    assert "no unit of 3 ranks is whole: the ranks that are left hold only shard 0" in end["text"]
