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
from ringcomm.algorithms.call import Call
from ringcomm.tools.plan.simulate.topology import Link, Topology


class Bounds(NamedTuple):
    """Seconds; `cut` says whose links decide the second."""

    latency: float
    bandwidth: float
    cut: str
    addition: float

    @property
    def seconds(self) -> float:
        return max(self.latency, self.bandwidth, self.addition)


def bounds(call: Call, topology: Topology, fabrics: Fabrics) -> Bounds:
    """Return the bounds for a call. Windows of one host are no link: no bound."""
    latency = topology.nearest
    if call.local > 1:
        latency = fabrics.memory.alpha if call.hosts == 1 else min(latency, fabrics.memory.alpha)
    most = max(cuts(call, topology), key=lambda cut: cut[0], default=(0.0, ""))
    added = call.whole * (call.ranks - 1) / call.ranks if call.adds else 0.0
    return Bounds((call.ranks - 1).bit_length() * latency, *most, added * fabrics.network.gamma)


def cuts(call: Call, topology: Topology) -> Iterator[tuple[float, str]]:
    """Yield the seconds that the links of each cut need, and whose they are."""
    if call.hosts == 1:
        return
    at: dict[str, list[Link]] = {}  # the links of each node
    for link in topology.links:
        for node in (link.source, link.target):
            at.setdefault(node, []).append(link)
    places = {host: place for place, host in enumerate(topology.hosts)}
    singles = [frozenset([host]) for host in topology.hosts]
    total = 0.0
    for nodes in dict.fromkeys([*singles, *topology.groups]):
        hosts = sorted(places[node] for node in nodes if node in places)
        if not 0 < len(hosts) < call.hosts:
            continue
        first, last = topology.hosts[hosts[0]], topology.hosts[hosts[-1]]
        name = first if len(hosts) == 1 else f"{first} to {last}"
        inside = [host * call.local + rank for host in hosts for rank in range(call.local)]
        out, back = crossing(call, frozenset(inside))
        links = [link for node in nodes for link in at.get(node, [])]
        outward = sum(link.rate for link in links if link.target not in nodes)
        inward = sum(link.rate for link in links if link.source not in nodes)
        yield out / outward, f"out of {name}"
        yield back / inward, f"into {name}"
        total += outward if len(nodes) == 1 else 0.0
    if call.name == "all_reduce":  # all hosts together: a host alone need not send twice
        yield 2 * (call.hosts - 1) * call.bytes / total, "out of all hosts together"


def crossing(call: Call, inside: frozenset[int]) -> tuple[float, float]:
    """Return the bytes that must leave these ranks, and those that must come."""
    name, size = call.name, call.bytes
    shards = call.shards
    within = sum(shards[rank] for rank in inside) if shards else 0
    beyond = sum(shards) - within
    rooted_here = call.root in inside
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
        here = sum(call.send[rank] for rank in inside)
        others = call.ranks - len(inside)
        return (sum(call.send) - here) * len(inside), here * others
    return 0, 0
