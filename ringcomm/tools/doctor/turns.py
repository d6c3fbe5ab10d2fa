"""Which pair of ranks is measured when, so that pairs do not disturb one another.

A rank is in one pair at a time, and takes its pairs in the order of a list that all ranks have. So
a pair waits for the one before it if they share a rank. In the list that `turns` makes, each pair
of a host shares a rank with the one before it: of a host, one pair is measured at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ringcomm._network.probes import rounds

MOST = 120  # turns, one after the other, for which there is time

Pairs = list[tuple[int, int]]


def among(ranks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield all pairs of a host, each of which shares a rank with the one before."""
    for number, first in enumerate(ranks):
        others = ranks[number + 1 :]
        yield from ((first, other) for other in (reversed(others) if number % 2 else others))


def across(near: Sequence[int], far: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield all pairs of two hosts, each of which shares a rank with the one before."""
    for number, first in enumerate(near):
        yield from ((first, other) for other in (reversed(far) if number % 2 else far))


def steps(hosts: Sequence[Sequence[int]]) -> int:
    """Return how many pairs come one after the other on the host with the most ranks, about."""
    most = max(map(len, hosts), default=0)
    return most * (most - 1) // 2 + (len(hosts) - 1) * most * most


def take_turns(hosts: Sequence[Sequence[int]]) -> bool:
    """Tell whether there is time for one pair of a host after the other."""
    return steps(hosts) <= MOST


def turns(hosts: Sequence[Sequence[int]]) -> tuple[Pairs, int]:
    """Return the order of all pairs, and how many of them come one after the other.

    `hosts` are the ranks of each. Pairs of other hosts are measured meanwhile. Where ranks are too
    many for that, each is in a pair all the time.
    """
    if not take_turns(hosts):
        ranks = sorted(rank for some in hosts for rank in some)
        table = list(rounds(len(ranks)))
        return [(ranks[low], ranks[high]) for pairs in table for low, high in pairs], len(table)
    order = [pair for some in hosts for pair in among(some)]
    # A host's next pair shares a rank with its last one, whichever hosts it is with.
    last = [some[-1] for some in hosts]
    for facing in rounds(len(hosts)):
        for near, far in facing:
            order += across(*(from_rank(hosts[host], last[host]) for host in (near, far)))
            last[near], last[far] = order[-1]
    return [(min(pair), max(pair)) for pair in order], steps(hosts)


def from_rank(ranks: Sequence[int], first: int) -> list[int]:
    """Return the ranks of a host, one of them first."""
    return [first, *(rank for rank in ranks if rank != first)]
