"""A sweep as an SVG: a panel for each number of ranks, time against bytes, both logarithmic."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple
from xml.sax.saxutils import escape, quoteattr

from ringcomm._text import show_seconds, show_size

if TYPE_CHECKING:
    from ringcomm.tools.plan.simulate.sweep import Crossing, Panel

WIDE, HIGH = 330, 250  # of a panel's axes, in pixels, as all lengths here
LEFT, ABOVE, BELOW, RIGHT = 66, 34, 48, 18  # around them
LETTER, LINE = 6.5, 14  # of the text at a crossing
IN_A_ROW = 3
NARROWEST = 480  # the note fits into it
HEAD = 86  # title, note and legend
ENTRY = 118  # of the legend, unless a name is longer
# Of Okabe and Ito, which everybody tells apart; by algorithm, so that pictures can be compared.
COLOURS = {
    "ring": ("#0072b2", "#56b4e9"),
    "doubling": ("#d55e00", "#e69f00"),
    "tree": ("#009e73", "#2fc79a"),
    "bruck": ("#cc79a7", "#e19fc4"),
    "pairwise": ("#8a6d00", "#f0e442"),
    "direct": ("#5b2fb0", "#b39ddb"),
    "hierarchical": ("#8b1a1a", "#ff8a80"),
    "dissemination": ("#006f7a", "#4dd0e1"),
}
STYLE = """
svg { --ground: #ffffff; --ink: #1b1f24; --soft: #5b6470; --line: #d5dae0; LIGHT
  color-scheme: light dark; background: var(--ground); font: 12px system-ui, sans-serif; }
