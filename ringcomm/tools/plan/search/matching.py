"""Matches chunks with links, message by message, so that each arrives as early as it can.

The network expanded in time has a link once for each moment. A greedy matching walks through it: of
all messages that would bring a rank a chunk that it lacks, the one that arrives first is taken.
That is TACOS: Won, Elavazhagan, Srinivasan, Gupta and Krishna, "TACOS: Topology-Aware Collective
Algorithm Synthesizer for Distributed Machine Learning", MICRO 2024. Its links have one rate; here
links have rates and latencies of their own, and a message may share some of its route.

Messages are laid on links one behind another. A message of b bytes that is there at time r has left
a link, free from time f on, at max(r, f) + b / rate: cut through, so the slowest link of its route
decides.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ringcomm.tools.plan.simulate.topology import Pair, Topology

SAME = 1e-6  # arrivals that differ by less than this part of a message's time are a tie


class Hop(NamedTuple):
    """A message with one chunk: seconds at which it leaves `source`, and is at `target`."""

    chunk: int
    source: int
    target: int
    sent: float
    taken: float


@dataclass
class Start:
    """Where chunks are at first, by chunk, and since when; until when links are taken, by link.

    Times are seconds.
    """

    owners: Sequence[int]
    ready: Sequence[float]
    free: list[float]


@dataclass
class Matching:
    """One walk. `chunk_bytes` is the length of a chunk; `back` turns every link round.

    `hops` are in the order in which they were matched: a hop that brings a chunk comes before
    those that take it further. `first_use` has the seconds at which each link is first taken.
    """

    topology: Topology
    chunk_bytes: float
    chance: random.Random
    back: bool = False
    hops: list[Hop] = field(default_factory=list)
    first_use: dict[int, float] = field(default_factory=dict)

    def run(self, start: Start) -> None:
        ranks, chunks = range(len(self.topology.hosts)), range(len(start.owners))
        self.free = list(start.free)
        self.holders = [1] * len(chunks)
        self.lacking = [set(ranks) - {start.owners[chunk]} for chunk in chunks]
        # By pair of ranks: the chunks that the first could send and the second lacks, and since
        # when they are there.
        self.open: dict[Pair, dict[int, float]] = {(a, b): {} for a in ranks for b in ranks}
        self.heap: list[tuple[int, float, Pair]] = []
        self.latest: dict[Pair, tuple[int, float]] = {}
        # Numbers drawn by chance decide between messages that arrive at the same time. A pair keeps
        # its number. So a rank sends most to a few others: on one connection messages follow one
        # another, as they do here; those of several connections would share the link.
        self.priority = {pair: self.chance.random() for pair in self.open}
        rates = [link.rate for link in self.topology.links]
        self.tick = self.chunk_bytes * max(SAME / max(rates), 1e-15 / min(rates))
        for chunk in chunks:
            self.offer(chunk, start.owners[chunk], start.ready[chunk])
        while self.heap:
            key, tie, pair = heapq.heappop(self.heap)
            if self.latest.get(pair) != (key, tie) or not self.open[pair]:
                continue
            if self.ticks(self.arrival(pair)) > key:
                self.push(pair)  # its links were taken meanwhile
            else:
                self.take(pair)

    def offer(self, chunk: int, rank: int, since: float) -> None:
        """Let `rank` send a chunk to those that lack it."""
        for target in sorted(self.lacking[chunk]):
            self.open[rank, target][chunk] = since
            self.push((rank, target))

    def push(self, pair: Pair) -> None:
        key = (self.ticks(self.arrival(pair)), self.priority[pair])
        self.latest[pair] = key
        heapq.heappush(self.heap, (*key, pair))

    def ticks(self, seconds: float) -> int:
        return round(seconds / self.tick)

    def way(self, pair: Pair) -> Pair:
        """Return the pair of hosts whose route a message takes."""
        return (pair[1], pair[0]) if self.back else pair

    def room(self, pair: Pair) -> float:
        """Return the seconds at which the links have done with all that is matched, and a chunk."""
        links = self.topology.links
        route = self.topology.routes[self.way(pair)]
        return max(self.free[link] + self.chunk_bytes / links[link].rate for link in route)

    def alone(self, pair: Pair) -> float:
        """Return the seconds of a chunk on a route of its own, without latency."""
        return self.chunk_bytes / self.topology.rate(self.way(pair))

    def arrival(self, pair: Pair) -> float:
        """Return the seconds at which the next chunk of this pair would be there."""
        left = max(self.room(pair), min(self.open[pair].values()) + self.alone(pair))
        return left + self.topology.latency(self.way(pair))

    def take(self, pair: Pair) -> None:
        """Match the pair's links with a chunk: of those that arrive first, one that few have."""
        source, target = pair
        some, alone = self.open[pair], self.alone(pair)
        since = max(min(some.values()), self.room(pair) - alone)
        choice = [chunk for chunk, ready in some.items() if ready <= since + self.tick]
        fewest = min(self.holders[chunk] for chunk in choice)
        chunk = self.chance.choice([chunk for chunk in choice if self.holders[chunk] == fewest])
        arrival = max(self.room(pair), some[chunk] + alone) + self.topology.latency(self.way(pair))
        for link in self.topology.routes[self.way(pair)]:
            begin = max(some[chunk], self.free[link])
            self.first_use[link] = min(begin, self.first_use.get(link, begin))
            self.free[link] = begin + self.chunk_bytes / self.topology.links[link].rate
        left = arrival - self.topology.latency(self.way(pair)) - alone
        self.hops.append(Hop(chunk, source, target, max(some[chunk], left), arrival))
        self.holders[chunk] += 1
        self.lacking[chunk].discard(target)
        for rank in range(len(self.topology.hosts)):
            self.open[rank, target].pop(chunk, None)
        self.offer(chunk, target, arrival)
        if some:
            self.push(pair)


