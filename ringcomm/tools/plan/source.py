"""Where the plans of a command come from: the library, or a function in a file."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
from pathlib import Path
from typing import cast

from ringcomm._network.costs import Network
from ringcomm._text import counted, show_size
from ringcomm.algorithms import Algorithm
from ringcomm.algorithms.call import ROOTED, Call
from ringcomm.algorithms.proof import plans_by_hand
from ringcomm.algorithms.steps import DEFAULT_NETWORK, GroupPlans, Operand, Plan, plan_of
from ringcomm.algorithms.steps import plans_of as of_library
from ringcomm.options import ALGORITHMS

Asked = str | Algorithm | None
"""A name, "FILE.py:FUNCTION" or a function; None: by the library's table."""

MOST_STEPS = 2_000_000  # for all ranks together: more take minutes, and much memory


# ---- algorithms


def load(text: str) -> Algorithm:
    """Return the function that "FILE.py:FUNCTION" names. Raises ValueError."""
    file, _, name = text.rpartition(":")
    path = Path(file)
    if not file or not path.is_file():
        raise ValueError(f"{text}: write FILE.py:FUNCTION, with a file that is there")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not callable(getattr(module, name, None)):
        raise ValueError(f"{text}: {path.name} has no function {name!r}")
    return cast(Algorithm, getattr(module, name))


def function_of(asked: Asked) -> Algorithm | None:
    """Return the function that is asked for; None: an algorithm of the library. Raises ValueError.

    Names of the library have no colon, and no file is read for them.
    """
    if isinstance(asked, str):
        return load(asked) if ":" in asked else None
    return asked


def name_of(algorithm: Algorithm) -> str:
    """Return the function's name, with "by hand" where the library has an algorithm of that name.

    Pictures take letters, digits and underscores of ASCII, so others are underscores here.
    """
    name = re.sub(r"\W", "_", getattr(algorithm, "__name__", "by_hand"), flags=re.ASCII)[:40]
    return f"{name} by hand" if name in ALGORITHMS else name


# ---- plans


def plans_of(call: Call, algorithm: Asked = None, network: Network = DEFAULT_NETWORK) -> GroupPlans:
    """Return the plans of an algorithm for a call; those by hand are not proved.

    Raises ValueError where it has none, or they have too many steps, and AlgorithmError with the
    line of its code where one by hand is wrong.
    """
    if function := function_of(algorithm):
        return plans_by_hand(call, function, name_of(function))
    name = algorithm if isinstance(algorithm, str) else None
    first = plan_of(call, 0, name, network)
    check_reach(call, first, name, network)
    if len(first.steps) * call.ranks > MOST_STEPS:
        raise ValueError(
            f"{first.algorithm} of {counted(call.ranks, 'rank')} has about "
            f"{len(first.steps) * call.ranks:,} steps, and this takes at most {MOST_STEPS:,}"
        )
    return of_library(call, name, network)


def no_hosts(call: Call) -> str:
    """Say why there is no level of hosts; "" where there is one."""
    return "there is one host" if call.hosts == 1 else "a host has one rank" * (call.local == 1)


def no_sites(call: Call, network: Network) -> str:
    """Say why there is no level of sites; "" where there is one."""
    sites = network.sites(call.hosts)
    if not sites:
        return "sites are not known"
    if len(sites) == 1:
        return "there is one site"
    if len(set(sites)) > 1:
        return "sites have different numbers of hosts"
    return "a site has one host" * (sites[0] == 1)


def check_reach(call: Call, plan: Plan, asked: str | None, network: Network) -> None:
    """Refuse an algorithm that a group like this would not run. Raises ValueError."""
    if asked == "hierarchical" and no_hosts(call) and no_sites(call, network):
        raise ValueError(
            "hierarchical plans need several ranks on each of several hosts: "
            f"--hosts {call.hosts} leaves {call.local} on each"
        )
    operands = (operand for step in plan.steps for operand in step.targets + step.sources)
    reads = any(operand.space == "window" for operand in operands)
    if asked == "direct" and call.hosts > 1 and reads:
        raise ValueError(
            f"direct plans of {call.name} read the memory of other ranks, which only ranks of "
            "one host can: write --hosts 1"
        )


def json_of(group: GroupPlans) -> str:
    """Return the plans as JSON, a line for each step: docs/plan.md has the keys."""
    call = group.call
    head = {
        "format": "ringcomm plans",
        "version": 2,
        "shape": {**call._asdict(), "collective": call.name},
        "algorithm": group.algorithm,
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]

    def memory(operands: list[Operand]) -> list[dict[str, object]]:
        return [operand._asdict() for operand in operands]

    plans = []
    for steps in group.steps:
        rows: list[dict[str, object]] = [
            {"verb": step.verb, "peer": step.peer, "lane": step.lane}
            if step.lane
            else {
                "verb": step.verb,
                "bytes": step.bytes,
                "targets": memory(step.targets),
                "sources": memory(step.sources),
            }
            for step in steps
        ]
        plans.append("[\n " + ",\n ".join(map(json.dumps, rows)) + "]" if rows else "[]")
    return "{" + ",\n".join(lines) + ',\n"plans": [' + ",\n".join(plans) + "]}\n"


# ---- words


def title_of(call: Call, algorithm: str, dtype: str = "") -> str:
    """Return "all_reduce of 1M bytes, 8 ranks on 8 hosts: ring"."""
    typed = f", {dtype}" if dtype else ""
    what = "" if call.name == "barrier" else f" of {show_size(call.whole)} bytes{typed}"
    root = f", root {call.root}" if call.name in ROOTED else ""
    hosts = "one host" if call.hosts == 1 else f"{call.hosts} hosts"
    return f"{call.name}{what}{root}, {counted(call.ranks, 'rank')} on {hosts}: {algorithm}"


def check_root(options: argparse.Namespace, collective: str) -> int:
    """Return --root, or 0. Raises ValueError where the collective has none."""
    if options.root is not None and collective not in ROOTED:
        raise ValueError(f"{collective} has no root: --root is for {', '.join(ROOTED)}")
    return options.root or 0


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add --algorithm and --root, as of one operation."""
    add = parser.add_argument
    add("--algorithm", metavar="NAME", help="another than the table's; or FILE.py:FUNCTION")
    add("--root", type=int, help="of broadcast, reduce, scatter and gather (0)")
