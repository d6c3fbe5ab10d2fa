"""The process groups of a program live on: the same objects, with those of their ranks left."""

from __future__ import annotations

from functools import partial
from typing import Any

from lab.group_programs import MADE, compress, hold
from lab.ports import free_port
from lab.ranks import HOST
from lab.trainees import Trainees, trainees


def steps(some: Trainees, number: int) -> dict[int, Any]:
    return {event["step"]: event for event in some.events(number, "step")}


def sums(members: list[int], own: int) -> dict[str, float]:
    """The sum of each group of a rank, when these of the first four are left."""
    return {
        name: float(sum(other + 1 for other in made if other in members))
        for name, made in MADE.items()
        if own in made
    }


def ranks(members: list[int], own: int) -> dict[str, list[int]]:
    return {
        name: [members.index(other) for other in made if other in members]
        for name, made in MADE.items()
        if own in made
    }


def test_groups_live_on_without_a_store() -> None:
    """Rank 1 dies while others wait for it in a group; then rank 0 does, which serves the store.

    At each change the program makes another group of all, also just when the store has died.
    """
    deaths = {1: (2, "all"), 0: (4, "back")}
    program = partial(hold, deaths=deaths, ends=6)
    with trainees(4, program, store=f"{HOST}:{free_port()}") as some:
        some.await_ends([2, 3])
        for number in (2, 3):
            seen = steps(some, number)
            for step, members in ((2, [0, 1, 2, 3]), (4, [0, 2, 3]), (6, [2, 3])):
                newest = {"newest": float(sum(m + 1 for m in members))} if step > 2 else {}
                assert seen[step]["sums"] == sums(members, number) | newest
                assert seen[step]["ranks"] == ranks(members, number)
            known = [event["known"] - event["kept"] for event in some.events(number, "change")]
            assert known == [2, 3]  # the default group, the newest, and its predecessor


def test_one_that_joins_is_in_no_group_and_makes_others() -> None:
    program = partial(hold, deaths={1: (2, "pair"), 2: (8, "all")}, ends=10, grows=4)
    with trainees(4, program) as some:
        some.processes[1].join(60)
        (joiner,) = some.start()
        some.await_ends([0, 3, joiner])
        for step, members in ((4, [0, 2, 3]), (7, [0, 2, 3]), (10, [0, 3])):
            came = [joiner] if step > 5 else []
            for number in (0, 3, *came):
                event = steps(some, number)[step]
                newest = {"newest": float(sum(m + 1 for m in [*members, *came]))}
                assert event["sums"] == sums(members, number) | newest
                assert event["ranks"] == ranks(members, number)


def test_a_death_in_a_hook_that_has_groups_takes_the_store_along() -> None:
    with trainees(3, compress, store=f"{HOST}:{free_port()}") as some:
        ends = some.await_ends([1, 2])
        assert [end["size"] for end in ends] == [2, 2]
        assert [event["step"] for event in some.events(2, "step")] == list(range(1, 7))
        some.check_equal()
