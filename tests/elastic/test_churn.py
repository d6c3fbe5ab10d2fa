"""Ranks die and come at any time: the bits are those of a run in which all of it was planned."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from lab import churn
from lab.limits import limit, seed
from lab.namespaces import missing
from lab.site import NO_NAMES, site
from lab.trainees import Trainees, trainees
from lab.weather import Weather

FOUNDERS = 3


WHAT = ("step", "digest", "buffers", "random", "python")


def steps(some: Trainees) -> dict[int, str]:
    """The digest of parameters and optimizer after each step."""
    some.check_equal()
    some.check_ledger()
    return {event["step"]: event["digest"] for event in some.all_events("step")}


def ends(some: Trainees, numbers: list[int]) -> dict[int, list[Any]]:
    """Return the ends of those that left in good order, by their place in `numbers`."""
    events = {at: some.events(number, "end") for at, number in enumerate(numbers)}
    return {at: [end[0][name] for name in WHAT] for at, end in events.items() if end}


@pytest.mark.parametrize(
    ("seconds", "pauses"),
    [
        (4, (0.1, 0.8)),
        pytest.param(120, (0.5, 2), marks=pytest.mark.slow),
        pytest.param(1200, (0.5, 2), marks=pytest.mark.soak),
    ],
)
@pytest.mark.timeout(1800)
def test_bits(seconds: float, pauses: tuple[float, float]) -> None:
    draw = random.Random(seed())
    with trainees(FOUNDERS, epochs=10**6, pause=0.01) as some:
        kills = churn.churn(some, seconds, pauses, draw)
        script = churn.script_of(some, FOUNDERS)
        churned = steps(some), some.ledger()
        last = ends(some, script.original)
    with trainees(0, churn.act, start=FOUNDERS, epochs=10**6) as some:
        churn.perform(script, some)
        numbers = list(range(len(script.original)))
        some.await_ends(numbers, seconds=60 + seconds)
        planned = steps(some), some.ledger()
        ended = ends(some, numbers)
    print(f"{kills} killed, {changes_in(script)} changes in {max(churned[0])} steps")
    check_alike(churned, planned)
    assert last == {number: ended[number] for number in last}
    assert last


def check_alike(churned: tuple[Any, Any], planned: tuple[Any, Any]) -> None:
    """Require equal parameters after each step, and the same batches in it."""
    for what, mine, other in zip(("parameters", "batches"), churned, planned, strict=True):
        differ = [at for at in sorted({*mine, *other}) if mine.get(at) != other.get(at)]
        assert not differ, f"the {what} are others first at {differ[0]}, of {max(mine)}"


def changes_in(script: churn.Script) -> int:
    return len(script.joins) + len(script.exits)


PATIENCE = {"dead_after": 8.0, "settings": {"RINGCOMM_RESUME_SECONDS": "8", **NO_NAMES}}


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.xdist_group("hosts")
@pytest.mark.parametrize(
    "seconds",
    [
        8,
        pytest.param(120, marks=pytest.mark.slow),
        pytest.param(1200, marks=pytest.mark.soak),
    ],
)
@pytest.mark.timeout(3600)
def test_bits_in_bad_weather(tmp_path: Path, seconds: float) -> None:
    """Ranks of three hosts die and come, and nobody is lost by what else happens to them."""
    draw = random.Random(seed())
    plan: dict[str, Any] = {"start": FOUNDERS, "epochs": 10**6, **PATIENCE}
    with site(3, tmp_path, 0, **plan) as place:
        weather = Weather(place, draw)
        for host in range(FOUNDERS):
            weather.start_on(host)
        kills = churn.churn(place.trainees, seconds, (0.1, 1), draw, weather)
        script = churn.script_of(place.trainees, FOUNDERS)
        churned = steps(place.trainees), place.trainees.ledger()
        last = ends(place.trainees, script.original)
    again = tmp_path / "again"
    again.mkdir()
    with site(3, again, 0, churn.act, **plan) as place:
        hosts = [place.hosts.namespaces[weather.hosts[number]] for number in script.original]
        churn.perform(script, place.trainees, hosts)
        numbers = list(range(len(script.original)))
        place.trainees.await_ends(numbers, seconds=60 + seconds)
        planned = steps(place.trainees), place.trainees.ledger()
        ended = ends(place.trainees, numbers)
    print(f"{kills} killed, {weather.struck}, {changes_in(script)} changes")
    assert sum(weather.struck.values()) > 0
    check_alike(churned, planned)
    assert last == {number: ended[number] for number in last}
    assert last


@pytest.mark.parametrize(
    ("epochs", "guests"),
    [
        (60, 4),
        pytest.param(2_000, 60, marks=pytest.mark.slow),
        pytest.param(10_000, 500, marks=pytest.mark.soak),
    ],
)
@pytest.mark.timeout(3600)
def test_nothing_is_left_behind(epochs: int, guests: int) -> None:
    """Groups fail, ranks come, leave and die: a survivor holds no more for it."""
    with trainees(2, churn.restless, epochs=10**6) as some:
        for guest in range(2, 2 + guests):
            some.start()
            some.await_events([guest], "tracked")
            some.kill(guest, signal.SIGTERM if guest % 2 else signal.SIGKILL)
        some.await_events([0], "holds", len(some.events(0, "holds")) + 2)
        warm = some.events(0, "holds")[-1]
        deadline = time.monotonic() + limit(epochs / 10)
        while (last := some.events(0, "holds")[-1])["epoch"] < warm["epoch"] + epochs:
            assert time.monotonic() < deadline, last
            time.sleep(0.05)
        for guest in range(2 + guests, 2 + 2 * guests):
            some.start()
            some.await_events([guest], "tracked")
            some.kill(guest, signal.SIGTERM if guest % 2 else signal.SIGKILL)
        some.await_events([0], "holds", len(some.events(0, "holds")) + 2)
        last = some.events(0, "holds")[-1]
    print(warm, last)
    assert last["descriptors"] <= warm["descriptors"] + 2
    assert last["threads"] <= warm["threads"] + 3  # a request to the store may have one just then
    assert last["mappings"] <= warm["mappings"] + 10
    assert last["memory"] <= warm["memory"] + 4096 + 4 * epochs