# ---- collectives


class Step(NamedTuple):
    """A step: a word of writing.py, and the chunk that goes from rank to rank."""

    verb: str
    chunk: int
    source: int
    target: int


def spread(
    topology: Topology, owners: Sequence[int], size: float, chance: random.Random
) -> list[Step]:
    """Bring each chunk of `size` bytes from its owner to all ranks: all_gather, broadcast."""
    matching = Matching(topology, size, chance)
    matching.run(Start(owners, [0.0] * len(owners), [0.0] * len(topology.links)))
    return ordered(handed_round(matching.hops))


def collect(
    topology: Topology, owners: Sequence[int], size: float, chance: random.Random
) -> list[Step]:
    """Bring the sum of each chunk to its owner: reduce_scatter, an all_gather run backwards."""
    return ordered(added_up(backwards(topology, owners, size, chance)[0], owners))


def both(
    topology: Topology, owners: Sequence[int], size: float, chance: random.Random
) -> list[Step]:
    """Bring the sum of each chunk to its owner, and from there to all: all_reduce.

    A chunk goes round as soon as it is summed, on links that have done with the sums.
    """
    hops, free = backwards(topology, owners, size, chance)
    ready = [0.0] * len(owners)
    for hop in hops:
        if hop.target == owners[hop.chunk]:
            ready[hop.chunk] = max(ready[hop.chunk], hop.taken)
    after = Matching(topology, size, chance)
    after.run(Start(owners, ready, free))
    return ordered([*added_up(hops, owners), *handed_round(after.hops)])


def backwards(
    topology: Topology, owners: Sequence[int], size: float, chance: random.Random
) -> tuple[list[Hop], list[float]]:
    """Return an all_gather on the links turned round, run backwards; and when links are free."""
    matching = Matching(topology, size, chance, back=True)
    matching.run(Start(owners, [0.0] * len(owners), [0.0] * len(topology.links)))
    end = max((hop.taken for hop in matching.hops), default=0.0)
    hops = [
        Hop(hop.chunk, hop.target, hop.source, end - hop.taken, end - hop.sent)
        for hop in reversed(matching.hops)
    ]
    free = [
        end - matching.first_use[link] if link in matching.first_use else 0.0
        for link in range(len(topology.links))
    ]
    return hops, free


Event = tuple[float, Step]


def handed_round(hops: Sequence[Hop]) -> list[Event]:
    """Return the events of hops: each is sent at one time, and copied at another."""
    events = []
    for hop in hops:
        events.append((hop.sent, Step("send", *hop[:3])))
        events.append((hop.taken, Step("take", *hop[:3])))
    return events


def added_up(hops: Sequence[Hop], owners: Sequence[int]) -> list[Event]:
    """Return events: hops take partial sums on; the owner copies the whole at the last arrival."""
    events = [(hop.sent, Step("add", *hop[:3])) for hop in hops]
    whole = dict.fromkeys(range(len(owners)), 0.0)
    for hop in hops:
        if hop.target == owners[hop.chunk]:
            whole[hop.chunk] = max(whole[hop.chunk], hop.taken)
    return events + [
        (when, Step("whole", chunk, owners[chunk], owners[chunk])) for chunk, when in whole.items()
    ]


def ordered(events: Sequence[Event]) -> list[Step]:
    """Sort by time. Of those at one time, the first that was matched comes first.

    It may be what another one needs.
    """
    return [step for _, step in sorted(events, key=lambda event: event[0])]
