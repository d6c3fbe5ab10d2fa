"""Worlds that are lost, or have ended: what processes of other hosts do that come afterwards."""

from __future__ import annotations

import signal
import time
from functools import partial
from pathlib import Path

import pytest

from lab.limits import limit
from lab.trainee import Log, Plan, run
from lab.trainees import trainees
from ringcomm.elastic.lease import Lapse, are_gone, beat, succeed, were_given_up
from ringcomm.elastic.process import Process


class Keys(dict[str, bytes]):
    """A store, as far as a lease needs it."""

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def add(self, key: str, value: int) -> None:
        self.set(key, str(int(self.get(key, b"0")) + value))

    def delete_key(self, key: str) -> bool:
        return self.pop(key, None) is not None


def test_a_count_that_stands_still_lapses() -> None:
    now, keys = [0.0], Keys()
    members = (Process("a", "there", 1), Process("b", "there", 2))
    lapse, never = Lapse(10.0, lambda: now[0]), Lapse(None, lambda: now[0])
    for count in range(30):
        keys.set("alive/3", str(count))
        assert not lapse.look(keys, 3, members)
        now[0] += 9.0
    assert not lapse.look(keys, 3, members)
    assert not keys.check(["dead/a"])
    now[0] += 1.0
    assert lapse.look(keys, 3, members)
    assert keys.check(["dead/a", "dead/b"])
    now[0] += 10**6
    assert not never.look(keys, 3, members)


def test_those_that_were_given_up_are_told_apart() -> None:
    """By their own names: a store may know of a later world that never was in this one's place."""
    keys, members = Keys(), (Process("a", "there", 1), Process("b", "there", 2))
    assert not were_given_up(keys, members)
    keys.set("dead/c", "1")
    assert not were_given_up(keys, members)
    keys.set("dead/b", "1")
    assert were_given_up(keys, members)


def test_a_world_that_runs_takes_back_that_it_is_lost() -> None:
    """Nobody has founded another one: those that wait were too few."""
    now, keys = [0.0], Keys()
    members = (Process("a", "there", 1), Process("b", "there", 2))
    lapse = Lapse(10.0, lambda: now[0])
    assert not lapse.look(keys, 0, members)
    now[0] += 10.0
    assert lapse.look(keys, 0, members)
    assert are_gone(keys, members)
    assert not beat(keys, 0, members)
    assert not are_gone(keys, members)
    assert not lapse.look(keys, 0, members)


def test_a_world_that_was_succeeded_takes_nothing_back() -> None:
    keys, members = Keys(), (Process("a", "there", 1),)
    keys.set("dead/a", "1")
    succeed(keys, 0)
    assert beat(keys, 0, members)
    assert are_gone(keys, members)


def test_a_lost_world_is_founded_anew_from_elsewhere(tmp_path: Path) -> None:
    """Nobody there can see that its processes have ended."""
    with trainees(2, epochs=10**6, folder=str(tmp_path), pause=0.01) as some:
        deadline = time.monotonic() + limit(30)
        while not list(tmp_path.glob("step-*")):
            assert time.monotonic() < deadline, "no checkpoint was written"
            time.sleep(0.01)
        for number in (0, 1):
            some.kill(number)
        anew = some.start(2, elsewhere="another", lease=2.0)
        some.await_events(anew, "step")
        assert min(some.events(number, "tracked")[0]["step"] for number in anew) >= 5


def test_a_world_that_lost_its_lease_stops() -> None:
    """It was stopped for so long that others were founded in its place."""
    with trainees(2, epochs=10**6, pause=0.01) as some:
        some.await_events([0, 1], "step", 3)
        for number in (0, 1):
            some.kill(number, signal.SIGSTOP)
        anew = some.start(2, elsewhere="another", lease=2.0)
        some.await_events(anew, "step")
        for number in (0, 1):
            some.kill(number, signal.SIGCONT)
        some.await_events([0, 1], "raised")
        for number in (0, 1):
            (raised,) = some.events(number, "raised")
            assert raised["kind"] == "Evicted"
            assert "another world was founded in the place of this one" in raised["text"]


def test_one_that_comes_after_the_end_ends_too(tmp_path: Path) -> None:
    errors = tmp_path / "errors"
    with trainees(2) as some:
        some.await_ends([0, 1])
        (late,) = some.start(elsewhere="another", errors=str(errors))
        some.processes[late].join(limit(30))
        assert some.processes[late].exitcode == 0
        assert "has come to its end, so this process ends, too" in errors.read_text()
        more = some.start(2, elsewhere="another")
        some.await_ends(more)  # as many as found a world


def fails(plan: Plan, log: Log, error: type[BaseException]) -> None:
    """Both members raise an error; their programs have not come to their end."""
    if not plan.elsewhere:

        def interrupt(*_: object) -> None:
            raise error("on purpose")

        signal.signal(signal.SIGUSR2, interrupt)
    run(plan, log)


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_after_an_error_no_lease_is_waited_for(error: type[BaseException]) -> None:
    with trainees(2, partial(fails, error=error), epochs=10**6, pause=0.01) as some:
        some.await_events([0, 1], "step", 3)
        for number in (0, 1):
            some.kill(number, signal.SIGUSR2)
        for number in (0, 1):
            some.processes[number].join(limit(30))
        began = time.monotonic()
        (late,) = some.start(elsewhere="another")
        time.sleep(12)
        assert some.processes[late].exitcode is None, "it took an error for the end"
        some.start(elsewhere="another")
        some.await_events([late], "step")
        assert time.monotonic() - began < limit(30)