@media (prefers-color-scheme: dark) {
  svg { --ground: #14171a; --ink: #e6e9ec; --soft: #9aa4af; --line: #343a41; DARK }
}
.ground { fill: var(--ground); }
text { fill: var(--ink); }
.title { font-size: 15px; font-weight: 600; }
.panel { font-weight: 600; }
.soft, .tick { fill: var(--soft); }
.tick { font-size: 11px; }
.grid { stroke: var(--line); }
.line { fill: none; stroke-width: 2px; }
.least { fill: none; stroke: var(--soft); stroke-width: 1.5px; stroke-dasharray: 5 4; }
.crossing { fill: var(--ground); stroke: var(--ink); stroke-width: 1.5px; }
.mark { font-size: 11px; paint-order: stroke; stroke: var(--ground); stroke-width: 4px; }
"""


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


def draw(title: str, note: str, panels: Sequence[tuple[Panel, list[Crossing]]]) -> str:
    """Return the SVG; the note says in a few words what the times are of."""
    names = list(dict.fromkeys(name for panel, _ in panels for name in panel.times))
    columns = min(IN_A_ROW, len(panels))
    width = max(NARROWEST, columns * (LEFT + WIDE + RIGHT))
    entry = max(ENTRY, 40 + 7 * max(map(len, names)))
    entries = max(1, (width - 24) // entry)
    head = HEAD + 18 * (len(names) // entries)
    height = head + math.ceil(len(panels) / columns) * (ABOVE + HIGH + BELOW)
    light, dark = (
        "".join(f"--{word(name)}: {pair[i]}; " for name, pair in colours(names).items())
        for i in (0, 1)
    )
    style = STYLE.replace("LIGHT", light).replace("DARK", dark)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label={quoteattr(title)}>',
        f"<title>{escape(title)}</title><style>{style}</style>",
        f'<rect class="ground" width="{width}" height="{height}"/>',
        f'<text class="title" x="12" y="24">{escape(title)}</text>',
        f'<text class="soft" x="12" y="42">{escape(note)}</text>',
        *legend(names, entries, entry),
    ]
    least, most = range_of([panel for panel, _ in panels])
    for number, (panel, found) in enumerate(panels):
        row, column = divmod(number, columns)
        x0 = column * (LEFT + WIDE + RIGHT) + LEFT
        y0 = head + row * (ABOVE + HIGH + BELOW) + ABOVE
        axes = Axes(x0, y0, min(panel.bounds), max(panel.bounds), least, most)
        parts += panel_of(panel, found, axes)
    return "\n".join([*parts, "</svg>"]) + "\n"


def colours(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return a colour of each algorithm; those by hand have what no other here has."""
    free = iter([pair for name, pair in COLOURS.items() if name not in names])
    return {name: COLOURS.get(name) or next(free, COLOURS["ring"]) for name in names}


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
    """A line for each name, `entries` of so many pixels in a row."""
    for number, name in enumerate([*names, "lower bound"]):
        row, column = divmod(number, entries)
        x, y = 12 + column * entry, 64 + row * 18
        bound = name == "lower bound"
        css = 'class="least"' if bound else f'class="line" style="stroke: var(--{word(name)})"'
        yield f'<path {css} d="M{x} {y - 4}h22"/><text x="{x + 28}" y="{y}">{name}</text>'


def panel_of(panel: Panel, found: Sequence[Crossing], axes: Axes) -> Iterator[str]:
    top, left, bottom = axes.y0, axes.x0, axes.y0 + HIGH
    yield f'<text class="panel" x="{left}" y="{top - 12}">{panel.ranks} ranks</text>'
    for seconds in decades(axes):
        y = axes.y(seconds)
        yield f'<path class="grid" d="M{left} {y:.1f}h{WIDE}"/>'
        text = show_seconds(seconds)
        yield f'<text class="tick" x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>'
    sizes = sorted(panel.bounds)
    for size in sizes[:: max(1, math.ceil(len(sizes) / 7))]:
        x = axes.x(size)
        yield f'<path class="grid" d="M{x:.1f} {top}v{HIGH}"/>'
        yield f'<text class="tick" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">' + (
            f"{show_size(size)}</text>"
        )
    middle = left + WIDE / 2
    yield f'<text class="soft" x="{middle}" y="{bottom + 34}" text-anchor="middle">bytes</text>'
    least = {size: bound for size, bound in panel.bounds.items() if bound > 0}
    yield f'<path class="least" d="{path_of(least, axes)}"/>'
    for name, times in panel.times.items():
        css = f'class="line" style="stroke: var(--{word(name)})"'
        yield f'<path {css} d="{path_of(times, axes)}"><title>{name}</title></path>'
    yield from marks(found, axes)


def decades(axes: Axes) -> Iterator[float]:
    for power in range(round(math.log10(axes.least)), round(math.log10(axes.most)) + 1):
        yield 10.0**power


def path_of(times: dict[int, float], axes: Axes) -> str:
    points = [f"{axes.x(size):.1f} {axes.y(times[size]):.1f}" for size in sorted(times)]
    return "M" + "L".join(points) if points else ""


def marks(found: Sequence[Crossing], axes: Axes) -> Iterator[str]:
    """A dot where the fastest changes, with the bytes and the new one above or below it."""
    from ringcomm.tools.plan.simulate.sweep import about

    texts: list[tuple[float, float, float]] = []  # from and to on the line, and its height
    for one in found:
        x, y = axes.x(one.bytes), axes.y(one.seconds)
        dot = f'x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" rx="4"'
        yield f'<rect class="crossing" {dot}/>'
        text = f"{one.after} from {about(one.bytes)}"
        left = x > axes.x0 + WIDE * 0.6
        anchor, at = ("end", x - 8) if left else ("start", x + 8)
        begin, end = (at - LETTER * len(text), at) if left else (at, at + LETTER * len(text))
        height, step = (y - 10, -LINE) if left else (y + 18, LINE)
        while any(begin < b and a < end and abs(h - height) < LINE for a, b, h in texts):
            height += step
        texts.append((begin, end, height))
        place = f'x="{at:.1f}" y="{height:.1f}" text-anchor="{anchor}"'
        yield f'<text class="mark" {place}>{text}</text>'
