"""The time that plans take by the model of Hockney: a message alpha + bytes * beta, a sum gamma.

Each host has a link, which sends and receives at once; what comes to it from several senders comes
one after another. A rank does its steps in order and does not wait for what it has sent. Nobody has
measured such times: real ones depend on caches, cores and other traffic.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ringcomm._network.costs import Fabrics
from ringcomm.algorithms.steps import Step

Key = tuple[int, int, str]  # sender, receiver, lane


class Span(NamedTuple):
    """What a rank does from `begin` to `end`, in seconds: copy, reduce or wait."""

    rank: int
    verb: str
    begin: float
    end: float
    bytes: int


@dataclass
class Message:
    """A signal and the wait that takes it; times are seconds.

    `bytes` counts what was put before the signal, and what is loaded from the sender's window
    after the wait.
    """

    sender: int
    receiver: int
    lane: str
    bytes: int
    sent: float
    arrived: float = -1.0
    taken: float = -1.0


class Simulation:
    """All ranks of one operation; `local` of them share a host."""

    def __init__(self, programs: Sequence[Sequence[Step]], local: int, costs: Fabrics) -> None:
        self.costs, self.local = costs, local
        self.programs = programs
        self.at = [0] * len(programs)
        self.clock = [0.0] * len(programs)
        self.spans: list[Span] = []
        self.messages: list[Message] = []
        self.unsent: dict[tuple[int, int], int] = defaultdict(int)  # bytes, by sender and receiver
        self.under_way: dict[Key, deque[Message]] = defaultdict(deque)
        self.arrived: dict[Key, deque[Message]] = defaultdict(deque)
        self.latest: dict[tuple[int, int], Message] = {}  # taken, by sender and receiver
        self.blocked: dict[Key, int] = {}
        self.events: list[tuple[float, int, Callable[..., None], Any]] = []
        self.number, self.now = itertools.count(), 0.0
        self.sends_until: dict[int, float] = defaultdict(float)  # by host
        self.receives_until: dict[int, float] = defaultdict(float)

    def seconds(self) -> float:
        """Run to the end, and return when the last rank is there. Raises ValueError: it hangs."""
        for rank in range(len(self.programs)):
            self.later(0.0, self.step, rank)
        while self.events:
            self.now, _, what, arguments = heapq.heappop(self.events)
            what(*arguments)
        if self.blocked:
            sender, rank, lane = min(self.blocked)
            raise ValueError(f"rank {rank} waits for a {lane} signal of {sender} that never comes")
        return max(self.clock)

    def later(self, when: float, what: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self.events, (when, next(self.number), what, arguments))

    def step(self, rank: int) -> None:
        if self.at[rank] == len(self.programs[rank]):
            return
        step = self.programs[rank][self.at[rank]]
        begin = self.clock[rank]
        if step.verb == "wait":
            key = (step.peer, rank, step.lane)
            if not self.arrived[key]:
                self.blocked[key] = rank
                return
            self.take(rank, self.arrived[key].popleft())
        elif step.verb == "signal":
            self.send((rank, step.peer, step.lane))
        else:
            self.move(rank, step)
        if step.verb != "signal":
            self.spans.append(Span(rank, step.verb, begin, self.clock[rank], step.bytes))
        self.at[rank] += 1
        self.later(self.clock[rank], self.step, rank)

    def take(self, rank: int, message: Message) -> None:
        self.clock[rank] = message.taken = max(self.clock[rank], message.arrived)
        if message.lane == "data":
            self.latest[message.sender, rank] = message

    def move(self, rank: int, step: Step) -> None:
        to = step.receiver(rank)
        if to >= 0:
            self.unsent[rank, to] += step.bytes
        for owner in step.loaded(rank):
            if (owner, rank) in self.latest:
                self.latest[owner, rank].bytes += step.bytes
        here = to < 0 or to // self.local == rank // self.local
        if here and (to >= 0 or any(one.space == "window" for one in step.targets + step.sources)):
            self.clock[rank] += step.bytes * self.costs.memory.beta
        self.clock[rank] += step.bytes * (len(step.sources) - 1) * self.costs.network.gamma

    def send(self, key: Key) -> None:
        rank, to, lane = key
        host = rank // self.local
        size = self.unsent.pop((rank, to), 0)
        message = Message(rank, to, lane, size, self.clock[rank])
        self.messages.append(message)
        self.under_way[key].append(message)
        if host == to // self.local:
            self.later(self.clock[rank] + self.costs.memory.alpha, self.receive, key, 0)
            return
        seconds = size * self.costs.network.beta
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
        message = self.under_way[key].popleft()
        message.arrived = ends
        self.arrived[key].append(message)
        if self.blocked.pop(key, None) is not None:
            self.later(ends, self.step, rank)
