"""The time of a group's plans on links that are shared, event by event.

A rank does its steps in order, on a core of its own, and does not wait for what it has sent.
Messages from one rank to another follow one another, as on one connection; those of different
pairs share links by flows.py. A message takes alpha + bytes / share: Hockney, "The communication
challenge for MPP", 1994. Events at one time happen in the order in which they were planned, so the
same input gives the same figures.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ringcomm._network.costs import Fabrics
from ringcomm.algorithms.steps import GroupPlans, Step
from ringcomm.tools.plan.simulate.flows import Flows, Transfer
from ringcomm.tools.plan.simulate.topology import Topology

Key = tuple[int, int, str]  # sender, receiver, lane


@dataclass(eq=False)
class TimedMessage:
    """A signal and the wait that takes it; times are seconds, sizes bytes.

    `began` and `left` bound the time on the links. `before` is the message of the same pair that
    it had to wait for, and `spans` how many spans its sender had behind it.
    """

    sender: int
    receiver: int
    lane: str
    bytes: int
    sent: float
    spans: int
    before: TimedMessage | None = None
    began: float = -1.0
    left: float = -1.0
    arrived: float = -1.0
    taken: float = -1.0


class Span(NamedTuple):
    """A rank's work from `begin` to `end`, in seconds: copy, reduce or wait for a message."""

    rank: int
    verb: str
    begin: float
    end: float
    bytes: int
    message: TimedMessage | None


def simulate(group: GroupPlans, topology: Topology, costs: Fabrics) -> Engine:
    """Return what happens in an operation. Raises ValueError where ranks hang."""
    engine = Engine(group.steps, group.call.local, costs, topology)
    engine.run()
    return engine


