"""A world refuses misuse in one sentence; some of it ends one rank, some all of them."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lab import bad_programs as bad
from lab.course import Program, starters
from lab.limits import limit
from lab.trainee import Log, Plan, run
from lab.trainees import Event, trainees

REFUSED = {
    "early step": ("RuntimeError", "call world.track"),
    "early batches": ("RuntimeError", "world.batches needs a sampler: give one to world.track"),
    "early checkpoint": ("RuntimeError", "call world.track"),
    "stateless": ("TypeError", "'thing' is a object without state_dict"),
    "zero": ("TypeError", "ZeroRedundancyOptimizer, whose shards die with their rank"),
    "two samplers": ("ValueError", "first and two are elastic samplers"),
    "track twice": ("RuntimeError", "world.track was called before"),
    "outside": ("RuntimeError", "outside of `with world.step"),
    "stranger": ("RuntimeError", "this SGD is not tracked, but its parameters are"),
    "no loader": ("TypeError", "needs a DataLoader, not a list"),
    "iterable": ("TypeError", "Stream is iterable"),
    "own sampler": ("TypeError", "not a BatchSampler"),
    "plain loader": ("TypeError", "not a BatchSampler"),
    "another sampler": ("ValueError", "another sampler than the one given to world.track"),
    "accumulate": ("ValueError", "accumulate=0 must be at least 1"),
    "unused": ("RuntimeError", "a batch of world.batches was not used"),
    "nested": ("RuntimeError", r"world.step\(\) inside of world.step\(\)"),
    "attempt inside": ("RuntimeError", r"world.attempt\(\) inside of world.step\(\)"),
    "step inside": ("RuntimeError", r"world.step\(\) inside of world.attempt\(\)"),
    "in place": ("RuntimeError", "was changed in place"),
    "two steps a batch": ("RuntimeError", r"a second world.step\(\) in the body"),
    "forked": ("RuntimeError", "forked from rank [01]"),
}


def is_sentence(text: str) -> bool:
    """One line, not too long, with no end of a sentence in it."""
    return "\n" not in text and len(text) < 400 and not re.search(r"[a-z]\. [A-Z]", text)


def test_misuse_is_refused() -> None:
    with starters(2, bad.misuses) as some:
        ends = some.await_ends([0, 1])
        assert [end["what"] for end in ends] == ["end", "end"], ends
        assert [end["size"] for end in ends] == [2, 2]
        for number in (0, 1):
            told = {event["name"]: event for event in some.events(number, "refused")}
            for name, (kind, text) in REFUSED.items():
                event = told.pop(name)
                assert event["kind"] == kind, event
                assert re.search(text, event["text"]), event
                assert is_sentence(event["text"]), event
            assert not told
            assert [event["same"] for event in some.events(number, "untouched")] == [True]
        assert all(not event["stats"] for event in ends if "stats" in event)


@pytest.mark.parametrize(
    ("program", "kind", "text"),
    [
        (bad.raises, "ValueError", "a sample is broken"),
        (bad.interrupts, "KeyboardInterrupt", ""),
        (bad.steps_twice, "RuntimeError", "an optimizer made two steps in one world.step()"),
        (bad.has_another_shape, "ValueError", "state of 'model' cannot be loaded"),
        (bad.differs_at_once, "Diverged", "after step 0: rank 1 from the others"),
        (bad.differs_later, "Diverged", "parameters differ between ranks after step"),
    ],
)
def test_one_ends_and_the_others_go_on(program: Program, kind: str, text: str) -> None:
    with starters(3, program) as some:
        ends = some.await_ends([0, 2])
        assert [(end["what"], end["size"]) for end in ends] == [("end", 2)] * 2, ends
        some.processes[1].join(limit(30))
        (raised,) = some.events(1, "raised")
        assert raised["kind"] == kind
        assert text in raised["text"]
        assert is_sentence(raised["text"])


def test_a_joiner_that_cannot_load_is_alone() -> None:
    with starters(2, bad.joins_with_another_shape) as some:
        some.await_events([0, 1], "joined")
        (joiner,) = some.start()
        ends = some.await_ends([0, 1])
        assert [(end["what"], end["size"]) for end in ends] == [("end", 2)] * 2, ends
        some.processes[joiner].join(limit(30))
        (raised,) = some.events(joiner, "raised")
        assert raised["kind"] == "ValueError"
        assert "at the members and" in raised["text"]
        assert is_sentence(raised["text"])


ODD_JOINERS = {
    "frozen": ("ValueError", "frozen parameters of 'model': none at the members and module.bias"),
    "layout": ("ValueError", "find_unused_parameters of DDP in 'model': False at the members"),
    "loader": ("ValueError", "the members' loaders prefetch 0 batches and steps take 1, and here"),
    "rate": ("Diverged", "learning rates or other options differ between ranks"),
    "parameters": ("Diverged", "parameters differ between ranks"),
    "operations": ("Diverged", "operations failed 3 times in a row"),
}


@pytest.mark.parametrize("how", ODD_JOINERS)
@pytest.mark.parametrize("members", [1, 2])
def test_an_odd_joiner_never_ends_the_others(how: str, members: int) -> None:
    kind, text = ODD_JOINERS[how]
    with starters(members, partial(bad.joins_oddly, how=how)) as some:
        numbers = list(range(members))
        some.await_events(numbers, "joined")
        (joiner,) = some.start()
        ends = some.await_ends(numbers)
        assert [(end["what"], end["size"]) for end in ends] == [("end", members)] * members, ends
        some.processes[joiner].join(limit(30))
        (raised,) = some.events(joiner, "raised")
        assert raised["kind"] == kind, raised
        assert text in raised["text"], raised
        assert is_sentence(raised["text"])


def runs_another_script(plan: Plan, log: Log) -> None:
    """The third process is of another job; the fourth has other words."""
    words = {2: ["other.py"], 3: ["train.py", "--lr", "0.2"]}
    sys.argv = words.get(plan.number, ["/somewhere/train.py", "--lr", "0.1"])
    run(plan, log)


def test_a_job_without_a_name_is_not_joined_by_another(tmp_path: Path) -> None:
    with trainees(2, runs_another_script, epochs=10**6, pause=0.01) as some:
        some.await_events([0, 1], "step")
        (other,) = some.start()
        some.processes[other].join(limit(30))
        (raised,) = some.events(other, "raised")
        assert raised["kind"] == "ValueError"
        told = "the world at this store runs train.py, and this process other.py: give each job a"
        assert told in raised["text"]
        assert is_sentence(raised["text"])
        (same,) = some.start(errors=str(tmp_path / "errors"))
        some.await_events([same], "tracked")
        text = (tmp_path / "errors").read_text()
        assert "as `train.py --lr 0.1`, and this process as `train.py --lr 0.2`" in text
        some.await_events([0, 1], "change")
        assert not any(some.events(number, "raised") for number in (0, 1, same))


def test_two_that_differ_end_both() -> None:
    """Nobody knows which of them is right."""
    for event in raised_by_all(bad.differs_at_once, 2):
        assert event["kind"] == "Diverged", event


def test_a_program_may_catch_its_own_error() -> None:
    """Then it takes the step again, from the state before it; the others wait for it."""
    results = []
    for errors in (0, 2):
        with starters(2, partial(bad.raises_and_goes_on, errors=errors)) as some:
            ends = some.await_ends([0, 1])
            assert [(end["size"], end["caught"]) for end in ends] == [(2, 0), (2, errors)]
            results += [end["same"] for end in ends]
    assert results == [results[0]] * 4


def test_an_error_that_a_death_has_caused_is_the_groups() -> None:
    with starters(3, bad.wraps_errors) as some:
        assert [end["size"] for end in some.await_ends([0, 2])] == [2, 2]


def raised_by_all(program: Program, count: int = 3) -> list[Event]:
    with starters(count, program) as some:
        for process in some.processes:
            process.join(limit(60))
        return [some.events(number, "end", "raised")[-1] for number in range(count)]


@pytest.mark.parametrize(
    ("program", "kind", "text"),
    [
        (bad.skips_a_step, "Diverged", "ranks apply different updates after step 3: rank 1 from"),
        (bad.has_another_rate, "Diverged", "learning rates .* differ .* after step 0: rank 1"),
        (bad.has_another_loader, "Diverged", "samplers differ .* after step 0: rank 1 from"),
        (bad.makes_fewer_steps, "Diverged", "ranks apply different updates after step 8: rank 1"),
        (bad.tracks_other_things, "ValueError", "every rank must track the same things"),
        (bad.calls_other_operations, "Diverged", "failed 3 times in a row, and no rank"),
    ],
)
def test_all_end(program: Any, kind: str, text: str) -> None:
    for number, event in enumerate(raised_by_all(program)):
        assert event["what"] == "raised", (number, event)
        assert event["kind"] == kind, (number, event)
        assert re.search(text, event["text"]), (number, event)
        assert is_sentence(event["text"])
