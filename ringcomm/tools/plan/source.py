"""Where the plans of a command come from: the library by the collective's name, or a file."""

from __future__ import annotations

import argparse
from pathlib import Path

from ringcomm._network.costs import DEFAULT, Fabrics
from ringcomm._network.costs_file import Hosts
from ringcomm._text import show_size
from ringcomm.algorithms.steps import COLLECTIVES, plan_of, shape_of
from ringcomm.tools.plan import file
from ringcomm.tools.plan.by_hand import Asked, function_of, of_hand
from ringcomm.tools.plan.show import check_reach
from ringcomm.tools.plan.tables import GroupPlans, of_library


def file_of(words: str) -> Path | None:
    """Return the path where the argument names a file of plans; None: it names a collective."""
    return Path(words) if words.endswith(".json") else None


def plans_of(
    what: str,
    ranks: int,
    size: int,
    hosts: int,
    algorithm: Asked,
    root: int = 0,
    fabrics: Fabrics = DEFAULT,
    measured: Hosts | None = None,
    element: int = 4,
) -> GroupPlans:
    """Return the plans of a file, which has its own shape; or those of an algorithm for this shape.

    It is one of the library, or a function by hand. Raises ValueError, and OSError.
    """
    if path := file_of(what):
        return file.read(path)
    shape = shape_of(what, ranks, size, hosts, element, root, fabrics, measured)
    if function := function_of(algorithm):
        return of_hand(shape, function)
    name = algorithm if isinstance(algorithm, str) else None
    check_reach(shape, plan_of(shape, 0, name), name)
    return of_library(shape, name)


def title_of(group: GroupPlans) -> str:
    """Return "all_reduce of 1M bytes, 8 ranks on 8 hosts: ring"."""
    shape = group.shape
    size = shape.bytes or sum(shape.shards or shape.send)
    what = "" if shape.name == "barrier" else f" of {show_size(size)} bytes"
    hosts = "one host" if shape.hosts == 1 else f"{shape.hosts} hosts"
    ranks = "1 rank" if shape.size == 1 else f"{shape.size} ranks"
    return f"{shape.name}{what}, {ranks} on {hosts}: {group.algorithm}"


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add the argument that `plans_of` reads as `what`."""
    text = f"one of {', '.join(COLLECTIVES)}; or a file that `ringcomm plan --export` wrote"
    parser.add_argument("collective", metavar="COLLECTIVE | FILE.json", help=text)