class Engine:
    """All ranks of one operation, of which `local` are on each host."""

    def __init__(
        self,
        programs: Sequence[Sequence[Step]],
        local: int,
        costs: Fabrics,
        topology: Topology,
    ) -> None:
        self.costs, self.local, self.topology = costs, local, topology
        self.programs = programs
        self.at = [0] * len(programs)
        self.clock = [0.0] * len(programs)
        self.of_rank: list[list[Span]] = [[] for _ in programs]
        self.messages: list[TimedMessage] = []
        self.carried = [0] * len(topology.links)  # bytes, by link
        self.unsent: dict[tuple[int, int], int] = defaultdict(int)  # bytes, by sender and receiver
        self.arrived: dict[Key, deque[TimedMessage]] = defaultdict(deque)
        self.latest: dict[tuple[int, int], TimedMessage] = {}  # taken, by sender and receiver
        self.blocked: dict[Key, int] = {}
        self.queues: dict[tuple[int, int], deque[TimedMessage]] = defaultdict(deque)
        self.flows = Flows(topology.links)
        self.message_of: dict[int, TimedMessage] = {}  # by the number of its transfer
        self.changed: set[int] = set()  # links
        self.events: list[tuple[float, int, int, Callable[..., None], Any]] = []
        self.number, self.now = itertools.count(), 0.0

    @property
    def seconds(self) -> float:
        """When the last rank is at its end."""
        return max(self.clock)

    def run(self) -> None:
        """Run to the end. Raises ValueError where ranks hang."""
        for rank in range(len(self.programs)):
            self.later(0.0, self.step, rank)
        while self.events:
            self.now, _, _, what, arguments = heapq.heappop(self.events)
            what(*arguments)
        if self.blocked:
            sender, rank, lane = min(self.blocked)
            raise ValueError(f"rank {rank} waits for a {lane} signal of {sender} that never comes")

    def later(
        self, when: float, what: Callable[..., None], *arguments: Any, order: int = 0
    ) -> None:
        """Do it at that time, after all of a lower order at that time."""
        heapq.heappush(self.events, (when, order, next(self.number), what, arguments))

    # ---- ranks

    def step(self, rank: int) -> None:
        """Do what needs no event of others: up to a wait, or to work that takes time."""
        program = self.programs[rank]
        while self.at[rank] < len(program):
            step, begin = program[self.at[rank]], self.clock[rank]
            message = None
            if step.verb == "wait":
                key = (step.peer, rank, step.lane)
                if not self.arrived[key]:
                    self.blocked[key] = rank
                    return
                message = self.take(rank, self.arrived[key].popleft())
            elif step.verb == "signal":
                self.send(rank, step)
            else:
                self.move(rank, step)
            if step.verb != "signal":
                own = self.of_rank[rank]
                own.append(Span(rank, step.verb, begin, self.clock[rank], step.bytes, message))
            self.at[rank] += 1
            if self.clock[rank] > self.now:
                self.later(self.clock[rank], self.step, rank)
                return

    def take(self, rank: int, message: TimedMessage) -> TimedMessage:
        self.clock[rank] = message.taken = max(self.clock[rank], message.arrived)
        if message.lane == "data":
            self.latest[message.sender, rank] = message
        return message

    def move(self, rank: int, step: Step) -> None:
        for target in step.targets:
            if target.rank != rank:
                self.unsent[rank, target.rank] += step.bytes
        for owner in step.loaded(rank):
            if (owner, rank) in self.latest:
                self.latest[owner, rank].bytes += step.bytes
        to = step.receiver(rank)
        here = to < 0 or to // self.local == rank // self.local
        if here and (to >= 0 or any(o.space == "window" for o in step.targets + step.sources)):
            self.clock[rank] += step.bytes * self.costs.memory.beta
        self.clock[rank] += step.bytes * (len(step.sources) - 1) * self.costs.network.gamma

    def send(self, rank: int, step: Step) -> None:
        size = self.unsent.pop((rank, step.peer), 0)
        spans = len(self.of_rank[rank])
        message = TimedMessage(rank, step.peer, step.lane, size, self.clock[rank], spans)
        self.messages.append(message)
        if rank // self.local == step.peer // self.local:
            message.began = message.left = message.sent
            self.later(message.sent + self.costs.memory.alpha, self.receive, message)
            return
        queue = self.queues[rank, step.peer]
        queue.append(message)
        if len(queue) == 1:
            self.begin(message)
        else:
            message.before = queue[-2]

    # ---- the network

    def begin(self, message: TimedMessage) -> None:
        """Put it onto the links; one without bytes leaves at once, and so do those like it."""
        queue = self.queues[message.sender, message.receiver]
        while queue[0].bytes == 0:
            queue[0].began = self.now
            self.leave(queue.popleft())
            if not queue:
                return
        first = queue[0]
        first.began = self.now
        route = self.topology.routes[first.sender // self.local, first.receiver // self.local]
        transfer = Transfer(next(self.number), route, float(first.bytes), self.now)
        self.message_of[transfer.number] = first
        self.flows.add(transfer)
        self.change(transfer)

    def change(self, transfer: Transfer) -> None:
        """Have shares computed once for all that happens at one time, after all of it."""
        if not self.changed:
            self.later(self.now, self.share, order=1)
        self.changed.update(transfer.route)

    def share(self) -> None:
        changed, self.changed = self.changed, set()
        for when, transfer in self.flows.share(changed, self.now):
            self.later(when, self.end, transfer, transfer.version)

    def end(self, transfer: Transfer, version: int) -> None:
        if version != transfer.version:
            return
        transfer.version = -1
        self.flows.remove(transfer)
        self.change(transfer)
        message = self.message_of.pop(transfer.number)
        for link in transfer.route:
            self.carried[link] += message.bytes
        queue = self.queues[message.sender, message.receiver]
        queue.popleft()
        self.leave(message)
        if queue:
            self.begin(queue[0])

    def leave(self, message: TimedMessage) -> None:
        """Note that its last byte has left."""
        message.left = self.now
        hosts = message.sender // self.local, message.receiver // self.local
        self.later(self.now + self.topology.latency(hosts), self.receive, message)

    def receive(self, message: TimedMessage) -> None:
        key = (message.sender, message.receiver, message.lane)
        message.arrived = self.now
        self.arrived[key].append(message)
        if self.blocked.pop(key, None) is not None:
            self.later(self.now, self.step, message.receiver)
