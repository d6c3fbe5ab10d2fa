"""Hosts that refuse each other's connections although their processes live: one world at most.

A firewall that rejects does that, and so does a gateway that starts again. From afar it looks like
the end of a process.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import permutations
from pathlib import Path

import pytest

from lab.hosts import Hosts
from lab.limits import limit
from lab.namespaces import missing
from lab.site import SILENCE, Site, site

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.xdist_group("hosts"),
    pytest.mark.timeout(400),
]

Pairs = list[tuple[int, int]]  # a host, and another that it refuses


@contextmanager
def refusing(hosts: Hosts, pairs: Pairs) -> Iterator[None]:
    """Have the first host of each pair refuse the second one."""
    for pair in pairs:
        hosts.refuse(*pair)
    try:
        yield
    finally:
        for pair in pairs:
            hosts.accept(*pair)


def await_one_world(place: Site, numbers: list[int], seconds: float) -> list[int]:
    """Wait until each one has stopped or works with all others that have not; return these."""
    trainees, deadline = place.trainees, time.monotonic() + limit(seconds)
    while True:
        at = time.monotonic()
        time.sleep(0.3)  # many steps
        stopped = [n for n in numbers if trainees.events(n, "raised")]
        stay = [n for n in numbers if n not in stopped]
        sizes = {n: {event["size"] for event in place.steps_after(n, at)} for n in stay}
        if all(seen == {len(stay)} for seen in sizes.values()):
            break
        assert time.monotonic() < deadline, f"sizes of the worlds: {sizes}, stopped: {stopped}"
    for number in stopped:
        assert trainees.events(number, "raised")[0]["kind"] == "Evicted"
    trainees.check_equal()
    trainees.check_ledger()
    return stay


BOTH: Pairs = [(0, 1), (1, 0)]
ONE: Pairs = [(1, 0)]
HALVES = [0, 0, 1, 1]
THREE_AND_ONE = [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("pairs", "places", "seconds"),
    [
        pytest.param(BOTH, HALVES, 1.0, id="both-halves-1s"),
        pytest.param(ONE, THREE_AND_ONE, 2.0 * SILENCE, id="one-3|1"),
        pytest.param(ONE, HALVES, 1.0, id="one-halves-1s", marks=pytest.mark.slow),
        pytest.param(ONE, HALVES, 60.0, id="one-halves-60s", marks=pytest.mark.slow),
        pytest.param(BOTH, HALVES, 0.5, id="both-halves-0.5s", marks=pytest.mark.slow),
        pytest.param(BOTH, HALVES, 5.0, id="both-halves-5s", marks=pytest.mark.slow),
        pytest.param(BOTH, HALVES, 60.0, id="both-halves-60s", marks=pytest.mark.slow),
        pytest.param(BOTH, THREE_AND_ONE, 1.0, id="both-3|1-1s", marks=pytest.mark.slow),
        pytest.param(BOTH, THREE_AND_ONE, 20.0, id="both-3|1-20s", marks=pytest.mark.slow),
    ],
)
def test_two_hosts_refuse(tmp_path: Path, pairs: Pairs, places: list[int], seconds: float) -> None:
    """The store is reached by both sides, and the one that refuses may be the smaller one."""
    with site(3, tmp_path, 2) as place:
        numbers = place.start(*places)
        with refusing(place.hosts, pairs):
            time.sleep(seconds)
        stay = await_one_world(place, numbers, 4 * SILENCE + 10)
        assert len(stay) >= 2, "the smaller side has gone on"
        if places == THREE_AND_ONE:
            assert stay in (numbers, numbers[:3])


def test_a_short_refusal_costs_nobody(tmp_path: Path) -> None:
    with site(3, tmp_path, 2) as place:
        numbers = place.start(*HALVES)
        with refusing(place.hosts, BOTH):
            time.sleep(0.3)
        assert await_one_world(place, numbers, 4 * SILENCE + 10) == numbers


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [1.0, 20.0])
@pytest.mark.parametrize("ways", ["both", "out", "in"])
def test_one_of_three_sites_is_refused(tmp_path: Path, ways: str, seconds: float) -> None:
    """The two sites that reach each other are the majority."""
    out: Pairs = [(2, 0), (2, 1)]
    inward: Pairs = [(0, 2), (1, 2)]
    pairs = {"both": out + inward, "out": out, "in": inward}[ways]
    with site(4, tmp_path, 3) as place:
        numbers = place.start(0, 0, 1, 1, 2, 2)
        with refusing(place.hosts, pairs):
            time.sleep(seconds)
        stay = await_one_world(place, numbers, 4 * SILENCE + 10)
        assert set(stay) >= set(numbers[:4])


@pytest.mark.slow
def test_all_of_three_sites_refuse(tmp_path: Path) -> None:
    """No site is a majority, not even with the store: none goes on alone."""
    with site(4, tmp_path, 3) as place:
        numbers = place.start(0, 1, 2)
        with refusing(place.hosts, list(permutations(range(3), 2))):
            time.sleep(1.0)
        stay = await_one_world(place, numbers, 4 * SILENCE + 10)
        assert len(stay) != 1
