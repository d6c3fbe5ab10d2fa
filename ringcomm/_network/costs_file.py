"""Files that `ringcomm tune` writes, and the word of rank 0 that has what they say."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from pathlib import Path
from typing import NamedTuple

from ringcomm._network.costs import DEFAULT, Costs, Fabrics
from ringcomm._network.order import laid_out

NAME = r"\S{1,64}"  # of a host


class Hosts(NamedTuple):
    """What `ringcomm tune` measured between every pair of hosts; see order.py for the matrices."""

    names: list[str]
    latency: list[list[float]]
    rate: list[list[float]]
    near: Costs  # inside a site, and between sites
    far: Costs


def read_costs(path: Path) -> Fabrics:
    """Read what `ringcomm tune` has written; where it measured no memory, the default stands in.

    Raises ValueError, and OSError.
    """
    return read_file(path)[0]


def read_file(path: Path) -> tuple[Fabrics, Hosts | None]:
    """The same, and the hosts that were measured pair by pair, if there are any in the file."""
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
    return fabrics, hosts and _checked(hosts, path)


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
    """Return what rank 0 hands to all ranks of a group, in the form of csrc/plan/topology.h.

    The library calls this for each group. Raises ValueError where the file cannot be used.
    """
    try:
        when = Path(path).stat()
        return _word(Path(path), when.st_mtime_ns, when.st_size, when.st_ino)
    except OSError as error:
        raise ValueError(f"{path}: the file cannot be read ({error.strerror})") from None


@functools.lru_cache(maxsize=4)
def _word(path: Path, *_: int) -> str:
    fabrics, hosts = read_file(path)
    return word_of(fabrics, hosts)


def word_of(fabrics: Fabrics, hosts: Hosts | None) -> str:
    if hosts is None:
        return str(fabrics.network)
    words = [str(fabrics.network), str(hosts.near), str(hosts.far)]
    along = laid_out(hosts.latency, hosts.rate)
    return " ".join([*words, *(f"{hosts.names[host]} {site}" for host, site in along)])
