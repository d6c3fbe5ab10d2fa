"""Elastic worlds over several hosts: lost processes, silent hosts, networks cut in two."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lab.namespaces import missing
from lab.site import SILENCE, site

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.xdist_group("hosts"),
    pytest.mark.timeout(400),
]


def test_a_process_is_killed_on_another_host(tmp_path: Path) -> None:
    with site(2, tmp_path, 0) as place:
        first, second, third = place.start(0, 1, 1)
        at = place.trainees.kill(third)
        place.await_size([first, second], 2, 20)
        change = place.trainees.events(first, "change")[0]
        print(f"kill to change: {change['at'] - at:.3f} s, stats {change['stats']}")
        at = place.trainees.kill(second)
        place.await_size([first], 1, 20)


def test_a_silent_host_is_left_by_the_side_with_the_store(tmp_path: Path) -> None:
    """Two halves: the one goes on that reaches the store, and the other one stops."""
    with site(3, tmp_path, 2) as place:
        numbers = place.start(0, 0, 1, 1)
        here, there = numbers[:2], numbers[2:]
        place.hosts.cut(1)
        at = time.monotonic()
        place.await_size(here, 2, SILENCE + 10)
        for number in there:
            assert place.await_stop(number, 3 * SILENCE + 10)["kind"] == "Evicted"
            assert all(event["size"] == 4 for event in place.steps_after(number, at))


def test_the_larger_part_of_a_network_goes_on(tmp_path: Path) -> None:
    """Three against two, and the store is with the two."""
    with site(2, tmp_path, 1) as place:
        numbers = place.start(0, 0, 0, 1, 1)
        more, less = numbers[:3], numbers[3:]
        place.hosts.cut(1)
        at = time.monotonic()
        place.await_size(more, 3, SILENCE + 10)
        for number in less:
            assert place.await_stop(number, 3 * SILENCE + 10)["kind"] == "Evicted"
            assert all(event["size"] == 5 for event in place.steps_after(number, at))


def test_without_the_store_two_halves_stop(tmp_path: Path) -> None:
    with site(3, tmp_path, 2) as place:
        numbers = place.start(0, 1)
        place.hosts.cut(2)  # the store's host
        at = time.monotonic()
        time.sleep(SILENCE)
        assert all(place.steps_after(number, at) for number in numbers), "they need no store"
        place.hosts.cut(1)
        for number in numbers:
            assert place.await_stop(number, 3 * SILENCE + 10)["kind"] == "Evicted"


def test_a_store_that_dies_stops_nothing(tmp_path: Path) -> None:
    with site(2, tmp_path, 0) as place:
        first, second, third = place.start(0, 1, 1)
        place.store.kill()
        place.store.wait()
        place.trainees.kill(second)
        place.await_size([first, third], 2, 20)


def test_a_connection_that_breaks_aborts_no_step(tmp_path: Path) -> None:
    with site(2, tmp_path, 0) as place:
        numbers = place.start(0, 0, 1, 1)
        for _ in range(20):
            place.hosts.kill_connections(1, probability=0.5, dst=place.hosts.addresses[0])
            time.sleep(0.05)
        place.hosts.cut(1)
        time.sleep(SILENCE / 2)
        place.hosts.heal(1)
        place.await_size(numbers, 4, 20)
        for number in numbers:
            assert not place.trainees.events(number, "change")
