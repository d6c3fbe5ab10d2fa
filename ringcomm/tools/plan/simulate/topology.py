"""The network between hosts: links, and the route of each message over them.

A link goes one way, at so many bytes a second. A cable that sends and receives at once is two
links. A message takes alpha, the latency of every link of its route, and its share of the slowest.

    mesh        a link from each host to each other
    switch      a link from each host to a switch that is never full, and one back
    ring        links to both neighbours, and the shorter way round
    torus:RxC   links to four neighbours; first along the row, then along the column: dimension
                order, as in Dally and Towles, "Principles and Practices of Interconnection
                Networks", 2004
    fat-tree:K:O  K hosts under each leaf switch, whose links upwards have K / O times the rate of
                a host's: Leiserson, "Fat-Trees", 1985, with an oversubscription of O
    hosts:HxL   a switch for H hosts of L ranks each
    measured    each pair of hosts at the rate that `ringcomm tune` found for it
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ringcomm._network.costs import Hosts, Network
from ringcomm._network.order import laid_out

Pair = tuple[int, int]  # hosts, by number: from, to
MOST_LINKS = 100_000  # in a topology
NAMES = ("mesh", "switch", "ring", "torus:RxC", "fat-tree:K:O", "hosts:HxL", "measured")


class Link(NamedTuple):
    """One way from node to node: bytes a second, and seconds until the first is there."""

    source: str
    target: str
    rate: float
    latency: float = 0.0


@dataclass(frozen=True)
class Topology:
    """Hosts and links. A route is the links that a message takes, by their numbers.

    `groups` are nodes that one may cut off from the rest: what must cross such a cut bounds the
    time of a collective. Each host alone is such a group, too, without being named.
    """

    name: str
    hosts: tuple[str, ...]
    links: tuple[Link, ...]
    routes: Mapping[Pair, tuple[int, ...]]
    alpha: float  # seconds of each message, besides the latency of its links
    groups: tuple[frozenset[str], ...] = ()

    @property
    def nearest(self) -> float:
        """The shortest latency between two hosts."""
        if not any(link.latency for link in self.links):
            return self.alpha
        return min(map(self.latency, pairs(len(self.hosts))), default=self.alpha)

    def latency(self, pair: Pair) -> float:
        return self.alpha + sum(self.links[link].latency for link in self.routes[pair])

    def rate(self, pair: Pair) -> float:
        """Return the bytes a second of a message that has its route to itself."""
        return min(self.links[link].rate for link in self.routes[pair])


class Wires:
    """Links while they are laid; each is there once."""

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.links: list[Link] = []
        self.numbers: dict[tuple[str, str], int] = {}

    def lay(self, node: str, other: str, rate: float = 0.0, latency: float = 0.0) -> None:
        """Connect two nodes in both directions, at the rate of a host unless told otherwise."""
        for ends in ((node, other), (other, node)):
            if ends not in self.numbers:
                if len(self.links) == MOST_LINKS:
                    raise ValueError(f"a topology has at most {MOST_LINKS:,} links")
                self.numbers[ends] = len(self.links)
                self.links.append(Link(*ends, rate or self.rate, latency))

    def along(self, nodes: Sequence[str]) -> tuple[int, ...]:
        """Return the links of a way through these nodes."""
        return tuple(self.numbers[ends] for ends in itertools.pairwise(nodes))


Way = Callable[[int, int], Sequence[str]]  # the nodes from one host to another


class Routes(dict[Pair, tuple[int, ...]]):
    """Routes that are found when they are first asked for: many hosts have many pairs."""

    def __init__(self, wires: Wires, way: Way) -> None:
        super().__init__()
        self.wires, self.way = wires, way

    def __missing__(self, pair: Pair) -> tuple[int, ...]:
        self[pair] = self.wires.along(self.way(*pair))
        return self[pair]


def finish(
    name: str,
    hosts: Sequence[str],
    wires: Wires,
    way: Way,
    alpha: float,
    groups: Iterable[Iterable[str]] = (),
) -> Topology:
    routes = Routes(wires, way)
    sets = tuple(frozenset(group) for group in groups)
    return Topology(name, tuple(hosts), tuple(wires.links), routes, alpha, sets)


def pairs(count: int) -> Iterator[Pair]:
    return ((a, b) for a in range(count) for b in range(count) if a != b)


def host_names(count: int) -> list[str]:
    return [f"host{host}" for host in range(count)]


# ---- those with a name


def mesh(count: int, rate: float, alpha: float) -> Topology:
    hosts, wires = host_names(count), Wires(rate)
    for a, b in pairs(count):
        wires.lay(hosts[a], hosts[b])
    return finish("mesh", hosts, wires, lambda a, b: (hosts[a], hosts[b]), alpha)


def switch(count: int, rate: float, alpha: float) -> Topology:
    hosts, wires = host_names(count), Wires(rate)
    for host in hosts:
        wires.lay(host, "switch")
    return finish("switch", hosts, wires, lambda a, b: (hosts[a], "switch", hosts[b]), alpha)


def ring(count: int, rate: float, alpha: float) -> Topology:
    hosts, wires = host_names(count), Wires(rate)
    for host in range(count if count > 1 else 0):
        wires.lay(hosts[host], hosts[(host + 1) % count])

    def way(a: int, b: int) -> list[str]:
        return [hosts[host] for host in around(a, b, count)]

    half = [hosts[: count // 2]] if count > 2 else []
    return finish("ring", hosts, wires, way, alpha, half)


def around(a: int, b: int, count: int) -> list[int]:
    """Return the places from a to b the shorter way; upwards where both are as long."""
    up = (b - a) % count
    step, hops = (1, up) if up <= count - up else (-1, count - up)
    return [(a + step * hop) % count for hop in range(hops + 1)]


def torus(rows: int, columns: int, rate: float, alpha: float) -> Topology:
    hosts, wires = host_names(rows * columns), Wires(rate)
    for row in range(rows):
        for column in range(columns):
            here = hosts[row * columns + column]
            right, below = (column + 1) % columns, (row + 1) % rows
            if right != column:
                wires.lay(here, hosts[row * columns + right])
            if below != row:
                wires.lay(here, hosts[below * columns + column])

    def way(a: int, b: int) -> list[str]:
        (row, column), (last_row, last_column) = divmod(a, columns), divmod(b, columns)
        along = [row * columns + c for c in around(column, last_column, columns)]
        down = [r * columns + last_column for r in around(row, last_row, rows)]
        return [hosts[host] for host in [*along, *down[1:]]]

    halves = []
    if rows > 2:
        halves.append(hosts[: rows // 2 * columns])
    if columns > 2:
        halves.append([h for i, h in enumerate(hosts) if i % columns < columns // 2])
    return finish(f"torus:{rows}x{columns}", hosts, wires, way, alpha, halves)


def fat_tree(count: int, leaf: int, over: float, rate: float, alpha: float) -> Topology:
    """Make two levels. The links of a leaf upwards are one, so no route is worse by chance."""
    hosts, wires = host_names(count), Wires(rate)
    leaves = (count + leaf - 1) // leaf
    for host, name in enumerate(hosts):
        wires.lay(name, f"leaf{host // leaf}")
    for number in range(leaves if leaves > 1 else 0):
        wires.lay(f"leaf{number}", "spine", leaf * rate / over)

    def way(a: int, b: int) -> list[str]:
        up, down = f"leaf{a // leaf}", f"leaf{b // leaf}"
        middle = [up] if up == down else [up, "spine", down]
        return [hosts[a], *middle, hosts[b]]

    under = [[*hosts[i * leaf : (i + 1) * leaf], f"leaf{i}"] for i in range(leaves)]
    groups = under if leaves > 1 else []
    return finish(f"fat-tree:{leaf}:{over:g}", hosts, wires, way, alpha, groups)


def measured(hosts: Hosts) -> Topology:
    """Make links of what `ringcomm tune` found of each pair; see probes.py.

    A host has one link in each direction, as fast as the fastest of its pairs, and behind it each
    pair one of its own.
    """
    names, count = hosts.names, len(hosts.names)
    sites = dict(laid_out(hosts.latency, hosts.rate))
    wires = Wires(0.0)
    for host, name in enumerate(names):
        fastest = max(hosts.rate[host][other] for other in range(count) if other != host)
        wires.lay(name, f"{name} card", fastest)
    for a, b in pairs(count):
        cost = hosts.near if sites[a] == sites[b] else hosts.far
        ends = (f"{names[a]} card", f"{names[b]} card")
        wires.lay(*ends, hosts.rate[a][b], cost.alpha)

    def way(a: int, b: int) -> Sequence[str]:
        return (names[a], f"{names[a]} card", f"{names[b]} card", names[b])

    groups = [[name, f"{name} card"] for name in names]
    return finish("measured", names, wires, way, 0.0, groups)


# ---- by name


def local_of(text: str) -> tuple[int, int] | None:
    """Return hosts and ranks of each where the name says both, as "hosts:2x4"; else None."""
    match = re.fullmatch(r"hosts:([1-9]\d{0,3})x([1-9]\d{0,3})", text, re.ASCII)
    return (int(match[1]), int(match[2])) if match else None


def hosts_of(text: str) -> int | None:
    """Return how many hosts the name asks for; None: it fits any number."""
    if match := re.fullmatch(r"torus:([1-9]\d{0,3})x([1-9]\d{0,3})", text, re.ASCII):
        return int(match[1]) * int(match[2])
    both = local_of(text)
    return both[0] if both else None


def named(text: str, count: int, network: Network) -> Topology:
    """Return the topology of this name for so many hosts. Raises ValueError where it has none."""
    costs, known = network.fabrics.network, network.hosts
    rate, alpha = 1 / costs.beta, costs.alpha
    wanted = hosts_of(text)
    if wanted is not None and wanted != count:
        raise ValueError(f"{text} has {wanted} hosts, and the group {count}")
    simple = {"mesh": mesh, "switch": switch, "ring": ring}
    if text in simple:
        return simple[text](count, rate, alpha)
    if match := re.fullmatch(r"torus:(\d+)x(\d+)", text, re.ASCII):
        return torus(int(match[1]), int(match[2]), rate, alpha)
    pattern = r"fat-tree:([1-9]\d{0,3}):([1-9]\d{0,2}(?:\.\d{1,3})?)"
    if match := re.fullmatch(pattern, text, re.ASCII):
        return fat_tree(count, int(match[1]), float(match[2]), rate, alpha)
    if local_of(text):
        return dataclasses.replace(switch(count, rate, alpha), name=text)
    if text == "measured":
        if known is None or len(known.names) != count:
            has = len(known.names) if known else "none"
            raise ValueError(
                f"measured: the group has {count} hosts, and --costs has {has} measured pair by "
                "pair: give the file that `ringcomm tune` has written on as many"
            )
        return measured(known)
    raise ValueError(f"there is no topology {text!r}: use one of {', '.join(NAMES)}, or a file")
