"""Many sizes, ranks and algorithms: a table of times, and where another one is the fastest."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ringcomm._network.costs import Network
from ringcomm._text import show_seconds, show_size
from ringcomm.algorithms.call import call_of
from ringcomm.algorithms.program import AlgorithmError
from ringcomm.tools.plan import source
from ringcomm.tools.plan.simulate import files
from ringcomm.tools.plan.simulate.bounds import bounds
from ringcomm.tools.plan.simulate.engine import simulate
from ringcomm.tools.plan.source import Asked, function_of, name_of

ELEMENT = 4  # bytes

Times = dict[str, dict[int, float]]  # seconds, by algorithm and bytes


class Task(NamedTuple):
    """The sweep that is made for each group."""

    collective: str
    sizes: Sequence[int]
    algorithms: Mapping[str, Asked]
    root: int = 0


class Crossing(NamedTuple):
    """From about `bytes` on `after` is the fastest, not `before`."""

    bytes: float
    seconds: float
    before: str
    after: str


def fastest(times: Times, size: int) -> str:
    """Return the fastest algorithm of those that have the size; of equal ones the first by name."""
    return min((some[size], name) for name, some in times.items() if size in some)[1]


class Panel(NamedTuple):
    """One number of ranks."""

    ranks: int
    times: Times
    bounds: dict[int, float]  # seconds, by bytes

    def fastest(self, size: int) -> str:
        return fastest(self.times, size)


def named(algorithms: Sequence[Asked]) -> dict[str, Asked]:
    """Return algorithms by the names that tables and pictures have. Raises ValueError."""
    by_name: dict[str, Asked] = {}
    for asked in algorithms:
        function = function_of(asked)
        name = name_of(function) if function else str(asked)
        if name in by_name:
            raise ValueError(f"there are two algorithms {name}: rename the function of one")
        by_name[name] = function or asked
    return by_name


def panel_of(task: Task, ranks: int, hosts: int, topology: str, network: Network) -> Panel:
    """Simulate each algorithm with each size. Raises ValueError where none can do the call."""
    times: Times = {}
    least: dict[int, float] = {}
    where = files.find(topology, hosts, network)
    reason = ""
    for size in task.sizes:
        whole = rounded(size, ranks)
        call = call_of(task.collective, ranks, whole, hosts, ELEMENT, task.root)
        least[size] = bounds(call, where, network.fabrics).seconds
        for name, algorithm in task.algorithms.items():
            try:
                group = source.plans_of(call, algorithm, network)
            except ValueError as error:  # it is for other groups or collectives
                if isinstance(error, AlgorithmError) and not isinstance(
                    error.__cause__, ValueError
                ):
                    raise  # by hand, and wrong
                reason = str(error)
                continue
            run = simulate(group, where, network.fabrics)
            times.setdefault(name, {})[size] = run.seconds
    if not times:
        asked = ", ".join(task.algorithms)
        raise ValueError(
            f"{task.collective} of {ranks} ranks on these hosts has no {asked}: {reason}"
        )
    return Panel(ranks, times, least)


def rounded(size: int, ranks: int) -> int:
    """Return the bytes of equal shards of whole elements: one element each at least."""
    unit = ranks * ELEMENT
    return max(1, round(size / unit)) * unit


def crossings(panel: Panel) -> list[Crossing]:
    """Return where the fastest changes: between two sizes, where the lines of the picture cross."""
    places = []
    for low, high in itertools.pairwise(sorted(panel.bounds)):
        first, other = panel.fastest(low), panel.fastest(high)
        if first == other:
            continue
        ends = [panel.times[name].get(size) for name in (first, other) for size in (low, high)]
        if None in ends:
            continue  # one of them is not for both sizes
        a, b = (
            [math.log(panel.times[name][size]) for size in (low, high)] for name in (first, other)
        )
        before, after = b[0] - a[0], a[1] - b[1]  # how far apart; neither is negative
        part = before / (before + after) if before + after > 0 else 0.5
        size = low * (high / low) ** part
        places.append(Crossing(size, math.exp(a[0] + part * (a[1] - a[0])), first, other))
    return places


def lines_of(panel: Panel) -> Iterator[str]:
    """Yield the table of a panel, and where the fastest changes."""
    yield f"\n{panel.ranks} ranks"
    names = list(panel.times)
    wide = max(14, *(len(name) + 3 for name in names))
    yield f"{'bytes':>6} " + "".join(f"{name:>{wide}}" for name in [*names, "lower bound"])
    for size, least in panel.bounds.items():
        words = []
        for name in names:
            if size not in panel.times[name]:
                words.append("-  ")
                continue
            mark = " *" if name == panel.fastest(size) else "  "
            words.append(show_seconds(panel.times[name][size]) + mark)
        words.append(show_seconds(least) + "  ")
        yield f"{show_size(size):>6} " + "".join(f"{word:>{wide}}" for word in words)
    yield from crossing_lines(panel)


def crossing_lines(panel: Panel) -> Iterator[str]:
    smallest = min(panel.bounds)
    yield f"the fastest: {panel.fastest(smallest)} from {show_size(smallest)} on"
    for crossing in crossings(panel):
        yield f"  {crossing.after} from about {about(crossing.bytes)} on"


def about(size: float) -> str:
    """Return the bytes to two digits: "13K"."""
    for name, unit in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if size >= unit:
            return f"{size / unit:.2g}{name}" if size < 99.5 * unit else f"{size / unit:.0f}{name}"
    return f"{size:.0f}"
