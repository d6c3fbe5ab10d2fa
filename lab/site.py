"""Elastic trainings on hosts that are network namespaces, with a store on one of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lab.hosts import Hosts
from lab.limits import limit
from lab.trainee import Plan, Program
from lab.trainees import Event, Trainees
from lab.wan import Wan

PORT = 29499
SILENCE = 3  # seconds: of the engine, and of the world
# A client of torch's store asks for the name of its own address, and no name server is here.
NO_NAMES = {"RES_OPTIONS": "timeout:1 attempts:1"}


class Site:
    """Trainees on hosts, and a store on one of them."""

    def __init__(
        self,
        hosts: Hosts,
        folder: Path,
        store_on: int,
        program: Program | None = None,
        **plan: Any,
    ) -> None:
        self.hosts = hosts
        store = hosts.addresses[store_on]
        always: dict[str, Any] = {
            "start": 1,
            "epochs": 10_000,
            "pause": 0.01,
            "dead_after": float(SILENCE),
            "settings": {"RINGCOMM_RESUME_SECONDS": str(SILENCE), **NO_NAMES},
        }
        self.plan = Plan(f"{store}:{PORT}", **{**always, **plan})
        command = [sys.executable, "-m", "ringcomm", "elastic", "store", "--port", str(PORT)]
        self.store = hosts.start(store_on, command, NO_NAMES)
        deadline = time.monotonic() + limit(60)  # else the rank 0 of that host serves one
        while not hosts.inside(store_on, "ss", "-Htln", f"sport = :{PORT}"):
            assert time.monotonic() < deadline, "the store does not come up"
            time.sleep(0.05)
        self.trainees = Trainees(self.plan, folder, program)

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
def site(
    count: int,
    folder: Path,
    store_on: int,
    program: Program | None = None,
    far: Wan | None = None,
    **plan: Any,
) -> Iterator[Site]:
    """So many hosts; `plan` is that of their trainees, where it is not the usual one."""
    with Hosts(count, far=far) as hosts:
        made = Site(hosts, folder, store_on, program, **plan)
        try:
            yield made
        finally:
            made.trainees.end()
