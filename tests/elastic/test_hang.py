"""A rank that hangs ends itself, and the others go on; one that is only slow does not."""

from __future__ import annotations

import re
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lab.limits import limit
from lab.ranks import Rank, error_of, ranks
from lab.trainees import trainees
from ringcomm.elastic import hang
from ringcomm.elastic.epochs import Epochs
from ringcomm.elastic.hang import FEWEST, STOPPED_SECONDS, USUAL_STEPS, Hang, Progress
from ringcomm.elastic.process import Process
from ringcomm.elastic.rendezvous import Record
from ringcomm.tools.world.state import worlds_in


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def steps(progress: Progress, clock: Clock, count: int, seconds: float) -> None:
    for _ in range(count):
        progress.begin()
        clock.now += seconds
        progress.end(counted=True)


def test_what_is_too_long() -> None:
    clock = Clock()
    progress = Progress(30.0, clock)
    progress.begin()
    clock.now += 1000
    assert progress.still_for() == 0, "the first steps compile"
    progress.end()
    steps(progress, clock, FEWEST, 2.0)
    clock.now += 1000
    assert progress.still_for() == 0, "outside of a step"
    progress.begin()
    clock.now += USUAL_STEPS * 2.0
    assert progress.still_for() == 0
    clock.now += 1
    assert progress.still_for() == USUAL_STEPS * 2.0 + 1
    progress.move()
    assert progress.still_for() == 0
    progress.end()
    steps(progress, clock, 200, 0.01)
    progress.begin()
    clock.now += 30
    assert progress.still_for() == 0
    clock.now += 1
    assert progress.still_for() == 31
    never = Progress(None, clock)
    steps(never, clock, FEWEST, 1.0)
    never.begin()
    clock.now += 10**6
    assert never.still_for() == 0


def test_one_that_was_stopped_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its threads did not run either: it has to be given time again once it wakes."""
    clock, ended, keys = Clock(), list[float](), dist.HashStore()
    monkeypatch.setattr(hang, "end_of_a_hang", lambda seconds, _: ended.append(seconds))
    monkeypatch.setattr(hang, "operations", lambda: (False, 0.0))
    keys.set("waits/here", "1")
    progress = Progress(30.0, clock)
    watches = Hang(progress, lambda: False, "me", clock)
    steps(progress, clock, FEWEST, 0.1)
    progress.begin()
    watches.look(keys, "here")
    clock.now += 1000.0
    watches.look(keys, "here")
    assert not ended
    for _ in range(32):
        clock.now += 1.0
        watches.look(keys, "here")
    assert ended[0] == 31.0


def test_one_that_was_given_up_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps usually take long, so that the others have waited no longer for it."""
    clock, ended, left = Clock(), list[tuple[float, str]](), list[bool]()
    monkeypatch.setattr(hang, "end_of_a_hang", lambda *told: ended.append(told))
    monkeypatch.setattr(hang, "operations", lambda: (False, 0.0))
    progress = Progress(30.0, clock)
    steps(progress, clock, FEWEST, 100.0)
    watches = Hang(progress, lambda: False, "me", clock)
    progress.begin()
    for seconds in range(60):
        clock.now += 1.0
        if seconds == 45:
            left.append(True)
        watches.look(dist.HashStore(), "here", lambda: bool(left))
    assert ended[0] == (46.0, "gave it up")


@pytest.mark.parametrize("in_an_operation", [True, False])
def test_one_that_has_waited_does_not_hang(
    monkeypatch: pytest.MonkeyPatch, in_an_operation: bool
) -> None:
    """It has said in the store that it waits, and its main thread is about to go on."""
    clock, ended, keys = Clock(), list[float](), dist.HashStore()
    waits, last = True, 0.0
    monkeypatch.setattr(hang, "end_of_a_hang", lambda seconds, _: ended.append(seconds))
    monkeypatch.setattr(hang, "operations", lambda: (waits and in_an_operation, last))
    progress = Progress(30.0, clock)
    watches = Hang(progress, lambda: waits and not in_an_operation, "me", clock)
    steps(progress, clock, FEWEST, 0.1)
    progress.begin()
    for _ in range(100):
        clock.now += 1.0
        watches.look(keys, "here")
    assert keys.check(["waits/here"])
    waits, last = False, clock.now
    for _ in range(30):
        clock.now += 1.0
        watches.look(keys, "here")
    assert not ended
    clock.now += 1.0
    watches.look(keys, "here")
    assert ended == [31.0]


