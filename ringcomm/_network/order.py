"""The order of hosts along a ring, and their sites, from what `ringcomm tune` measured.

Matrices have a row for each host, and count in both directions alike. A latency is half a round
trip, in seconds; a rate is in bytes a second.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

Matrix = Sequence[Sequence[float]]

EXACT = 10  # hosts; beyond, the order is improved and not proved
SITE = 0.1  # a site's own round trips are so much of those to other hosts, at most
ALIKE = 1.1  # rates that differ by less are alike: a measurement is no better


def ring_order(latency: Matrix, rate: Matrix) -> list[int]:
    """Return the hosts along the ring, from host 0 on.

    A pipelined ring is as fast as its slowest link, and each byte passes all of them. So the
    slowest link comes first: within a tenth of the best that a ring can have. Then the sum of the
    latencies is the least.
    """
    count = len(latency)
    if count < 4:
        return list(range(count))
    solve = _exact if count <= EXACT else _improved
    order = solve(latency, [[1 / max(bandwidth, 1e-9) for bandwidth in row] for row in rate])
    return order if order[1] < order[-1] else [order[0], *order[:0:-1]]


def _edges(order: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(order, [*order[1:], order[0]], strict=True))


def slowest(order: Sequence[int], slowness: Matrix) -> float:
    """Return the largest entry that a ring has."""
    return max(slowness[a][b] for a, b in _edges(order))


def length(order: Sequence[int], latency: Matrix) -> float:
    """Return the sum of a ring's entries."""
    return sum(latency[a][b] for a, b in _edges(order))


def _exact(latency: Matrix, slowness: Matrix) -> list[int]:
    """Go through all subsets (Held, Karp, "A dynamic programming approach", 1962), twice."""
    best = slowest(_shortest(slowness, max), slowness)
    far = 1 + sum(map(sum, latency))  # beyond every ring without such a link
    allowed = [
        [time + far * (slowness[a][b] > ALIKE * best) for b, time in enumerate(row)]
        for a, row in enumerate(latency)
    ]
    return _shortest(allowed, lambda so_far, entry: so_far + entry)


def _shortest(entries: Matrix, add: Callable[[float, float], float]) -> list[int]:
    """Return the ring through all hosts whose entries add up to the least."""
    others = range(1, len(entries))
    # By the hosts that a path from host 0 has, and the last of them: its sum, and the one before.
    paths = {(1 << host, host): (entries[0][host], 0) for host in others}
    for many in range(2, len(entries)):
        for some in itertools.combinations(others, many):
            seen = sum(1 << host for host in some)
            for last in some:
                before = seen & ~(1 << last)
                paths[seen, last] = min(
                    (add(paths[before, host][0], entries[host][last]), host)
                    for host in some
                    if host != last
                )
    seen = sum(1 << host for host in others)
    last = min(others, key=lambda host: add(paths[seen, host][0], entries[host][0]))
    order = [0]
    while seen:
        order.insert(1, last)
        seen, last = seen & ~(1 << last), paths[seen, last][1]
    return order


def _improved(latency: Matrix, slowness: Matrix) -> list[int]:
    """2-opt (Croes 1958), from the given order and from that of the nearest neighbours."""
    starts = [list(range(len(latency))), _nearest(latency)]
    starts += [_without_slow_links(start, slowness) for start in starts]
    limit = ALIKE * min(slowest(start, slowness) for start in starts)
    fast = [start for start in starts if slowest(start, slowness) <= limit]
    rings = [_shortened(start, latency, slowness, limit) for start in fast]
    return min(rings, key=lambda ring: length(ring, latency))


def _nearest(latency: Matrix) -> list[int]:
    order, left = [0], set(range(1, len(latency)))
    while left:
        row = latency[order[-1]]
        order.append(min(left, key=lambda host: (row[host], host)))
        left.remove(order[-1])
    return order


def _exchanged(order: list[int], i: int, j: int) -> list[int]:
    """Replace the links after places i and j: the hosts between them go the other way."""
    return order[: i + 1] + order[j:i:-1] + order[j + 1 :]


def _without_slow_links(order: list[int], slowness: Matrix) -> list[int]:
    """Replace the slowest link by faster ones, as long as that can be."""
    while True:
        links = _edges(order)
        speed, worst = max((slowness[a][b], place) for place, (a, b) in enumerate(links))
        a, b = links[worst]
        others = [(c, d, place) for place, (c, d) in enumerate(links) if place != worst]
        faster, place = min((max(slowness[a][c], slowness[b][d]), place) for c, d, place in others)
        if faster >= speed:
            return order
        order = _exchanged(order, min(place, worst), max(place, worst))


def _shortened(order: list[int], latency: Matrix, slowness: Matrix, limit: float) -> list[int]:
    """Make the ring shorter, link by link, without one that is slower than the limit."""
    count, shorter = len(order), True
    while shorter:
        shorter = False
        for i, j in itertools.combinations(range(count), 2):
            a, b, c, d = order[i], order[i + 1], order[j], order[(j + 1) % count]
            gain = latency[a][b] + latency[c][d] - latency[a][c] - latency[b][d]
            if gain > 1e-9 * latency[a][b] and max(slowness[a][c], slowness[b][d]) <= limit:
                order, shorter = _exchanged(order, i, j), True
    return order


def sites_of(latency: Matrix) -> list[int]:
    """Return each host's site, numbered from 0 in the order of their first hosts.

    A site is hosts whose mutual latency is at most a tenth of that to all others; the largest such
    sets count, and all hosts together are none.
    """
    count = len(latency)
    site = list(range(count))
    sets = [[host] for host in range(count)]  # by host: those that shorter links join to it
    pairs = itertools.combinations(range(count), 2)
    for reach, near, other in sorted((latency[a][b], a, b) for a, b in pairs):
        if sets[near] is sets[other]:
            continue
        for some in (sets[near], sets[other]):  # no other host is nearer to it than this link
            if max(latency[a][b] for a in some for b in some) <= SITE * reach:
                for host in some:  # a larger set takes in those that it holds
                    site[host] = some[0]
        joined = sets[near] + sets[other]
        for host in joined:
            sets[host] = joined
    numbers = {first: number for number, first in enumerate(dict.fromkeys(site))}
    return [numbers[first] for first in site]


def laid_out(latency: Matrix, rate: Matrix) -> list[tuple[int, int]]:
    """Return each host and its site along the ring, where hosts of a site are neighbours."""
    ring, sites = ring_order(latency, rate), sites_of(latency)
    first = {sites[host]: place for place, host in reversed(list(enumerate(ring)))}
    return [(host, sites[host]) for host in sorted(ring, key=lambda host: first[sites[host]])]
