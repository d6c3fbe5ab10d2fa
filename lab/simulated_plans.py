"""The time that plans take by the model of Hockney: a message alpha + bytes * beta, a sum gamma.

Each host has a link, which sends and receives at once; what comes to it from several senders comes
one after another. A rank does its steps in order and does not wait for what it has sent.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import json
import subprocess
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

from lab import ROOT
from ringcomm.costs import Costs, Fabrics

NOTHING = Costs(0, 0, 0)
Key = tuple[int, int, str]  # sender, receiver, lane


class Shape(NamedTuple):
    """A message of `bytes`, all shards together, in memory as it is between hosts."""

    collective: str
    bytes: int
    size: int  # ranks
    local: int = 1


@functools.lru_cache(maxsize=64)
def plans_of(shape: Shape, algorithm: str) -> list[dict[str, Any]]:
    """The plan of each rank, as tests/cpp/plan/print_plans.cc has it."""
    program = ROOT / "build" / "tests" / "print_plans"
    assert program.exists(), "print_plans is not built: run `make test`"
    words = [program, shape.collective, algorithm, *shape[1:], "--json"]
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    plans: list[dict[str, Any]] = json.loads(done.stdout)
    return plans


def steps_of(shape: Shape, rank: int, algorithm: str) -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = plans_of(shape, algorithm)[rank]["steps"]
    return steps


def busiest_link(shape: Shape, algorithm: str) -> int:
    """Bytes that one rank sends, or that it receives: the most there are."""
    sent, received = [0] * shape.size, [0] * shape.size
    for rank in range(shape.size):
        for step in steps_of(shape, rank, algorithm):
            if (to := receiver(step, rank)) >= 0:
                sent[rank] += step["bytes"]
                received[to] += step["bytes"]
    return max(sent + received)


def receiver(step: dict[str, Any], rank: int) -> int:
    """The rank whose inbox or line a step writes to, else -1."""
    for operand in step.get("dst", []):
        if operand["rank"] != rank:
            return int(operand["rank"])
    return -1


class Simulation:
    """All ranks of one operation. With local = 1 each rank is a host."""

    def __init__(self, shape: Shape, algorithm: str, costs: Fabrics) -> None:
        self.costs, self.local = costs, shape.local
        self.programs = [steps_of(shape, r, algorithm) for r in range(shape.size)]
        self.at = [0] * shape.size
        self.clock = [0.0] * shape.size
        self.unsent: dict[tuple[int, int], int] = defaultdict(int)  # bytes, by sender and receiver
        self.arrived: dict[Key, deque[float]] = defaultdict(deque)
        self.blocked: dict[Key, int] = {}
        self.events: list[tuple[float, int, Callable[..., None], Any]] = []
        self.number, self.now = itertools.count(), 0.0
        self.sends_until: dict[int, float] = defaultdict(float)  # by host
        self.receives_until: dict[int, float] = defaultdict(float)

    def seconds(self) -> float:
        for rank in range(len(self.programs)):
            self.later(0.0, self.step, rank)
        while self.events:
            self.now, _, what, arguments = heapq.heappop(self.events)
            what(*arguments)
        assert not self.blocked, "a plan that does not end"
        return max(self.clock)

    def later(self, when: float, what: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self.events, (when, next(self.number), what, arguments))

    def step(self, rank: int) -> None:
        if self.at[rank] == len(self.programs[rank]):
            return
        step = self.programs[rank][self.at[rank]]
        if step["verb"] == "wait":
            key = (step["peer"], rank, step["lane"])
            if not self.arrived[key]:
                self.blocked[key] = rank
                return
            self.clock[rank] = max(self.clock[rank], self.arrived[key].popleft())
        elif step["verb"] == "signal":
            self.send((rank, step["peer"], step["lane"]))
        else:
            self.move(rank, step)
        self.at[rank] += 1
        self.later(self.clock[rank], self.step, rank)

    def move(self, rank: int, step: dict[str, Any]) -> None:
        to, size = receiver(step, rank), step["bytes"]
        operands = step["dst"] + step["src"]
        if to >= 0 and to // self.local != rank // self.local:
            self.unsent[rank, to] += size
        elif to >= 0 or any(operand["space"] == "window" for operand in operands):
            self.clock[rank] += size * self.costs.memory.beta
        self.clock[rank] += size * (len(step["src"]) - 1) * self.costs.network.gamma

    def send(self, key: Key) -> None:
        rank, to, _ = key
        host = rank // self.local
        if host == to // self.local:
            self.later(self.clock[rank] + self.costs.memory.alpha, self.receive, key, 0)
            return
        seconds = self.unsent.pop((rank, to), 0) * self.costs.network.beta
        begins = max(self.sends_until[host], self.clock[rank])
        self.sends_until[host] = begins + seconds
        self.later(begins + self.costs.network.alpha, self.receive, key, seconds)

    def receive(self, key: Key, seconds: float) -> None:
        """The first byte of a message comes, at the time of the event; it takes so many seconds."""
        sender, rank, _ = key
        ends = self.now + seconds
        if sender // self.local != rank // self.local:
            host = rank // self.local
            ends = max(self.now, self.receives_until[host]) + seconds
            self.receives_until[host] = ends
        self.arrived[key].append(ends)
        if self.blocked.pop(key, None) is not None:
            self.later(ends, self.step, rank)


def seconds(shape: Shape, algorithm: str, network: Costs, memory: Costs = NOTHING) -> float:
    return Simulation(shape, algorithm, Fabrics(memory, network)).seconds()
