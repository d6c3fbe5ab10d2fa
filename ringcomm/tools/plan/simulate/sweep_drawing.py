"""A sweep as an SVG: a panel for each number of ranks, time against bytes, both logarithmic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ringcomm._network.costs import Network
from ringcomm._text import show_seconds, show_size
from ringcomm.tools import svg
from ringcomm.tools.plan.simulate.sweep import Crossing, Panel, about, crossings

WIDE, HIGH = 330, 250  # a panel's axes, in pixels, as all lengths here
LEFT, ABOVE, BELOW, RIGHT = 66, 34, 48, 18  # around them
LETTER, LINE = 6.5, 14  # the text at a crossing
IN_A_ROW = 2  # more would be wider than a page
NARROWEST = 480  # the note fits into it
HEAD = 86  # title, note and legend
ENTRY = 118  # the width of an entry of the legend, unless a name is longer
# By algorithm, so that pictures can be compared.
COLORS = {
    "ring": svg.BLUE,
    "doubling": svg.VERMILION,
    "tree": svg.GREEN,
    "bruck": svg.PINK,
    "pairwise": svg.BROWN,
    "direct": svg.PURPLE,
    "hierarchical": ("#8b1a1a", "#ff8a80"),
    "dissemination": ("#006f7a", "#4dd0e1"),
}
RULES = (
    ".tick { fill: var(--soft); font-size: 11px; }",
    ".line { fill: none; stroke-width: 2px; }",
    ".least { fill: none; stroke: var(--soft); stroke-width: 1.5px; stroke-dasharray: 5 4; }",
    ".crossing { fill: var(--ground); stroke: var(--ink); stroke-width: 1.5px; }",
    ".mark { font-size: 11px; }",
)


class Axes(NamedTuple):
    """Where bytes and seconds lie: from `low` to `high`, by their logarithms."""

    x0: float
    y0: float
    low: float  # bytes
    high: float
    least: float  # seconds
    most: float

    def x(self, size: float) -> float:
        return self.x0 + WIDE * part(size, self.low, self.high)

    def y(self, seconds: float) -> float:
        return self.y0 + HIGH * (1 - part(seconds, self.least, self.most))


def part(value: float, low: float, high: float) -> float:
    return math.log(value / low) / math.log(high / low) if high > low else 0.5


def picture_of(
    collective: str, topology: str, network: Network, panels: Sequence[Panel]
) -> str:  # fmt: skip
    """Return the SVG of the panels, where their lines cross, too."""
    note = f"a model with the costs of {network.source}, not a measurement"
    crossed = [(panel, crossings(panel)) for panel in panels]
    return draw(f"{collective} on {topology}", note, crossed)


def draw(title: str, note: str, panels: Sequence[tuple[Panel, list[Crossing]]]) -> str:
    """Return the SVG; the note says in a few words what the times are of."""
    names = list(dict.fromkeys(name for panel, _ in panels for name in panel.times))
    columns = min(IN_A_ROW, len(panels))
    width = max(NARROWEST, columns * (LEFT + WIDE + RIGHT))
    entry = max(ENTRY, 40 + 7 * max(map(len, names)))
    entries = max(1, (width - 24) // entry)
    head = HEAD + 18 * (len(names) // entries)
    height = head + math.ceil(len(panels) / columns) * (ABOVE + HIGH + BELOW)
    colors = {word(name): pair for name, pair in colors_of(names).items()}
    parts = [
        svg.text(12, 24, title, "title"),
        svg.text(12, 42, note, "soft"),
        *legend(names, entries, entry),
    ]
    least, most = range_of([panel for panel, _ in panels])
    for number, (panel, crossed) in enumerate(panels):
        row, column = divmod(number, columns)
        x0 = column * (LEFT + WIDE + RIGHT) + LEFT
        y0 = head + row * (ABOVE + HIGH + BELOW) + ABOVE
        axes = Axes(x0, y0, min(panel.bounds), max(panel.bounds), least, most)
        parts += panel_of(panel, crossed, axes)
    return svg.picture(title, width, height, svg.style(colors, RULES), parts)


def colors_of(names: Sequence[str]) -> dict[str, svg.Pair]:
    """Return a color for each algorithm; those by hand have one that no other here has."""
    free = iter([pair for name, pair in COLORS.items() if name not in names])
    return {name: COLORS.get(name) or next(free, COLORS["ring"]) for name in names}


def word(name: str) -> str:
    """Return the name as one word of CSS."""
    return name.replace(" ", "-")


def range_of(panels: Sequence[Panel]) -> tuple[float, float]:
    """Return powers of ten around all times: panels have one scale, so that they compare."""
    every = [t for panel in panels for some in panel.times.values() for t in some.values()]
    every += [bound for panel in panels for bound in panel.bounds.values()]
    shown = [seconds for seconds in every if seconds > 0] or [1e-6]
    low = 10.0 ** math.floor(math.log10(min(shown)))
    return low, max(low * 10, 10.0 ** math.ceil(math.log10(max(shown)) - 1e-9))


def legend(names: Sequence[str], entries: int, entry: int) -> Iterator[str]:
    """Draw a line for each name, `entries` of so many pixels in a row."""
    for number, name in enumerate([*names, "lower bound"]):
        row, column = divmod(number, entries)
        x, y = 12 + column * entry, 64 + row * 18
        if name == "lower bound":
            yield svg.path(f"M{x} {y - 4}h22", "least")
        else:
            yield svg.path(f"M{x} {y - 4}h22", "line", stroke=word(name))
        yield svg.text(x + 28, y, name)


def panel_of(panel: Panel, crossed: Sequence[Crossing], axes: Axes) -> Iterator[str]:
    top, left, bottom = axes.y0, axes.x0, axes.y0 + HIGH
    yield svg.text(left, top - 12, f"{panel.ranks} ranks", "panel")
    for seconds in decades(axes):
        y = axes.y(seconds)
        yield svg.path(f"M{left} {y:.1f}h{WIDE}", "grid")
        yield svg.text(left - 6, y + 4, show_seconds(seconds), "tick", "end")
    sizes = sorted(panel.bounds)
    for size in sizes[:: max(1, math.ceil(len(sizes) / 7))]:
        x = axes.x(size)
        yield svg.path(f"M{x:.1f} {top}v{HIGH}", "grid")
        yield svg.text(x, bottom + 16, show_size(size), "tick", "middle")
    yield svg.text(left + WIDE / 2, bottom + 34, "bytes", "soft", "middle")
    least = {size: bound for size, bound in panel.bounds.items() if bound > 0}
    yield svg.path(path_of(least, axes), "least")
    for name, times in panel.times.items():
        yield svg.path(path_of(times, axes), "line", stroke=word(name), title=name)
    yield from marks(crossed, axes)


def decades(axes: Axes) -> Iterator[float]:
    for power in range(round(math.log10(axes.least)), round(math.log10(axes.most)) + 1):
        yield 10.0**power


def path_of(times: dict[int, float], axes: Axes) -> str:
    points = [f"{axes.x(size):.1f} {axes.y(times[size]):.1f}" for size in sorted(times)]
    return "M" + "L".join(points) if points else ""


def marks(crossed: Sequence[Crossing], axes: Axes) -> Iterator[str]:
    """Draw a dot where the fastest changes, with the bytes and the new one above or below it."""
    texts: list[tuple[float, float, float]] = []  # from and to on the line, and its height
    for crossing in crossed:
        x, y = axes.x(crossing.bytes), axes.y(crossing.seconds)
        yield svg.box(x - 4, y - 4, 8, 8, "crossing", more=' rx="4"')
        text = f"{crossing.after} from {about(crossing.bytes)}"
        left = x > axes.x0 + WIDE * 0.6
        at = x - 8 if left else x + 8
        begin, end = (at - LETTER * len(text), at) if left else (at, at + LETTER * len(text))
        height, step = (y - 10, -LINE) if left else (y + 18, LINE)
        while any(begin < b and a < end and abs(h - height) < LINE for a, b, h in texts):
            height += step
        texts.append((begin, end, height))
        yield svg.text(at, height, text, "mark outlined", "end" if left else "")
