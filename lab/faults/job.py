"""A job on several hosts for the rows of the fault table, and how it went."""

from __future__ import annotations

import json
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lab.faults.table import Form, Verdict
from lab.hosts import Hosts
from lab.limits import claim

RANK = Path(__file__).parent / "network_rank.py"
STORE = set(range(29500, 29600))  # ports of stores: not the backend's connections
LIMIT = 40.0  # seconds that a group waits: long enough for what shall survive
PATIENCE = 20.0  # for ranks to end when it is over
FRAGMENT = 70  # letters of an error that a cell of the table shows
Span = tuple[float, float]  # by time.monotonic(), which all processes here share
Call = tuple[float, float, str, int]  # begin, end, type and size as a word, bytes


class Job:
    """A job whose ranks work until `meanwhile` is over, or until something ends it."""

    def __init__(
        self, hosts: Hosts, kind: str, form: Form, ranks_per_host: int = 1, **env: str
    ) -> None:
        self.hosts, self.form, self.ranks_per_host = hosts, form, ranks_per_host
        self.world = hosts.count * ranks_per_host
        self.command = [sys.executable, str(RANK), kind, "0"]
        self.env = {"BACKEND": form.backend, "TIMEOUT": str(LIMIT), "SEED": str(form.seed), **env}
        self.answers: list[dict[str, Any]] = []
        self.hung: list[int] = []  # ranks that had to be killed
        self.crashed = ""  # what a rank said that ended otherwise
        self.faulted = 0.0  # when what is done to it began

    def run(
        self, meanwhile: Callable[[], object], limit: float = 60, patience: float = PATIENCE
    ) -> None:
        """Start the ranks, call `meanwhile` when all have begun to talk, and let them end.

        All of it may take `limit` seconds, and the end `patience`; then they are killed. Beside
        other tests it is more.
        """
        patience, most = claim(patience), claim(limit + LIMIT)
        with tempfile.TemporaryDirectory() as name:
            self.folder = Path(name)

            def faults() -> None:
                if not self.until(lambda: self.count("ready") == self.world, claim(LIMIT)):
                    return
                self.faulted = time.monotonic()
                meanwhile()
                (self.folder / "stop").touch()

            env = {**self.env, "FAULT_FOLDER": name}
            results = self.hosts.run_ranks(
                self.command, self.ranks_per_host, env, most, faults, patience
            )
        self.patience = patience
        self.output = "".join(result.output for result in results)
        for rank, result in enumerate(results):
            lines = [line for line in result.output.splitlines() if line.startswith("{")]
            if lines:
                self.answers.append(json.loads(lines[-1]))
            elif result.returncode == -signal.SIGKILL:
                self.hung.append(rank)
            else:
                self.crashed = self.crashed or result.output.strip().splitlines()[-1]

    # ---- meanwhile

    def count(self, word: str) -> int:
        return len(list(self.folder.glob(f"{word}-*")))

    def until(self, condition: Callable[[], bool], seconds: float, *, stop: bool = True) -> bool:
        """Wait for it; False when the time is over or, with `stop`, a rank has ended first."""
        end = time.monotonic() + seconds
        while not condition():
            if (stop and self.count("ended")) or time.monotonic() > end:
                return False
            time.sleep(0.005)
        return True

    def begins(self) -> None:
        """Count faults from now on."""
        self.faulted = time.monotonic()

    def rest(self, seconds: float) -> bool:
        """Let it work; False when a rank has ended meanwhile."""
        end = time.monotonic() + seconds
        return self.until(lambda: time.monotonic() >= end, seconds + 1)

    def connections(self, host: int, peer: int | None = None) -> list[str]:
        """The backend's own connections of a host, as expressions of ss."""
        dst = None if peer is None else self.hosts.addresses[peer]
        connections = self.hosts.connections(host, dst=dst)
        ends = [{int(port) for port in re.findall(r":(\d+) ", line)} for line in connections]
        return [line for line, ports in zip(connections, ends, strict=True) if not ports & STORE]

    def kill(self, host: int, connections: Sequence[str]) -> int:
        """Reset these connections of a host, both ends; how many it were."""
        if not connections:
            return 0
        words = ["ss", "-HKtn", "state", "established", " or ".join(connections)]
        return len(self.hosts.inside(host, *words).splitlines())

    # ---- afterwards

    @property
    def errors(self) -> list[dict[str, Any]]:
        return [answer for answer in self.answers if answer["error"]]

    @property
    def clean(self) -> bool:
        """Every rank ended by itself, without an error, after as many operations as the others."""
        ended = len(self.answers) == self.world and not self.errors
        return ended and len({answer["operations"] for answer in self.answers}) == 1

    @property
    def longest(self) -> float:
        return max((answer["longest"] for answer in self.answers), default=0.0)

    def trouble(self) -> str:
        """Say in few words what went wrong."""
        if any(answer["wrong"] for answer in self.answers):
            return "wrong result"
        if self.errors:
            first = min(self.errors, key=lambda answer: answer["told"])
            after = max(0.0, first["told"] - self.faulted)
            hang = "rank hangs" if len(self.hung) == 1 else "ranks hang"
            others = f"; {len(self.hung)} {hang}" if self.hung else ""
            return f"error after {after:.1f} s: {fragment(first['error'])}{others}"
        if self.hung:
            return f"hangs; killed {self.patience:.0f} s later"
        return fragment(self.crashed) if self.crashed else "ranks counted differently"

    def verdict(self, told: str = "", good: bool = True, stall: float = 0) -> Verdict:
        """Good if it is clean and `good`, and no operation took longer than `stall` unless 0."""
        if not self.clean:
            return Verdict(False, self.trouble())
        if stall:
            good = good and self.longest <= stall
            parts = [told, f"longest operation {self.longest:.2f} s"]
            told = ", ".join(part for part in parts if part)
        return Verdict(good, told or f"{self.answers[0]['operations']} operations, all exact")

    def calls(self, spans: Sequence[Span]) -> list[Call]:
        """Return the calls of rank 0 in these times, of the kind "mixed"."""
        every = self.answers[0]["calls"]
        return [call for call in every if any(a <= call[0] and call[1] <= b for a, b in spans)]


def fragment(text: str) -> str:
    """The first sentence of an error, without addresses."""
    text = " ".join(text.split("\n")[0].split())
    text = re.sub(r"^\[[^]]*\] ?", "", text)  # Gloo begins with file and line
    text = re.sub(r" ?\[[^]]*\]:\d+", "", text).split(". ")[0]
    return text if len(text) <= FRAGMENT else text[: FRAGMENT - 1] + "…"


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def stalls(calls: Sequence[Call], quiet: Sequence[Call]) -> list[float]:
    """How much longer each call took than one of its sort usually does."""
    usual = {sort: statistics.median(times) for sort, times in by_sort(quiet).items()}
    return [max(0.0, end - begin - usual.get(sort, 0.0)) for begin, end, sort, _ in calls]


def speed(calls: Sequence[Call], quiet: Sequence[Call]) -> float:
    """How fast they were, in parts of the speed of the same sorts in quiet times."""
    mean = {sort: statistics.fmean(times) for sort, times in by_sort(quiet).items()}
    pairs = [(mean[sort], end - begin) for begin, end, sort, _ in calls if sort in mean]
    return sum(usual for usual, _ in pairs) / max(1e-9, sum(took for _, took in pairs))


def by_sort(calls: Sequence[Call]) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {}
    for begin, end, sort, _ in calls:
        times.setdefault(sort, []).append(end - begin)
    return times
