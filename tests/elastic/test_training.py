"""The features of a training, over a death and an entrance: survivors and joiner stay equal."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from conftest import forms

from lab import trainings
from lab.course import DIES, ENDS, GROWS, run, starters
from lab.limits import limit
from lab.trainee import Log, Plan, enter
from lab.trainees import Event, trainees
from ringcomm import elastic


def train(make: Any, place: str = "backward") -> tuple[list[Event], list[list[Event]]]:
    """Run the course with three ranks and a joiner; returns last words, and all events, of three.

    The joiner's come last.
    """
    with starters(3, partial(run, make=make, place=place)) as some:
        some.processes[1].join(limit(60))
        (joiner,) = some.start()
        survivors = [0, 2]
        ends = some.await_ends([*survivors, joiner])
        assert [end["what"] for end in ends] == ["end"] * 3, ends
        assert all(end["same"] == ends[0]["same"] for end in ends), [end["same"] for end in ends]
        assert [end["size"] for end in ends] == [3, 3, 3]
        for number in survivors:
            assert [change["size"] for change in some.events(number, "change")] == [2, 3]
        assert DIES < some.events(joiner, "tracked")[0]["step"] <= GROWS + 1
        return ends, [some.events(n) for n in (*survivors, joiner)]


@pytest.mark.parametrize(
    ("make", "place"),
    [
        (trainings.accumulating, "backward"),
        (trainings.compressing, "backward"),
        (trainings.powering, "backward"),
        (trainings.adversaries, "between"),
        (trainings.averaging, "backward"),
        (trainings.descending, "between"),
        (trainings.searching, "search"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_all_end_with_the_same(make: Any, place: str) -> None:
    ends, _ = train(make, place)
    for end in ends[:2]:
        assert end["stats"]["aborted"] == 1
        assert end["stats"]["epoch"] == 3
        times = ("agree_seconds", "regroup_seconds", "change_seconds", "seconds_lost")
        assert min(end["stats"][name] for name in times) > 0


@pytest.mark.parametrize("late", [False, True])
def test_averages_and_schedulers_count_each_step_once(late: bool) -> None:
    """In the block and after it; the step in which a rank dies is computed again."""
    ends, _ = train(partial(trainings.following, late=late))
    same = ends[0]["same"]
    assert same["averages"][1] == [ENDS, ENDS]
    assert same["scheduled"] == [ENDS, ENDS]


def count_the_steps(world: elastic.World, log: Log) -> None:
    """A step that a failure ends does not count, and comes again."""
    net = torch.nn.Linear(2, 2)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    world.track(net=net, opt=opt)
    told: list[bool] = []
    while world.step_number < 4:
        fails = len(told) == 2
        with world.step() as step:
            assert not step.counted
            net(torch.ones(1, 2)).sum().backward()
            if fails:
                raise dist.DistBackendError("planned")
            opt.step()
        told.append(step.counted)
    log("end", told=told)


def test_a_step_says_whether_it_counted() -> None:
    with starters(2, count_the_steps) as some:
        ends = some.await_ends([0, 1])
    assert [end["told"] for end in ends] == [[True, True, False, True, True]] * 2


def test_a_scaler_and_a_scheduler() -> None:
    """A skipped step is voted on at its end, where the rank dies; redone, it counts once."""
    ends, _ = train(trainings.scaler, "end")
    same = ends[0]["same"]
    assert same["scheduled"] == ENDS
    assert same["lr"] == [0.1 * 0.5 ** (ENDS // 3)]
    # Steps 2, 4 and 9 of 12 are skipped, which halves it; three good ones in a row double it.
    assert same["scale"] == 1024.0 / 8 * 2


@pytest.mark.slow
@pytest.mark.parametrize("make", [trainings.compiling_net, trainings.compiling_ddp])
def test_nothing_is_compiled_anew(make: Any) -> None:
    _, events = train(make)
    for rank in events[:2]:
        assert {e["what"]: e for e in rank}["compiled"]["at"] == [0], rank


@pytest.mark.parametrize("backend", forms(["aot_eager", "inductor"], "aot_eager"))
def test_the_step_of_the_optimizer_may_be_compiled(backend: str) -> None:
    ends, _ = train(partial(trainings.compiling_optimizer, backend=backend))
    assert [end["stats"]["aborted"] for end in ends[:2]] == [1, 1]


def test_an_attempt_is_made_again() -> None:
    """Validation sees either all ranks of one size, or it is made again with the next."""
    ends, _ = train(trainings.validating, "attempt")
    for count, ranks, _ in ends[0]["same"]["found"]:
        assert ranks == count * (count - 1) / 2


def test_subgroups_and_learning_rates_follow() -> None:
    ends, _ = train(trainings.grouping)
    assert ends[0]["same"]["groups"] == 2
    assert ends[0]["same"]["lr"] == pytest.approx(0.09)


@pytest.mark.parametrize(
    "make",
    [
        trainings.scaler,
        trainings.descending,
        trainings.adversaries,
        trainings.searching,
        trainings.following,
        partial(trainings.following, late=True),
    ],
)
def test_a_step_that_is_computed_again_leaves_no_trace(make: Any) -> None:
    """After failures that lose nobody, all is as without: random numbers and buffers, too."""
    results = []
    for place in ("", "fails"):
        with starters(2, partial(run, make=make, place=place)) as some:
            results.append(some.await_ends([0, 1]))
    without, failed = results
    assert [end["stats"]["aborted"] for end in failed] == [3, 3]
    for mine, theirs in zip(without, failed, strict=True):
        assert mine["same"] == theirs["same"] == without[0]["same"]
        assert mine["own"] == theirs["own"]


def test_a_rank_that_waits_in_another_subgroup_is_told() -> None:
    """Rank 2 fails with the dead one; rank 3 waits for rank 2, in a group without the dead one."""
    with starters(4, partial(run, make=trainings.grouping, place="between")) as some:
        ends = some.await_ends([0, 2, 3])
    assert [end["same"] for end in ends] == [ends[0]["same"]] * 3
    assert [end["stats"]["aborted"] for end in ends] == [1, 1, 1]


def wait_in_a_subgroup(plan: Plan, log: Log) -> None:
    """Rank 0 waits there in vain; then both meet in the default group."""
    epochs = enter(plan, log)._at.epochs
    group = dist.new_group([0, 1], timeout=timedelta(seconds=0.2))
    assert not epochs.has_timed_out()
    if epochs.rank == 0:
        with pytest.raises(dist.DistBackendError):
            dist.all_reduce(torch.ones(1), group=group)
        assert epochs.has_timed_out()
    dist.barrier()
    log("end")


def test_a_timeout_in_a_subgroup_is_seen() -> None:
    with trainees(2, wait_in_a_subgroup) as some:
        some.await_ends([0, 1])
