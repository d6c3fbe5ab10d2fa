"""Many sizes, ranks and algorithms: a table of times, and where another one is the fastest."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from ringcomm import options as settings
from ringcomm.tools import plan_source
from ringcomm.tools.plan_steps import COLLECTIVES, shape_of
from ringcomm.tools.simulate import sweep_drawing
from ringcomm.tools.simulate.bounds import bounds
from ringcomm.tools.simulate.setting import Setting, simulate
from ringcomm.tools.words import show_seconds, show_size

ELEMENT = 4  # bytes

Times = dict[str, dict[int, float]]  # seconds, by algorithm and bytes


class Crossing(NamedTuple):
    """From about `bytes` on `after` is the fastest, not `before`."""

    bytes: float
    seconds: float
    before: str
    after: str


class Panel(NamedTuple):
    """One number of ranks."""

    ranks: int
    times: Times
    bounds: dict[int, float]  # seconds, by bytes

    def fastest(self, size: int) -> str:
        """Return the fastest algorithm; of equal ones the first by name."""
        return min((some[size], name) for name, some in self.times.items() if size in some)[1]


def run(options: argparse.Namespace, setting: Setting, numbers: list[int], local: int) -> int:
    """Print the table of each number of ranks, and draw them. Raises ValueError."""
    if options.collective not in COLLECTIVES:
        raise ValueError(f"there is no collective {options.collective!r} to be swept")
    source = f"{options.topology}, by a model with the costs of: {setting.source}"
    print(
        f"{options.collective}, {local} ranks a host\n{source}"
        if local > 1
        else (f"{options.collective}\n{source}")
    )
    panels = []
    for ranks in numbers:
        panel = panel_of(options, setting, ranks, local)
        if not panel.times:
            asked = ", ".join(options.algorithm or [])
            raise ValueError(f"{options.collective} of {ranks} ranks on these hosts has no {asked}")
        panels.append(panel)
        print_panel(panel)
    if options.svg:
        title = f"{options.collective} on {options.topology}"
        note = f"a model with the costs of {setting.source}, not a measurement"
        drawn = sweep_drawing.draw(title, note, [(one, crossings(one)) for one in panels])
        options.svg.write_text(drawn, encoding="utf-8")
        print(f"\n{options.svg}: drawn")
    return 0


def panel_of(options: argparse.Namespace, setting: Setting, ranks: int, local: int) -> Panel:
    names = options.algorithm or settings.ALGORITHMS
    times: Times = {}
    least: dict[int, float] = {}
    where = setting.of(ranks // local)
    for size in options.bytes:
        whole = rounded(size, ranks)
        shape = shape_of(options.collective, ranks, whole, ranks // local, ELEMENT)
        least[size] = bounds(shape, where, setting.fabrics).seconds
        for name in names:
            try:
                group = plan_source.plans_of(
                    options.collective, ranks, whole, ranks // local, name,
                    options.root or 0, setting.fabrics, setting.known,
                )  # fmt: skip
            except ValueError:  # the collective has no such algorithm on hosts like these
                continue
            times.setdefault(name, {})[size] = simulate(group, where, setting.fabrics)[0]
    return Panel(ranks, times, least)


def rounded(size: int, ranks: int) -> int:
    """Return the bytes of equal shards of whole elements: one element each at least."""
    unit = ranks * ELEMENT
    return max(1, round(size / unit)) * unit


def crossings(panel: Panel) -> list[Crossing]:
    """Return where the fastest changes: between two sizes, where the lines of the picture cross."""
    found = []
    for low, high in itertools.pairwise(sorted(panel.bounds)):
        one, other = panel.fastest(low), panel.fastest(high)
        if one == other:
            continue
        a, b = (
            [math.log(panel.times[name][size]) for size in (low, high)] for name in (one, other)
        )
        before, after = b[0] - a[0], a[1] - b[1]  # how far apart; neither is negative
        part = before / (before + after) if before + after > 0 else 0.5
        size = low * (high / low) ** part
        found.append(Crossing(size, math.exp(a[0] + part * (a[1] - a[0])), one, other))
    return found


def print_panel(panel: Panel) -> None:
    print(f"\n{panel.ranks} ranks")
    names = list(panel.times)
    print(f"{'bytes':>6} " + "".join(f"{name:>14}" for name in [*names, "lower bound"]))
    for size, least in panel.bounds.items():
        words = []
        for name in names:
            if size not in panel.times[name]:
                words.append("-  ")
                continue
            mark = " *" if name == panel.fastest(size) else "  "
            words.append(show_seconds(panel.times[name][size]) + mark)
        words.append(show_seconds(least) + "  ")
        print(f"{show_size(size):>6} " + "".join(f"{word:>14}" for word in words))
    for text in crossing_lines(panel):
        print(text)


def crossing_lines(panel: Panel) -> Iterator[str]:
    smallest = min(panel.bounds)
    yield f"the fastest: {panel.fastest(smallest)} from {show_size(smallest)} on"
    for one in crossings(panel):
        yield f"  {one.after} from about {about(one.bytes)} on"


def about(size: float) -> str:
    """Return the bytes to two digits: "13K"."""
    for name, unit in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if size >= unit:
            return f"{size / unit:.2g}{name}" if size < 99.5 * unit else f"{size / unit:.0f}{name}"
    return f"{size:.0f}"
