"""Costs of messages: the model of Hockney (1994), and the files that `ringcomm tune` writes.

A message of m bytes takes alpha + m beta seconds, adding m bytes up takes m gamma. By these costs
csrc/plan/select.cc chooses algorithms, and tools/plan/simulate tells how long plans take.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ringcomm import _planner
from ringcomm._network.order import laid_out
from ringcomm._text import show_rate, show_seconds

NAME = r"\S{1,64}"  # a host's name


class Costs(NamedTuple):
    """Seconds that a fabric takes for a message, for each byte sent, and for each byte added up."""

    alpha: float
    beta: float
    gamma: float

    def __str__(self) -> str:
        return f"alpha {self.alpha!r} beta {self.beta!r} gamma {self.gamma!r}"

    @property
    def text(self) -> str:
        return (
            f"{show_seconds(self.alpha)} a message, {show_rate(1 / self.beta)} sent, "
            f"{show_rate(1 / self.gamma)} added up"
        )


class Fabrics(NamedTuple):
    """The costs between ranks of one host, and between hosts."""

    memory: Costs
    network: Costs


# Both were measured by `ringcomm tune`, see docs/performance.md.
DEFAULT = Fabrics(Costs(0.3e-6, 0.13e-9, 0.02e-9), Costs(*_planner.DEFAULT_COSTS))


class Hosts(NamedTuple):
    """Figures of `ringcomm tune` for every pair of hosts; see order.py for the matrices."""

    names: list[str]
    latency: list[list[float]]
    rate: list[list[float]]
    near: Costs  # inside a site, and between sites
    far: Costs


@dataclass(frozen=True)
class Network:
    """A network as far as it is known: its costs, and its hosts where they were measured."""

    fabrics: Fabrics = DEFAULT
    hosts: Hosts | None = None
    source: str = "ringcomm's defaults"

    @functools.cached_property
    def _along(self) -> list[tuple[int, int]]:
        return laid_out(self.hosts.latency, self.hosts.rate) if self.hosts else []

    def _known(self, count: int) -> Hosts | None:
        """Return the hosts, if they are as many."""
        return self.hosts if self.hosts and len(self.hosts.names) == count > 1 else None

    def word(self, count: int) -> tuple[str, list[str]]:
        """Return what rank 0 hands to all ranks on so many hosts, and the names of these hosts.

        It has the form of csrc/plan/topology.h.
        """
        if (hosts := self._known(count)) is None:
            return str(self.fabrics.network), []
        words = [str(self.fabrics.network), str(hosts.near), str(hosts.far)]
        words += [f"{hosts.names[host]} {site}" for host, site in self._along]
        return " ".join(words), list(hosts.names)

    def sites(self, count: int) -> list[int]:
        """Return how many hosts each site has; none: sites are not known."""
        numbers = [site for _, site in self._along] if self._known(count) else []
        return [numbers.count(site) for site in dict.fromkeys(numbers)]


def read(path: Path | None) -> Network:
    """Read what `ringcomm tune` has written; None: the defaults. Raises ValueError, and OSError.

    Where it measured no memory, the default stands in.
    """
    if path is None:
        return Network()
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        memory, network = body["memory"], Costs(**body["network"])
        fabrics = Fabrics(Costs(**memory) if memory else DEFAULT.memory, network)
        hosts = None
        if body.get("names"):
            ends = [Costs(**body[name]) if body.get(name) else network for name in ("near", "far")]
            hosts = Hosts(body["names"], body["latency"], body["rate"], *ends)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a file of `ringcomm tune`: {error!r}") from error
    every = [*fabrics.memory, *fabrics.network, *((*hosts.near, *hosts.far) if hosts else ())]
    for cost in every:
        if not is_positive(cost):
            raise ValueError(f"{path}: {cost!r} is not a positive number of seconds")
    return Network(fabrics, hosts and _checked(hosts, path), str(path))


def is_positive(value: object) -> bool:
    return isinstance(value, float | int) and math.isfinite(value) and value > 0


def _checked(hosts: Hosts, path: Path) -> Hosts:
    """Return them with symmetric matrices: of a pair the worse direction counts."""
    names, count = hosts.names, len(hosts.names)
    if not all(isinstance(name, str) and re.fullmatch(NAME, name) for name in names):
        raise ValueError(f"{path}: names must be words of up to 64 characters")
    if len(set(names)) < count:
        raise ValueError(f"{path}: two hosts have the same name: names must differ")
    for what, matrix in (("latency", hosts.latency), ("rate", hosts.rate)):
        rows = matrix if isinstance(matrix, list) else []
        if len(rows) != count or not all(isinstance(r, list) and len(r) == count for r in rows):
            raise ValueError(f"{path}: {what} must have {count} rows of {count} numbers, as names")
        for a, b in itertools.permutations(range(count), 2):
            if not is_positive(rows[a][b]):
                pair = f"{names[a]} and {names[b]}"
                raise ValueError(f"{path}: {what} of {pair} is {rows[a][b]!r}, no positive number")
    worse = [
        [[0.0 if a == b else worst(m[a][b], m[b][a]) for b in range(count)] for a in range(count)]
        for m, worst in ((hosts.latency, max), (hosts.rate, min))
    ]
    return hosts._replace(latency=worse[0], rate=worse[1])


def word(path: str) -> str:
    """Return what rank 0 hands to all ranks of a group.

    The library calls this for each group. Raises ValueError where the file cannot be used.
    """
    try:
        when = Path(path).stat()
        network = _read(Path(path), when.st_mtime_ns, when.st_size, when.st_ino)
    except OSError as error:
        raise ValueError(f"{path}: the file cannot be read ({error.strerror})") from None
    return network.word(len(network.hosts.names) if network.hosts else 0)[0]


@functools.lru_cache(maxsize=4)
def _read(path: Path, *_: int) -> Network:
    return read(path)


# The collectives whose limits `ringcomm tune` tells.
LIMITED = {
    "doubling": "all_reduce",
    "bruck": "all_reduce",
    "pairwise": "all_gather",
    "tree": "broadcast",
}


def limits(costs: Costs, hosts: int) -> dict[str, int]:
    """Return up to how many bytes ranks of so many hosts take each algorithm.

    That of pairwise is for the largest shard.
    """
    rows = [row for row in _planner.selection(hosts, str(costs)) if row["fits"]]
    return {
        name: row["limit"]
        for name, collective in LIMITED.items()
        for row in rows
        if (row["collective"], row["algorithm"]) == (collective, name)
    }
