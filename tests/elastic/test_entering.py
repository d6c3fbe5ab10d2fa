"""Processes that fail while they enter a world: what it costs its members, and when they may."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch.distributed as dist
from conftest import forms

from lab.fates import STOPPED
from lab.limits import claim, limit
from lab.trainee import Log, Plan, run
from lab.trainees import Trainees, trainees
from ringcomm.elastic import pulse, transfer, watch
from ringcomm.elastic.process import Process
from ringcomm.elastic.pulse import (
    BEAT_SECONDS,
    MISSED,
    STEP,
    STILL_RATE,
    STILL_SECONDS,
    Guard,
    Pulses,
    Signs,
    heard,
)
from ringcomm.elastic.state import Tracked
from ringcomm.elastic.watch import BAR_GROWS, BAR_LONGEST, BAR_SECONDS, Bars

AGAIN = {"RANK": "7"}  # as a launcher gives it to a process that it starts anew
PAUSE = 0.02  # seconds of a step


def test_each_failure_bars_for_longer() -> None:
    now = [100.0]
    bars = Bars(lambda: now[0])
    first, anew = Process("a", "host", 1, rank=7), Process("b", "host", 2, rank=7)
    other = Process("c", "host", 3, rank=8)
    assert not bars.barred(first)
    assert bars.bar(first) == BAR_SECONDS
    assert bars.barred(anew)
    assert not bars.barred(other)
    now[0] += BAR_SECONDS
    assert not bars.barred(anew)
    assert bars.bar(anew) == BAR_SECONDS * BAR_GROWS
    seconds = [bars.bar(anew) for _ in range(10)]
    assert seconds[-1] == BAR_LONGEST
    bars.forget(first)
    assert not bars.barred(anew)
    assert bars.bar(anew) == BAR_SECONDS


def test_one_that_failed_beside_another_enters_alone() -> None:
    """Guests enter together or not at all, and nobody knows which of them was to blame."""
    bars = Bars(lambda: 0.0)
    blamed, innocent, new = (Process(name, "host", 1, rank=rank) for rank, name in enumerate("abc"))
    for process in (blamed, blamed, innocent):
        bars.bar(process)
    assert bars.choose([blamed, innocent, new], 1, 8) == [new]
    assert bars.choose([blamed, innocent], 1, 8) == [innocent]
    assert bars.choose([blamed, innocent], 1, 0) == []
    bars.forget(innocent)
    assert bars.choose([blamed, innocent, new], 1, 8) == [innocent, new]


def test_one_that_ends_as_it_enters_is_blamed_alone() -> None:
    """Those that entered with it live, answer, and are called at once."""
    bars = Bars(lambda: 0.0)
    ends, lives, waits = (Process(name, "host", rank, rank=rank) for rank, name in enumerate("abc"))
    for process in (ends, lives):
        bars.bar(process, [ends, lives])
    bars.pardon([ends, lives, waits])  # no one knows yet whose fault it was
    assert bars.barred(ends)
    assert bars.barred(lives)
    bars.pardon([Process("d", "host", 9, rank=0), lives, waits])
    assert bars.barred(ends)
    assert not bars.barred(lives)
    assert bars.choose([lives, waits], 1, 8) == [lives, waits]


def test_one_that_died_while_it_entered_waits() -> None:
    """Started anew it enters, but not at once; another one does not wait for that."""
    with trainees(2, pause=0.02, epochs=1000) as some:
        some.await_events([0, 1], "step")
        (dies,) = some.start(settings=AGAIN, fates=((2, "receive", 0),))
        some.await_events([0, 1], "decided", 2)
        some.processes[dies].join(limit(60))
        (died,) = some.events(dies, "dies")
        anew, other = some.start(settings=AGAIN) + some.start()
        some.await_events([anew, other], "tracked")
        (waited,) = some.events(anew, "tracked")
        assert waited["at"] - died["at"] > BAR_SECONDS
        some.await_events([0, 1, anew, other], "step", 20)
        some.check_equal()


def longest_pause(some: Trainees) -> float:
    """Return the longest time between two steps of the members, less what a step takes."""
    times = [[event["at"] for event in some.events(n, "step")] for n in (0, 1)]
    return max(b - a for member in times for a, b in pairwise(member)) - PAUSE


@pytest.mark.parametrize(
    "phase", forms(["welcome", "enter", "entering", "entered", "receive", "received"], "enter")
)
def test_one_that_stops_while_it_enters_costs_half_a_second(phase: str) -> None:
    """The timeout of operations is a minute here."""
    with trainees(2, pause=PAUSE, epochs=1000, hasty=True) as some:
        some.await_events([0, 1], "step", 10)
        (stops,) = some.start(fates=((2, STOPPED + phase, 0),))
        some.await_events([stops], "dies")
        some.await_events([0, 1], "change")
        count = len(some.events(0, "step"))
        some.await_events([0, 1], "step", count + 20)
        pause = longest_pause(some)
        print(f"{phase}: {pause:.3f} s, {some.events(0, 'change')[0]['ms']:.0f} ms")
        assert pause < claim(0.5)
        assert not some.events(0, "change")[0]["joined"]
        some.kill(stops, signal.SIGCONT)
        some.await_events([stops], "tracked")  # it asks again
        some.await_events([0, 1, stops], "step", 20)
        some.check_equal()


def test_a_crash_loop_costs_half_a_second_in_all() -> None:
    with trainees(2, pause=PAUSE, epochs=1000, hasty=True) as some:
        some.await_events([0, 1], "step", 10)
        for _ in range(2):
            (dies,) = some.start(settings=AGAIN, fates=((len(some.processes), "receive", 0),))
            some.processes[dies].join(limit(60))
        count = len(some.events(0, "step"))
        some.await_events([0, 1], "step", count + 20)
        changes = some.events(0, "change")
        print([change["ms"] for change in changes])
        assert sum(change["ms"] for change in changes) < claim(500)


def slow(plan: Plan, log: Log) -> None:
    """Take a long time for each piece of the state, as over a slow network."""
    if plan.number == 2:
        cut = transfer.pieces

        def pieces(*args: Any) -> Iterator[Any]:
            for piece in cut(*args):
                time.sleep(1)
                yield piece

        transfer.pieces = pieces  # type: ignore[assignment]
    run(plan, log)


def test_one_that_is_slow_is_waited_for() -> None:
    with trainees(2, slow, pause=PAUSE, epochs=1000) as some:
        some.await_events([0, 1], "step")
        some.start()
        some.await_events([0, 1], "change")
        assert some.events(0, "change")[0]["joined"]
        counts = [len(some.events(number, "step")) for number in (0, 1)]
        for number, count in enumerate(counts):
            some.await_events([number], "step", count + 2)
        assert longest_pause(some) > 1


def faint(plan: Plan, log: Log) -> None:
    """Give signs of life more rarely than the members look for them, as on a busy machine."""
    watch.BAR_SECONDS, watch.BAR_GROWS = 0.1, 1
    if plan.number == 2:
        pulse.BEAT_SECONDS = 2.5 * pulse.MISSED * pulse.BEAT_SECONDS
        load = Tracked.finish

        def finish(self: Tracked) -> None:
            time.sleep(2 * pulse.BEAT_SECONDS)
            load(self)

        Tracked.finish = finish  # type: ignore[method-assign]
    run(plan, log)


def test_one_that_was_given_up_wrongly_gets_more_time() -> None:
    with trainees(2, faint, pause=PAUSE, epochs=1000, hasty=True) as some:
        some.await_events([0, 1], "step")
        (guest,) = some.start()
        some.await_events([guest], "tracked")
        some.await_events([0, 1, guest], "step", 20)  # it enters, after however many attempts
        assert any(change["joined"] for change in some.events(0, "change"))
        some.check_equal()


def test_signs_of_life_and_progress() -> None:
    now = [0.0]
    signs = Signs(0, clock=lambda: now[0])
    assert [signs.fault(count, 0) for count in (1, 1, 1, 2)] == [""] * 4
    silent = [signs.fault(2, 0) for _ in range(MISSED)]
    assert silent == [""] * (MISSED - 1) + ["gives no sign of life"]
    patient = Signs(2, clock=lambda: now[0])
    assert sum(not patient.fault(0, 0) for _ in range(100)) == 4 * MISSED - 1
    far = Signs(0, trip=0.2, clock=lambda: now[0])
    assert sum(not far.fault(0, 0) for _ in range(100)) * BEAT_SECONDS > 8 * 0.2
    living = Signs(0, clock=lambda: now[0])
    for count in range(1, 100):
        now[0] += 1
        assert living.fault(count + count // 9 * STEP, 0) == ""
    for count in range(int(STILL_SECONDS) + 3):
        now[0] += 1
        assert living.fault(100 + count + 11 * STEP, int(5 * STILL_RATE)) == ""
    now[0] += 5
    assert "no progress" in living.fault(1000 + 11 * STEP, int(5 * STILL_RATE))


def test_all_members_hear_that_a_guest_is_silent() -> None:
    keys = dist.HashStore()
    pulses = Pulses(keys, "0/1", [(Process("a", "host", 1), 0)])
    keys.add("pulse/a", 1)
    assert [pulses.fault() for _ in range(MISSED)] == [""] * MISSED
    assert heard(keys, "0/1") == ""
    assert (
        pulses.fault()
        == heard(keys, "0/1")
        == ("host process 1 gives no sign of life while it enters")
    )
    assert heard(keys, "0/2") == ""


def test_a_guest_that_has_the_state_may_wait_for_a_slower_one() -> None:
    keys, now = dist.HashStore(), [0.0]
    guests = [(Process("quick", "host", 1), 0), (Process("slow", "host", 2), 0)]
    pulses = Pulses(keys, "0/1", guests, lambda: now[0])
    for _ in range(3 * int(STILL_SECONDS)):
        now[0] += 1
        keys.add("pulse/quick", 1)
        keys.add("pulse/slow", 1 + STEP)
        assert pulses.fault() == ""
    for _ in range(int(STILL_SECONDS) + 1):  # until neither of them makes progress
        assert pulses.fault() == ""
        now[0] += 1
        keys.add("pulse/quick", 1)
        keys.add("pulse/slow", 1)
    assert "no progress" in pulses.fault()


def test_a_guest_whose_store_is_lost_is_given_up() -> None:
    gave_up = threading.Event()

    def fault() -> str:
        raise dist.DistStoreError("lost")

    guard = Guard(fault, gave_up.set)
    assert gave_up.wait(limit(5))
    with pytest.raises(dist.DistBackendError, match="lost"):
        guard.check()
