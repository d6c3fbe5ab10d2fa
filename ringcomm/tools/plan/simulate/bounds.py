"""How fast a collective can be at best, whatever the plan.

    latency     ceil(log2 n) messages one after another, where a rank sends one at a time
    bandwidth   what must cross a cut, over the rate of the links that cross it; of all cuts around
                a host or a group of the topology, the worst
    addition    of n inputs of m bytes, m (n - 1) / n on each core
Chan, Heimlich, Purkayastha, van de Geijn, "Collective communication: theory, practice, and
experience", 2007, have these for each collective among ranks with one link each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ringcomm._network.costs import Fabrics
from ringcomm.algorithms.steps import Shape
from ringcomm.tools.plan.simulate.topology import Topology

ADDING = ("all_reduce", "reduce_scatter", "reduce")


class Bounds(NamedTuple):
    """Seconds; `cut` says whose links decide the second."""

    latency: float
    bandwidth: float
    cut: str
    addition: float

    @property
    def seconds(self) -> float:
        return max(self.latency, self.bandwidth, self.addition)


def bounds(shape: Shape, topology: Topology, fabrics: Fabrics) -> Bounds:
    """Return the bounds for a call of this shape. Windows of one host are no link: no bound."""
    ranks, hosts = shape.size, shape.hosts
    one = fabrics.memory.alpha if hosts == 1 else nearest(shape, topology, fabrics)
    most = max(cuts(shape, topology), key=lambda cut: cut[0], default=(0.0, ""))
    added = whole_bytes(shape) * (ranks - 1) / ranks if shape.name in ADDING else 0.0
    return Bounds((ranks - 1).bit_length() * one, *most, added * fabrics.network.gamma)


def nearest(shape: Shape, topology: Topology, fabrics: Fabrics) -> float:
    """Return the shortest time of a message between two ranks."""
    found = min(topology.latency(pair) for pair in topology.routes)
    return min(found, fabrics.memory.alpha) if shape.local > 1 else found


def whole_bytes(shape: Shape) -> int:
    """Return the bytes of the message, all shards together."""
    return shape.bytes or sum(shape.shards or shape.send)


def cuts(shape: Shape, topology: Topology) -> Iterator[tuple[float, str]]:
    """Seconds that the links of each cut need, and whose they are."""
    if shape.hosts == 1:
        return
    singles = [frozenset([host]) for host in topology.hosts]
    for nodes in dict.fromkeys([*singles, *topology.groups]):
        inside = [
            rank for rank in range(shape.size) if topology.hosts[rank // shape.local] in nodes
        ]
        if not 0 < len(inside) < shape.size:
            continue
        hosts = [host for host in topology.hosts if host in nodes]
        name = hosts[0] if len(hosts) == 1 else f"{hosts[0]} to {hosts[-1]}"
        out, back = crossing(shape, frozenset(inside))
        yield out / rate_between(topology, nodes, True), f"out of {name}"
        yield back / rate_between(topology, nodes, False), f"into {name}"
    if shape.name == "all_reduce":  # all hosts together: a host alone need not send twice
        total = sum(rate_between(topology, nodes, True) for nodes in singles)
        yield 2 * (shape.hosts - 1) * shape.bytes / total, "out of all hosts together"


def rate_between(topology: Topology, nodes: frozenset[str], out: bool) -> float:
    return sum(
        link.rate
        for link in topology.links
        if (link.source in nodes) != (link.target in nodes) and (link.source in nodes) == out
    )


def crossing(shape: Shape, inside: frozenset[int]) -> tuple[float, float]:
    """Return the bytes that must leave these ranks, and those that must come."""
    name, size = shape.name, shape.bytes
    shards = shape.shards
    within = sum(shards[rank] for rank in inside) if shards else 0
    beyond = sum(shards) - within
    rooted_here = shape.root in inside
    if name == "all_reduce":
        return size, size
    if name == "reduce_scatter":
        return beyond, within
    if name == "all_gather":
        return within, beyond
    if name == "broadcast":
        return (size, 0) if rooted_here else (0, size)
    if name == "reduce":
        return (0, size) if rooted_here else (size, 0)
    if name == "scatter":
        return (beyond, 0) if rooted_here else (0, within)
    if name == "gather":
        return (0, beyond) if rooted_here else (within, 0)
    if name == "all_to_all":
        here = sum(shape.send[rank] for rank in inside)
        others = shape.size - len(inside)
        return (sum(shape.send) - here) * len(inside), here * others
    return 0, 0