def waits_and_goes_on(rank: Rank) -> bool:
    """Rank 1 comes once it knows that rank 0 waits."""
    tensor, before = torch.ones(1), time.monotonic()
    if rank.index == 0:
        work = dist.all_reduce(tensor, async_op=True)
        while not hang.operations()[0]:
            time.sleep(0.001)
        dist.send(tensor, 1)
        work.wait()
    else:
        dist.recv(torch.empty(1), 0)
        dist.all_reduce(tensor)
    waits, ended = hang.operations()
    return not waits and before < ended < time.monotonic()


def waits_in_vain(rank: Rank) -> bool:
    """Rank 1 ends the group: at no moment does rank 0 neither wait nor know when it has waited."""
    group = dist.new_group()
    before = time.monotonic()
    if rank.index == 0:
        several = [dist.all_reduce(torch.ones(1), group=group, async_op=True) for _ in range(3)]
        while not hang.operations()[0]:
            time.sleep(0.001)
        dist.send(torch.ones(1), 1)
        while (told := hang.operations())[0]:
            pass
        assert all(error_of(work.wait)[0] for work in several)
        return before < told[1] < time.monotonic() and not hang.operations()[0]
    dist.recv(torch.empty(1), 0)
    group._get_backend(torch.device("cpu")).abort()
    return True


def test_when_the_last_operation_ended() -> None:
    with ranks(2) as some:
        assert some(waits_and_goes_on) == [True, True]
        assert some(waits_in_vain) == [True, True]


def test_the_store_tells_who_is_left() -> None:
    keys, mine = dist.HashStore(), Process("me", "host", 1)
    epochs: Any = SimpleNamespace(life=1, epoch=4, me=mine)
    is_left = partial(Epochs.is_left, epochs, keys)
    assert not is_left()
    for life, epoch, members, left in (
        (1, 4, (), False),
        (1, 6, (mine,), False),
        (1, 6, (Process("you", "host", 2),), True),
        (0, 9, (), False),
        (2, 0, (), False),  # this one's life is over, which it learns by itself
    ):
        keys.set("world", Record(life, epoch, True, members).to_text())
        assert is_left() == left


def await_reason(folder: Path, pid: int | None, why: str) -> None:
    """Wait until the world's file says why a process is gone."""
    deadline = time.monotonic() + limit(10)
    told: dict[int, str] = {}
    while told.get(pid or 0) != why:
        assert time.monotonic() < deadline, told
        time.sleep(0.05)
        for world in worlds_in(folder):
            lost = (lost for change in world.stats["history"] for lost in change["lost"])
            told |= {process["pid"]: process["why"] for process in lost}


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_hangs_ends_itself(tmp_path: Path, size: int) -> None:
    """Operations would wait for a minute."""
    errors, fates = tmp_path / "errors", ((1, "hangs", 15),)
    more: dict[str, Any] = {"errors": str(errors), "settings": {"RINGCOMM_TRACE": str(tmp_path)}}
    patience = STOPPED_SECONDS + 2  # one that is not scheduled for long was stopped, and is well
    with trainees(size, fates=fates, hung_after=patience, epochs=1000, **more) as some:
        some.await_events([1], "dies")
        (began,) = some.events(1, "dies")
        others = [number for number in range(size) if number != 1]
        some.await_events(others, "change")
        assert some.events(0, "change")[0]["at"] - began["at"] < limit(12)
        some.processes[1].join(limit(10))
        assert some.processes[1].exitcode == 1
        text = errors.read_text()
        assert re.search(r"has hung for \d+ s while others waited for it: it ends itself", text)
        assert "in _hang" in text, text
        (anew,) = some.start(hung_after=patience)
        some.await_events([anew], "tracked")
        await_reason(tmp_path, some.processes[1].pid, "hung")
        some.check_equal()
        some.check_ledger()


def test_one_that_nobody_waits_for_does_not_hang(tmp_path: Path) -> None:
    """All ranks are in it, as when they compile."""
    fates = tuple((number, "hangs", 15) for number in range(2))
    with trainees(2, fates=fates, hung_after=0.3, epochs=1000) as some:
        some.await_events([0, 1], "dies")
        time.sleep(4)
        assert [process.exitcode for process in some.processes] == [None, None]
