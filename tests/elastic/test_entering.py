"""Processes that fail while they enter a world: what it costs its members, and when they may."""

from __future__ import annotations

import signal

from lab.limits import limit
from lab.trainee import Log, Plan, run
from lab.trainees import trainees
from ringcomm.elastic import changes
from ringcomm.elastic.process import Process
from ringcomm.elastic.watch import BAR_GROWS, BAR_LONGEST, BAR_SECONDS, Bars

AGAIN = {"RANK": "7"}  # as a launcher gives it to a process that it starts anew


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


def hurried(plan: Plan, log: Log) -> None:
    changes.GUEST_SECONDS = 1.0
    run(plan, log)


def test_one_that_stops_while_it_enters_is_given_up() -> None:
    """Not after the timeout of operations, which is a minute here."""
    with trainees(2, hurried, pause=0.02, epochs=1000) as some:
        some.await_events([0, 1], "step")
        (stuck,) = some.start(fates=((2, "stuck", 0),))
        some.await_events([stuck], "dies")
        some.await_events([0, 1], "change")
        (died,) = some.events(stuck, "dies")
        assert some.events(0, "change")[0]["at"] - died["at"] < limit(3)
        count = len(some.events(0, "step"))
        some.await_events([0, 1], "step", count + 20)
        some.kill(stuck, signal.SIGCONT)
        some.await_events([stuck], "tracked")  # it asks again
        some.await_events([0, 1, stuck], "step", 20)
        some.check_equal()
