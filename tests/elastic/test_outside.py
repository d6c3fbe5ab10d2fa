"""A death in an operation of the program's own between two steps: the others go on."""

from __future__ import annotations

from functools import partial

import pytest
from conftest import forms

from lab.outside_programs import AT, ENDS, log_loss, tell_objects
from lab.ports import free_port
from lab.ranks import HOST
from lab.trainees import trainees

PLACES = ("before", "between", "after")
CASES = [(place, who) for place in PLACES for who in (0, 1)] + [("behind", 1)]


@pytest.mark.parametrize(
    ("where", "who"), forms(CASES, ("before", 1), ("between", 0), ("after", 0), ("behind", 1))
)
def test_a_loss_is_averaged_over_those_that_are_left(where: str, who: int) -> None:
    """Number 0 serves the store, and takes it along when it dies."""
    with trainees(
        3, partial(log_loss, where=where, who=who), store=f"{HOST}:{free_port()}"
    ) as some:
        left = [number for number in range(3) if number != who or where == "behind"]
        some.await_ends(left)
        some.check_equal()
        sums = {n: {e["step"]: e["sums"] for e in some.events(n, "step")} for n in left}
        for step in range(1, ENDS + 1):
            (seen,) = {tuple(sums[number][step]) for number in left}
            with_all, without = (3, 3), (len(left), sum(left))
            if step == AT and where == "between":  # all survivors have its part, or none uses it
                assert seen in (with_all, without)
            else:
                assert seen == (with_all if step < AT + (where == "after") else without)


def test_what_is_not_called_again_says_how_to_write_it() -> None:
    with trainees(3, tell_objects) as some:
        some.await_ends([0, 2])
        for number in (0, 2):
            (raised,) = some.events(number, "raised")
            assert "write world.attempt(function)" in raised["text"]
            (told,) = some.events(number, "told")
            assert told["numbers"] == [0, 2]
