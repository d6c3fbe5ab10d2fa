"""Loaders of a world: each sample counts once over deaths and entrances; workers are kept."""

from __future__ import annotations

import math
from collections import Counter
from functools import partial
from itertools import chain
from typing import Any

import pytest

from lab.course import Starters, starters
from lab.data_programs import BATCH, EPOCHS, LENGTH, leave_the_loop, read, validate
from lab.limits import limit
from ringcomm.elastic.deck import Stream

STREAM = Stream(LENGTH, seed=3, shuffle=True)


def batches(some: Starters) -> list[list[int]]:
    """Return the samples of each batch that was read in a decided step, by step and rank."""
    events = sorted(some.all_events("read"), key=lambda event: (event["step"], event["rank"]))
    return [samples for event in events for samples in event["samples"]]


def check(some: Starters) -> None:
    """Require that batches 0, 1, 2, … were read once each, the dead rank's included."""
    read = Counter(tuple(samples) for samples in batches(some))
    last = math.ceil(EPOCHS * LENGTH / BATCH)
    for number in range(last):
        samples = tuple(STREAM.samples(number * BATCH, BATCH))
        assert read[samples] == 1, (number, samples, read[samples])


@pytest.mark.parametrize("workers", [0, 2])
def test_each_sample_counts_once(workers: int) -> None:
    """Over a death and an entrance, in the middle of epochs that no batch fits into."""
    program = partial(read, workers=workers, dies=3, grows=8)
    with starters(3, program) as some:
        some.processes[1].join(limit(60))
        (joiner,) = some.start()
        ends = some.await_ends([0, 2, joiner])
        check(some)
        assert [end["size"] for end in ends] == [3, 3, 3]
        assert all(end["parameters"] == ends[0]["parameters"] for end in ends)
        assert all(len(end["workers"]) == max(1, workers) for end in ends), ends
        assert some.events(joiner, "tracked")[0]["epoch"] == 0
        for number in (0, 2, joiner):
            assert [event["now"] for event in some.events(number, "epoch")] == [1, 2, 3]


TOTAL = 6  # batches a step


def test_the_size_does_not_matter() -> None:
    """With `total_batch`, four ranks of two batches or one compute what one rank does."""
    results: list[Any] = []
    for size, workers in ((1, 0), (4, 1)):
        with starters(size, partial(read, total=TOTAL * BATCH, workers=workers)) as some:
            results.append(some.await_ends(list(range(size)))[0])
            for step in range(results[0]["step"]):
                events = [event for event in some.all_events("read") if event["step"] == step]
                samples = chain(*(batch for event in events for batch in event["samples"]))
                expected = STREAM.samples(step * TOTAL * BATCH, TOTAL * BATCH)
                assert sorted(samples) == sorted(expected), step
    alone, together = results
    assert together["step"] == alone["step"]
    assert together["parameters"] == pytest.approx(alone["parameters"], rel=1e-9)


def test_each_step_takes_the_same_number() -> None:
    """With `total_batch`, over a death and an entrance."""
    with starters(3, partial(read, total=TOTAL * BATCH, workers=1, dies=2, grows=5)) as some:
        some.processes[1].join(limit(60))
        (joiner,) = some.start()
        ends = some.await_ends([0, 2, joiner])
        check(some)
        assert all(end["parameters"] == ends[0]["parameters"] for end in ends)
        counts: Counter[int] = Counter()
        for event in some.all_events("read"):
            counts[event["step"]] += len(event["samples"])
        # The dead rank's words on its steps are there; none on the step in which it died.
        assert set(counts.values()) == {TOTAL}, counts


def test_accumulating() -> None:
    with starters(2, partial(read, accumulate=3, workers=1, dies=2)) as some:
        some.await_ends([0])
        check(some)
        for event in some.all_events("read"):
            assert len(event["samples"]) == 3


def test_a_loop_that_is_left_and_entered_again() -> None:
    with starters(2, leave_the_loop) as some:
        ends = some.await_ends([0, 1])
        assert all(len(end["workers"]) == 2 for end in ends)
        read = Counter(chain(*batches(some)))
        assert set(read) == set(range(LENGTH))
        (lengths,) = some.events(0, "lengths")
        assert lengths["before"] == lengths["after"] == math.ceil(LENGTH / BATCH / 2)


def test_validation_sees_each_sample_once_though_a_rank_dies_in_it() -> None:
    with starters(3, validate) as some:
        ends = some.await_ends([0, 2])
    assert [end["size"] for end in ends] == [2, 2]
    assert [end["seen"] for end in ends] == [[1.0] * LENGTH] * 2
