"""How worlds come about and are joined, when processes are late, stopped, too few or too many."""

from __future__ import annotations

import json
import re
import signal
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from lab.limits import limit
from lab.trainees import Event, Trainees, trainees
from ringcomm.elastic import rendezvous
from ringcomm.elastic.lease import Lapse
from ringcomm.elastic.process import Process
from ringcomm.elastic.rendezvous import Record, Rendezvous, answer


def await_raised(some: Trainees, number: int, kind: str) -> str:
    """Wait until a trainee has ended by an error of that kind; returns its text."""
    some.await_events([number], "raised")
    (event,) = some.events(number, "raised")
    assert event["kind"] == kind, event
    return str(event["text"])


def end_well(some: Trainees, numbers: list[int]) -> None:
    """Have these leave, and look at what all have done."""
    for number in numbers:
        some.kill(number, signal.SIGTERM)
    some.await_ends(numbers)
    some.check_equal()
    some.check_ledger()


def steps(some: Trainees, number: int) -> int:
    return len(some.events(number, "step"))


def changes(some: Trainees, number: int) -> list[Event]:
    return some.events(number, "change")


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize(
    "phase", ["answered", pytest.param("found", marks=pytest.mark.slow), "founded"]
)
def test_founder_dies(phase: str, number: int) -> None:
    """The others found a world with one that comes later, or go on without it."""
    with trainees(3, epochs=10**6, fates=((number, phase, 0),)) as some:
        some.await_events([number], "dies")
        some.start()
        rest = [n for n in range(4) if n != number]
        some.await_events(rest, "step", 3)
        end_well(some, rest)


def test_late_founder() -> None:
    with trainees(3, start=4, epochs=10**6) as some:
        some.await_events([0, 1, 2], "began")
        some.start()
        some.await_events([0, 1, 2, 3], "step")
        assert all(event["size"] == 4 for event in some.all_events("joined"))
        end_well(some, [0, 1, 2, 3])


def test_nobody_comes() -> None:
    with trainees(1, start=2, joining=1) as some:
        text = await_raised(some, 0, "TimeoutError")
        assert re.match(r"waited \d+ s for 2 ranks to found a world", text)


def answer_late(store: Any, far: Process, ends: threading.Event) -> None:
    """Answer each call as one does whose every request to the store takes long."""
    while not ends.wait(0.01):
        if store.check(["call"]):
            name = json.loads(store.get("call").decode())["name"]
            time.sleep(0.3)
            answer(store, name, far)


def test_a_founder_waits_for_those_that_are_far_from_the_store() -> None:
    store, ends = dist.HashStore(), threading.Event()
    near, far = (Process(name, name, 1) for name in ("near", "far"))
    thread = threading.Thread(target=answer_late, args=(store, far, ends), daemon=True)
    thread.start()
    try:
        record = Rendezvous(store, near, start=2).enter(limit(10))
    finally:
        ends.set()
        thread.join()
    assert record is not None
    assert {process.uuid for process in record.members} == {"near", "far"}


def test_founders_that_died_before_they_met_are_succeeded_by_a_single_call() -> None:
    """If all called at once, nobody would answer."""
    store, dead = dist.HashStore(), Process("dead", "elsewhere", 1)
    store.set("world", Record(members=(dead,)).to_text())
    store.set("dead/dead", "1")
    founders = [Rendezvous(store, Process(name, name, 1), start=2) for name in "ab"]
    for founder in founders:
        founder.known = founder.record()
    assert [founder._may_found() for founder in founders] == [True, False]


def test_founders_are_given_up_that_all_died_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """They had said that they would meet, and nobody else can see that they are dead."""
    monkeypatch.setattr(rendezvous, "MEETING_SECONDS", 0.3)
    store, me = dist.HashStore(), Process("near", "near", 1)
    store.set("world", Record(0, 0, False, (Process("dead", "elsewhere", 1),)).to_text())
    record = Rendezvous(store, me).enter(limit(10))
    assert isinstance(record, Record)
    assert (record.life, record.members) == (1, (me,))


def test_a_world_is_founded_anew_that_was_lost_with_its_store() -> None:
    """Where it was served; those that wait learn of that from the store that was there before."""
    store, dead = dist.HashStore(), Process("dead", "elsewhere", 1)
    store.set("world", Record(0, 3, True, (dead,), "gone:1").to_text())

    def lost(address: str) -> None:
        raise dist.DistStoreError(address)

    near = Rendezvous(store, Process("near", "near", 1), lost, lapse=Lapse(0.5))
    record = near.ask(limit(10))
    assert isinstance(record, Record)
    assert record.life == 1


def test_too_few() -> None:
    """They wait for others, and go on with the one that comes, or end if none does."""
    with trainees(3, min_size=3, epochs=10**6, joining=10) as some:
        some.await_events([0, 1, 2], "step", 3)
        some.kill(2)
        some.await_events([0, 1], "change")
        at = steps(some, 0)
        some.start()
        some.await_events([3], "tracked")
        some.await_events([0], "step", at + 5)
        alone = [event for event in some.events(0, "step") if event["size"] < 3]
        assert len(alone) <= 1, "steps were made while ranks were too few"
        some.kill(1)
        for number in (0, 3):
            text = await_raised(some, number, "TooFew")
            assert text == "only 2 of at least 3 ranks are left: none came in 10 s"
        some.check_equal()
        some.check_ledger()


def test_most() -> None:
    """One too many waits, and so may die; another one comes in when there is room."""
    with trainees(2, max_size=2, epochs=10**6) as some:
        some.await_events([0, 1], "step")
        some.start(2)
        some.await_events([2, 3], "joined")
        some.await_events([0, 1], "step", steps(some, 0) + 50)
        assert not some.events(2, "tracked")
        some.kill(2)
        some.kill(1)
        some.await_events([3], "step", 3)
        assert all(event["size"] <= 2 for event in some.all_events("step"))
        end_well(some, [0, 3])


def test_two_at_once() -> None:
    with trainees(2, epochs=10**6) as some:
        some.await_events([0, 1], "step")
        some.start(2)
        some.await_events([2, 3], "step", 3)
        assert some.events(0, "step")[-1]["size"] == 4
        end_well(some, [0, 1, 2, 3])


@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_stopped(number: int) -> None:
    """A rank that is stopped for three seconds is awaited."""
    with trainees(3, epochs=10**6) as some:
        some.await_events([0, 1, 2], "step", 3)
        some.kill(number, signal.SIGSTOP)
        time.sleep(3)
        some.kill(number, signal.SIGCONT)
        some.await_events([0, 1, 2], "step", steps(some, 1) + 10)
        assert not some.all_events("change", "raised")
        end_well(some, [0, 1, 2])


@pytest.mark.parametrize("number", [0, 2])
def test_evicted(number: int) -> None:
    """A rank that is stopped for longer than operations wait is given up, and must not go on."""
    with trainees(3, epochs=10**6, operation=5.0, dead_after=5.0) as some:
        some.await_events([0, 1, 2], "step", 3)
        some.kill(number, signal.SIGSTOP)
        others = [n for n in range(3) if n != number]
        some.await_events(others, "change")
        assert all(change["size"] == 2 for n in others for change in changes(some, n))
        some.await_events(others, "step", steps(some, others[0]) + 5)
        some.kill(number, signal.SIGCONT)
        text = await_raised(some, number, "Evicted")
        assert "must not go on" in text
        some.processes[number].join(limit(10))
        assert some.processes[number].exitcode == 1
        end_well(some, others)
