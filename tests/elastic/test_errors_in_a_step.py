"""One rank raises an error in a step, and its program goes on: no rank differs silently.

Before the vote the step is computed again. After it all others apply the step, so a rank that
could not must leave the world.
"""

from __future__ import annotations

from functools import partial

import pytest

from lab.trainees import trainees
from lab.training_errors import ENDS, RAISES, train

LEAVES = [
    "optimizer",
    "second",
    "interrupt",
    "pre hook",
    "post hook",
    "scheduler",
    "scaler",
    "after",
    "vote",
]


@pytest.mark.parametrize("where", LEAVES)
def test_a_rank_that_raises_after_the_vote_leaves(where: str) -> None:
    with trainees(3, partial(train, where=where)) as some:
        ends = some.await_ends([0, 2])
        some.processes[1].join(60)
        (caught,) = some.events(1, "caught")
        assert caught["kind"] in ("ValueError", "KeyboardInterrupt"), caught
        (evicted,) = some.events(1, "evicted")
        assert "left the world and must not go on; start it anew to join" in evicted["text"]
        assert max(event["step"] for event in some.events(1, "step")) == RAISES - 1
        assert [(end["step"], end["size"]) for end in ends] == [(ENDS, 2), (ENDS, 2)]
        some.check_equal()


def test_an_error_that_the_block_hides_is_no_step() -> None:
    """The program catches it around `opt.step()`: the block itself ends by Evicted then."""
    with trainees(3, partial(train, where="hidden")) as some:
        ends = some.await_ends([0, 2])
        some.processes[1].join(60)
        (evicted,) = some.events(1, "evicted")
        assert f"step {RAISES} counts, and this rank raised an error" in evicted["text"]
        assert [(end["step"], end["size"]) for end in ends] == [(ENDS, 2), (ENDS, 2)]
        some.check_equal()


def test_an_optimizer_that_raises_before_the_vote_is_undone() -> None:
    """One of two, with operations in between: both are taken back, and nobody is lost."""
    with trainees(3, partial(train, where="several")) as some:
        ends = some.await_ends([0, 1, 2])
        (caught,) = some.events(1, "caught")
        assert "its step is undone on this rank; let the error end the block" in caught["text"]
        assert [(end["step"], end["size"]) for end in ends] == [(ENDS, 3)] * 3
        some.check_equal()


def test_a_scheduler_that_lags_is_noticed_in_the_next_step() -> None:
    """The block hides that it raised: the next vote compares learning rates, and stops all."""
    with trainees(3, partial(train, where="hidden scheduler")) as some:
        for number in (0, 1, 2):
            some.await_events([number], "raised")
            (raised,) = some.events(number, "raised")
            assert raised["kind"] == "Diverged", raised
            assert "learning rates or other options differ between ranks" in raised["text"]
            assert max(event["step"] for event in some.events(number, "step")) == RAISES


def test_a_rank_without_gradients_does_not_vote() -> None:
    """The group fails in `backward()`, and the program of one rank hides that."""
    with trainees(3, partial(train, where="group")) as some:
        ends = some.await_ends([0, 1, 2])
        assert [event["voted"] for event in some.events(1, "meets")] == [False]
        assert [(end["step"], end["size"]) for end in ends] == [(ENDS, 3)] * 3
        some.check_equal()
