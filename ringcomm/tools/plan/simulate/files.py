"""A topology from a file: see docs/simulate.md for its keys.

Each number is checked before it is used, and an error names the place, as "links[2].rate".
"""

from __future__ import annotations

import itertools
import json
import math
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ringcomm._network.costs import Network, is_positive
from ringcomm.tools.plan.simulate.topology import MOST_LINKS, Link, Pair, Topology, named, pairs

KEYS = {"hosts", "links", "alpha", "routes", "groups"}
LINK_KEYS = {"from", "to", "rate", "latency", "one_way"}
MOST_HOSTS = 512


class PlaceError(ValueError):
    """An error in a file, with its place: "links[2].rate"."""

    def __init__(self, place: str, what: str) -> None:
        super().__init__(f"{place}: {what}")


def find(text: str, hosts: int, network: Network) -> Topology:
    """Return the topology of a name or file, for so many hosts. Raises ValueError, and OSError."""
    if not text.endswith(".json"):
        return named(text, hosts, network)
    topology = read(Path(text), network.fabrics.network.alpha)
    if len(topology.hosts) != hosts:
        raise ValueError(f"{text} has {len(topology.hosts)} hosts, and the group {hosts}")
    return topology


def read(path: Path, alpha: float) -> Topology:
    """Read a topology; `alpha` counts where the file has none. Raises ValueError, and OSError."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    try:
        return parse(body, path.stem, alpha)
    except PlaceError as error:
        raise ValueError(f"{path}: {error}") from None


def parse(body: Any, name: str, alpha: float) -> Topology:
    if not isinstance(body, dict):
        raise PlaceError("the file", "it must be an object with hosts and links")
    for key in body:
        if key not in KEYS:
            raise PlaceError(str(key), f"there is no such key: use {', '.join(sorted(KEYS))}")
    hosts = names_of(body.get("hosts"), "hosts", MOST_HOSTS)
    links = links_of(body.get("links"))
    nodes = {node for link in links for node in (link.source, link.target)} | set(hosts)
    routes = shortest(hosts, links)
    routes.update(routes_of(body.get("routes", []), hosts, links))
    for a, b in pairs(len(hosts)):
        if (a, b) not in routes:
            raise PlaceError("links", f"none lead from {hosts[a]} to {hosts[b]}")
    groups = list_of(body.get("groups", []), "groups")
    sets = []
    for number, group in enumerate(groups):
        place = f"groups[{number}]"
        some = names_of(group, place, len(nodes))
        for node in some:
            if node not in nodes:
                raise PlaceError(place, f"there is no node {node!r}")
        sets.append(frozenset(some))
    own = body.get("alpha", alpha)
    if not is_number(own) or own < 0:
        raise PlaceError("alpha", f"{own!r} is no number of seconds")
    return Topology(name, tuple(hosts), tuple(links), routes, float(own), tuple(sets))


def list_of(value: Any, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise PlaceError(place, "it must be a list")
    return value


def names_of(value: Any, place: str, most: int) -> list[str]:
    names = list_of(value, place)
    if not 0 < len(names) <= most:
        raise PlaceError(place, f"it must have 1 to {most} names")
    for number, name in enumerate(names):
        if not isinstance(name, str) or not name:
            raise PlaceError(f"{place}[{number}]", f"{name!r} is no name")
    if len(set(names)) < len(names):
        raise PlaceError(place, "a name is there twice")
    return names


def is_number(value: Any) -> bool:
    number = isinstance(value, float | int) and not isinstance(value, bool)
    return number and abs(value) < 1e300 and math.isfinite(value)


def links_of(value: Any) -> list[Link]:
    """Return the links, of which each is two unless it is one_way."""
    links: list[Link] = []
    ends: set[tuple[str, str]] = set()
    for number, entry in enumerate(list_of(value, "links")):
        place = f"links[{number}]"
        link, one_way = link_of(entry, place)
        back = link._replace(source=link.target, target=link.source)
        for way in [link] if one_way else [link, back]:
            if way[:2] in ends:
                text = f"there is a link from {way.source} to {way.target} already"
                raise PlaceError(place, text)
            ends.add((way.source, way.target))
            links.append(way)
        if len(links) > MOST_LINKS:
            raise PlaceError("links", f"there are more than {MOST_LINKS:,}")
    return links


def link_of(entry: Any, place: str) -> tuple[Link, bool]:
    """Return a link, and whether it goes one way."""
    if not isinstance(entry, dict):
        raise PlaceError(place, "it must be an object")
    for key in entry:
        if key not in LINK_KEYS:
            raise PlaceError(place, f"there is no key {key!r}: use {', '.join(sorted(LINK_KEYS))}")
    ends = []
    for key in ("from", "to"):
        node = entry.get(key)
        if not isinstance(node, str) or not node:
            raise PlaceError(f"{place}.{key}", f"{node!r} is no name")
        ends.append(node)
    if ends[0] == ends[1]:
        raise PlaceError(place, f"it leads from {ends[0]} to itself")
    rate, latency = entry.get("rate"), entry.get("latency", 0.0)
    one_way = entry.get("one_way", False)
    if not is_number(rate) or rate is None or not is_positive(rate):
        raise PlaceError(f"{place}.rate", f"{rate!r} is no positive number of bytes a second")
    if not is_number(latency) or latency < 0:
        raise PlaceError(f"{place}.latency", f"{latency!r} is no number of seconds")
    if not isinstance(one_way, bool):
        raise PlaceError(f"{place}.one_way", "it must be true or false")
    return Link(ends[0], ends[1], float(rate), float(latency)), one_way


def shortest(hosts: Sequence[str], links: Sequence[Link]) -> dict[Pair, tuple[int, ...]]:
    """Return the routes with the fewest links; of equal ones, by the links that come first."""
    out: dict[str, list[int]] = {}
    for number, link in enumerate(links):
        out.setdefault(link.source, []).append(number)
    routes: dict[Pair, tuple[int, ...]] = {}
    for a, host in enumerate(hosts):
        by: dict[str, tuple[int, ...]] = {host: ()}
        waiting = deque([host])
        while waiting:
            node = waiting.popleft()
            for number in out.get(node, []):
                if (after := links[number].target) not in by:
                    by[after] = (*by[node], number)
                    waiting.append(after)
        routes.update({(a, b): by[name] for b, name in enumerate(hosts) if b != a and name in by})
    return routes


def routes_of(
    value: Any, hosts: Sequence[str], links: Sequence[Link]
) -> dict[Pair, tuple[int, ...]]:
    """Return the routes that are written out: each as the nodes that it goes through."""
    numbers = {(link.source, link.target): number for number, link in enumerate(links)}
    routes = {}
    for number, nodes in enumerate(list_of(value, "routes")):
        place = f"routes[{number}]"
        names = names_of(nodes, place, len(links) + 1)
        if len(names) < 2 or names[0] not in hosts or names[-1] not in hosts:
            raise PlaceError(place, "it must lead from a host to another")
        ways = list(itertools.pairwise(names))
        for way in ways:
            if way not in numbers:
                raise PlaceError(place, f"there is no link from {way[0]} to {way[1]}")
        ends = hosts.index(names[0]), hosts.index(names[-1])
        routes[ends] = tuple(numbers[way] for way in ways)
    return routes
