"""Latency and rate of every pair of hosts: small probes for `ringcomm tune`.

A host is in one pair at a time, and all pairs of a round run at once. So n hosts take n - 1 rounds,
or n where n is odd: the schedule of a round-robin tournament.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

TRIPS, TRIP_SECONDS = 200, 0.1  # round trips, and for how long; there are two at least
SMALLEST, LARGEST = 256 << 10, 32 << 20  # bytes of a burst
LONG = 0.1  # seconds of a burst that counts
BURST_SECONDS = 0.5  # for all bursts of a pair


class Probe(NamedTuple):
    """Seconds and bytes a second between two hosts, given by their places in the list of hosts."""

    low: int
    high: int
    latency: float
    rate: float


def rounds(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yield every pair of `count` hosts once, in rounds of pairs that share no host."""
    seats = list(range(count + count % 2))
    half = len(seats) // 2
    for _ in seats[1:]:
        facing = zip(seats[:half], reversed(seats[half:]), strict=True)
        yield [(min(pair), max(pair)) for pair in facing if max(pair) < count]
        seats = [seats[0], seats[-1], *seats[1:-1]]


def measure(firsts: list[int]) -> tuple[list[list[float]], list[list[float]]]:
    """Probe all pairs of hosts, by the first rank of each; every rank of the job calls it.

    Returns the matrices of latencies and rates, see order.py, on all ranks.
    """
    rank, mine = dist.get_rank(), []
    for pairs in rounds(len(firsts)):
        for low, high in pairs:
            if rank == firsts[low]:
                mine.append(Probe(low, high, *lead(firsts[high])))
            elif rank == firsts[high]:
                follow(firsts[low])
    probes: list[list[Probe]] = [mine] * dist.get_world_size()
    dist.all_gather_object(probes, mine)
    latency = [[0.0] * len(firsts) for _ in firsts]
    rate = [[0.0] * len(firsts) for _ in firsts]
    for probe in (probe for some in probes for probe in some):
        for a, b in ((probe.low, probe.high), (probe.high, probe.low)):
            latency[a][b], rate[a][b] = probe.latency, probe.rate
    return latency, rate


def lead(peer: int) -> tuple[float, float]:
    """Return half the shortest round trip, and the rate of the longest burst, both ways at once."""
    trip(peer)  # opens the connection
    trips, began = [trip(peer), trip(peer)], time.perf_counter()
    while len(trips) < TRIPS and time.perf_counter() - began < TRIP_SECONDS:
        trips.append(trip(peer))
    latency = min(trips) / 2
    size, began = SMALLEST, time.perf_counter()
    while True:
        rate, took = lead_burst(peer, size, latency)
        spent = time.perf_counter() - began
        if took >= max(LONG, 8 * latency) or size >= LARGEST or spent >= BURST_SECONDS:
            break
        size *= 2
    dist.send(torch.tensor([-1]), peer)
    return latency, rate


def trip(peer: int) -> float:
    word = torch.tensor([0])
    began = time.perf_counter()
    dist.send(word, peer)
    dist.recv(word, peer)
    return time.perf_counter() - began


def lead_burst(peer: int, size: int, latency: float) -> tuple[float, float]:
    """Return the rate and the seconds of a burst; its first byte comes after a round trip."""
    began = time.perf_counter()
    dist.send(torch.tensor([size]), peer)
    exchange(peer, size)
    took = time.perf_counter() - began
    return size / max(took - 2 * latency, took / 10), took


def follow(peer: int) -> None:
    """Do what the leader says: answer to 0, exchange so many bytes, end at -1."""
    word = torch.tensor([0])
    while True:
        dist.recv(word, peer)
        if (size := int(word)) < 0:
            return
        if size:
            exchange(peer, size)
        else:
            dist.send(word, peer)


def exchange(peer: int, size: int) -> None:
    mine, theirs = (torch.zeros(size, dtype=torch.uint8) for _ in range(2))
    ways = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, theirs, peer)]
    for work in dist.batch_isend_irecv(ways):
        work.wait()
