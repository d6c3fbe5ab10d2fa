"""Processes that train in one elastic world, started and killed by a test.

They are forked from a server that has imported torch, so one is there in a fraction of a second.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from lab.limits import limit
from lab.ranks import HOST
from lab.trainee import SAMPLES, Plan, Program, train

Event = dict[str, Any]


class Trainees:
    """The processes of one training, in the order of their start."""

    def __init__(self, plan: Plan, folder: Path, program: Program | None = None) -> None:
        self.plan = plan
        self.program = program
        self.folder = folder
        self.processes: list[BaseProcess] = []
        self._events: dict[int, list[Event]] = {}  # by number, and how many bytes were read
        self._read: dict[int, int] = {}
        self._context: Any = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(
            [
                *("torch.distributed", "torch._dynamo", "pytest", "lab.trainee"),
                *("torch.distributed.fsdp", "torch.distributed.tensor.parallel"),
            ]
        )

    def start(self, count: int = 1, **changes: Any) -> list[int]:
        """Start so many; returns their numbers. `changes` are of the plan."""
        numbers = []
        for _ in range(count):
            number = len(self.processes)
            settings = {"RANK": str(number), **self.plan.settings, **changes.get("settings", {})}
            more = {"number": number, **changes, "settings": settings}
            plan = replace(self.plan, **more)
            args = (str(self._path(number)), plan, self.program)
            process = self._context.Process(target=train, args=args, daemon=True)
            process.start()
            self.processes.append(process)
            numbers.append(number)
        return numbers

    def _path(self, number: int) -> Path:
        return self.folder / f"trainee-{number}"

    def events(self, number: int, *what: str) -> list[Event]:
        """Return what one of them has written so far."""
        events, path = self._events.setdefault(number, []), self._path(number)
        if path.exists():
            with path.open("rb") as stream:
                stream.seek(self._read.get(number, 0))
                lines = stream.read().splitlines(keepends=True)
            whole = [line for line in lines if line.endswith(b"\n")]
            self._read[number] = self._read.get(number, 0) + sum(map(len, whole))
            events += map(json.loads, whole)
        return [event for event in events if not what or event["what"] in what]

    def all_events(self, *what: str) -> list[Event]:
        """Return the events of all, by time; `number` says whose each is."""
        numbers = range(len(self.processes))
        events = [{"number": n, **event} for n in numbers for event in self.events(n, *what)]
        return sorted(events, key=lambda event: float(event["at"]))

    def await_events(
        self, numbers: list[int], what: str, count: int = 1, seconds: float = 60
    ) -> None:
        """Wait until each of them has written `count` such events."""
        deadline = time.monotonic() + limit(seconds)
        for number in numbers:
            while len(self.events(number, what)) < count:
                process = self.processes[number]
                ended = process.exitcode is not None and len(self.events(number, what)) < count
                if ended or time.monotonic() > deadline:
                    raise AssertionError(
                        f"trainee {number} has not written {count} {what!r}; exit "
                        f"{process.exitcode}, last {self.events(number)[-2:]}"
                    )
                time.sleep(0.005)

    def kill(self, number: int, how: int = signal.SIGKILL) -> float:
        """Send a signal; returns when."""
        pid = self.processes[number].pid
        assert pid is not None
        at = time.monotonic()
        os.kill(pid, how)
        return at

    def await_ends(self, numbers: list[int], seconds: float = 60) -> list[Event]:
        """Wait until they have ended well; returns their last words."""
        deadline = time.monotonic() + limit(seconds)
        for number in numbers:
            process = self.processes[number]
            process.join(max(0.0, deadline - time.monotonic()))
            last = self.events(number)[-3:]
            assert process.exitcode == 0, f"trainee {number}: exit {process.exitcode}, {last}"
        return [(self.events(n, "end") or self.events(n, "raised"))[-1] for n in numbers]

    # ---- what has to hold

    def ledger(self) -> dict[int, list[int]]:
        """Return the batches of each decided step, by how many were decided then.

        Raises AssertionError where two trainees do not agree on it: then a step was applied by some
        of them and not by others.
        """
        batches: dict[int, list[int]] = {}
        for event in self.all_events("used"):
            known = batches.setdefault(event["decided"], event["batches"])
            assert known == event["batches"], f"{event} and {known}"
        return batches

    def check_ledger(self, epochs: int = 0, after: int = 0) -> None:
        """Require that no batch counts twice, and that so many epochs are whole.

        With `after`, of the steps that were decided later than that many batches.
        """
        ledger = {decided: used for decided, used in self.ledger().items() if decided > after}
        used = [batch for batches in ledger.values() for batch in batches]
        assert len(set(used)) == len(used), "a batch counts twice"
        decided = after
        for count in sorted(ledger):
            decided += len(ledger[count])
            assert count == decided, f"{count} batches are decided, and {decided} were written down"
        missing = set(range(after, epochs * SAMPLES // self.plan.batch)) - set(used)
        assert not missing, f"{sorted(missing)} were not used"

    def check_equal(self) -> None:
        """Require that all had equal parameters after each step, the dead included."""
        known: dict[int, str] = {}
        for event in self.all_events("step"):
            assert known.setdefault(event["step"], event["digest"]) == event["digest"], event

    def deaths(self) -> dict[int, Event]:
        """Return what the fates have brought, by number."""
        return {event["number"]: event for event in self.all_events("dies")}

    def end(self) -> None:
        for process in self.processes:
            if process.exitcode is None:
                process.kill()
        for process in self.processes:
            process.join(5)


@contextmanager
def trainees(count: int, program: Program | None = None, **plan: Any) -> Iterator[Trainees]:
    """So many trainees and a store of their own, which is this process's."""
    store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        made = Plan(**{"store": f"{HOST}:{store.port}", "start": count, **plan})
        some = Trainees(made, Path(folder), program)
        try:
            some.start(count)
            yield some
        finally:
            some.end()
