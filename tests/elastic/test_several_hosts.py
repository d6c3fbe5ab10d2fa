"""Elastic worlds over several hosts: lost processes, silent hosts, networks cut in two."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lab.hosts import Hosts
from lab.limits import limit
from lab.namespaces import missing
from lab.trainee import Plan
from lab.trainees import Event, Trainees

pytestmark = [
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
    pytest.mark.xdist_group("hosts"),
    pytest.mark.timeout(400),
]

PORT = 29499
SILENCE = 3  # seconds: of the engine, and of the world
# A client of torch's store asks for the name of its own address, and no name server is here.
NO_NAMES = {"RES_OPTIONS": "timeout:1 attempts:1"}


class Site:
    """Trainees on hosts, and a store on one of them."""

    def __init__(self, hosts: Hosts, folder: Path, store_on: int) -> None:
        self.hosts = hosts
        store = hosts.addresses[store_on]
        self.plan = Plan(
            f"{store}:{PORT}",
            start=1,
            epochs=10_000,
            pause=0.01,
            dead_after=float(SILENCE),
            settings={"RINGCOMM_RESUME_SECONDS": str(SILENCE), **NO_NAMES},
        )
        command = [sys.executable, "-m", "ringcomm.elastic", "store", "--port", str(PORT)]
        self.store = hosts.start(store_on, command, NO_NAMES)
        self.trainees = Trainees(self.plan, folder)

    def start(self, *places: int) -> list[int]:
        """Start a founder on each of these hosts."""
        numbers = []
        for host in places:
            name = self.hosts.namespaces[host]
            numbers += self.trainees.start(1, namespace=name, start=len(places))
        self.trainees.await_events(numbers, "step", 5)
        return numbers

    def steps_after(self, number: int, at: float) -> list[Event]:
        return [event for event in self.trainees.events(number, "step") if event["at"] > at]

    def await_size(self, numbers: list[int], size: int, seconds: float) -> None:
        """Wait until each of them has made a step, from now on, in a world of so many."""
        at = time.monotonic()
        deadline = at + limit(seconds)
        for number in numbers:
            while not any(event["size"] == size for event in self.steps_after(number, at)):
                last = self.trainees.events(number)[-2:]
                assert time.monotonic() < deadline, f"trainee {number} does not go on: {last}"
                time.sleep(0.02)

    def await_stop(self, number: int, seconds: float) -> Event:
        """Wait until it has raised something; return that."""
        deadline = time.monotonic() + limit(seconds)
        while not self.trainees.events(number, "raised"):
            last = self.trainees.events(number)[-2:]
            assert time.monotonic() < deadline, f"trainee {number} goes on: {last}"
            time.sleep(0.02)
        return self.trainees.events(number, "raised")[0]


@contextmanager
def site(count: int, folder: Path, store_on: int) -> Iterator[Site]:
    with Hosts(count) as hosts:
        made = Site(hosts, folder, store_on)
        try:
            yield made
        finally:
            made.trainees.end()


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
