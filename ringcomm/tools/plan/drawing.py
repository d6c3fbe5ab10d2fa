"""A plan as an SVG: ranks from top to bottom, time from left to right, messages as arrows.

The picture has the colours of Okabe and Ito, follows the reader's choice of light or dark, and is
as wide as its messages need: narrow windows scroll. Its times are those of plan_times.py.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol
from xml.sax.saxutils import escape, quoteattr

from ringcomm._network.costs import Costs, Fabrics
from ringcomm._text import show_rate, show_seconds, show_size
from ringcomm.algorithms.steps import Shape, Step
from ringcomm.tools.plan.times import Simulation

MOST_MESSAGES = 20_000  # a browser takes seconds to show more
LEFT, RIGHT = 76, 28  # of the time axis, in pixels, as all lengths here
NARROWEST, WIDEST = 660, 6000  # of the time axis
PER_MESSAGE = 15  # of the time axis, for each that the busiest rank sends
COLUMNS = 52  # characters of a line of text: the head fits into a narrow window
LINE = 17
HOST = 20  # the line that names a host
DIGIT = 6.2  # the width of a character of a label

STYLE = """
svg { --ground: #ffffff; --ink: #1b1f24; --soft: #5b6470; --line: #d5dae0; --wait: #aab2bb;
  --copy: #0072b2; --reduce: #d55e00; --credit: #cc79a7;
  color-scheme: light dark; background: var(--ground); font: 12px system-ui, sans-serif; }
@media (prefers-color-scheme: dark) {
  svg { --ground: #14171a; --ink: #e6e9ec; --soft: #9aa4af; --line: #343a41; --wait: #5f6973;
    --copy: #56b4e9; --reduce: #e69f00; }
}
.ground { fill: var(--ground); }
text { fill: var(--ink); }
.title { font-size: 15px; font-weight: 600; }
.soft { fill: var(--soft); }
.grid, .base { stroke: var(--line); }
.wait { fill: var(--wait); }
.copy { fill: var(--copy); }
.reduce { fill: var(--reduce); }
.data, .credit { fill: none; stroke: var(--ink); stroke-opacity: var(--strength); }
.credit { stroke: var(--credit); stroke-dasharray: 4 3; }
.data:hover, .credit:hover { stroke-opacity: 1; stroke-width: 3px; }
.head { fill: var(--ink); fill-opacity: calc(var(--strength) + 0.3); }
.head-credit { fill: var(--credit); fill-opacity: calc(var(--strength) + 0.3); }
.bytes { font-size: 10px; paint-order: stroke; stroke: var(--ground); stroke-width: 3px; }
"""
ARROWS = "".join(
    f'<marker id="{name}" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="6" markerHeight="6" '
    f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0.5L6 3L0 5.5z" class="{css}"/>'
    "</marker>"
    for name, css in (("to-data", "head"), ("to-credit", "head-credit"))
)


class Scale(NamedTuple):
    """Where ranks and times lie in the picture."""

    seconds: float  # of the whole
    width: int  # of the time axis
    top: int  # of the first lane
    lane: int  # the height of one
    bar: int  # and of what is drawn in it
    ranks: int
    local: int  # of a host; as many as ranks: hosts are not named

    def x(self, seconds: float) -> float:
        return LEFT + seconds / self.seconds * self.width

    def y(self, rank: int) -> float:
        """Return the middle of a lane."""
        hosts = rank // self.local + 1 if self.local < self.ranks else 0
        return self.top + hosts * HOST * (self.local > 1) + (rank + 0.5) * self.lane

    @property
    def bottom(self) -> float:
        return self.y(self.ranks - 1) + self.lane / 2


def draw(
    title: str, programs: Sequence[Sequence[Step]], shape: Shape, fabrics: Fabrics, source: str
) -> str:
    """Return the SVG of the ranks' steps. Raises ValueError where there are too many messages.

    `source` says in a few words what the costs are of.
    """
    check_count(sum(step.verb == "signal" for steps in programs for step in steps))
    run = Simulation(programs, shape.local, fabrics)
    seconds = run.seconds()
    lines = head(title, seconds, shape, fabrics, source)
    return lanes_of(title, lines, shape.local, seconds, run)


class Drawn(Protocol):
    """A message, as far as the picture shows it."""

    sender: int
    receiver: int
    lane: str
    bytes: int
    sent: float
    arrived: float
    taken: float


class Bar(Protocol):
    """The same of what a rank does."""

    @property
    def rank(self) -> int: ...
    @property
    def verb(self) -> str: ...
    @property
    def begin(self) -> float: ...
    @property
    def end(self) -> float: ...
    @property
    def bytes(self) -> int: ...


class Run(Protocol):
    """What a model of time has found: plan_times.py, or simulate/engine.py."""

    programs: Sequence[Sequence[Step]]

    @property
    def messages(self) -> Sequence[Drawn]: ...
    @property
    def spans(self) -> Sequence[Bar]: ...


def lanes_of(title: str, lines: Sequence[str], local: int, seconds: float, run: Run) -> str:
    """Return the SVG of a run with `local` ranks a host; `lines` stand above, as `head` has them.

    Raises ValueError where there are too many messages.
    """
    check_count(len(run.messages))
    size = len(run.programs)
    busiest = max(Counter(one.sender for one in run.messages).values(), default=0)
    width = min(max(NARROWEST, PER_MESSAGE * busiest), WIDEST)
    lane = 60 if size <= 8 else 36 if size <= 16 else 20
    top = len(lines) * LINE + 4 * LINE + 58
    # Where nothing takes time, all is at its beginning.
    scale = Scale(seconds or 1e-9, width, top, lane, 14 if lane > 20 else 10, size, local)
    return document(title, lines, scale, run)


def check_count(count: int) -> None:
    if count > MOST_MESSAGES:
        raise ValueError(
            f"{count:,} messages are too many for a picture, which takes {MOST_MESSAGES:,}: "
            "choose fewer ranks or bytes"
        )


def document(title: str, lines: Sequence[str], scale: Scale, run: Run) -> str:
    width, height = LEFT + scale.width + RIGHT, math.ceil(scale.bottom) + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" aria-label={quoteattr(title)} '
        f'style="--strength: {strength(scale, run.messages):.2f}">',
        f"<title>{escape(title)}</title><style>{STYLE}</style><defs>{ARROWS}</defs>",
        f'<rect class="ground" width="{width}" height="{height}"/>',
        *heading(lines),
        *legend(len(lines) * LINE + 18, scale),
        *axis(scale),
        *arrows(scale, run.messages),
        *lanes(scale, run.spans),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


# ---- what stands above


def head(title: str, seconds: float, shape: Shape, fabrics: Fabrics, source: str) -> list[str]:
    """Return the lines above the picture, the title's first: they begin with "*"."""
    lines = headline(title)
    used = ["memory"] if shape.local > 1 else []
    used += ["network"] if shape.hosts > 1 else []
    texts = [f"{show_seconds(seconds)} by a model with the costs of {source}, not measured."]
    texts += [f"{name}: {cost_text(getattr(fabrics, name))}." for name in used]
    return lines + [line for text in texts for line in wrapped(text)]


def headline(title: str) -> list[str]:
    return [f"*{line}" for line in textwrap.wrap(title, COLUMNS - 8)]


def wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, COLUMNS)


def cost_text(cost: Costs) -> str:
    return (
        f"{show_seconds(cost.alpha)} a message, {show_rate(1 / cost.beta)} sent, "
        f"{show_rate(1 / cost.gamma)} added up"
    )


def heading(lines: Sequence[str]) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        css = "title" if line.startswith("*") else "soft"
        text = escape(line.removeprefix("*"))
        yield f'<text class="{css}" x="12" y="{number * LINE + 4}">{text}</text>'


def legend(top: float, scale: Scale) -> Iterator[str]:
    """Four lines: the bars in two, then the arrows, then how to read their bytes."""
    for x, css, text in (
        (12, "copy", "copies"),
        (112, "reduce", "adds up"),
        (212, "wait", "waits"),
    ):
        height = 5 if css == "wait" else 10
        y = top + 7 - height / 2
        yield f'<rect class="{css}" x="{x}" y="{y}" width="22" height="{height}"/>'
        yield f'<text x="{x + 28}" y="{top + 11}">{text}</text>'
    rows = (
        ("data", "message: from its signal to its arrival"),
        ("credit", "credit: the reader gives a slot back"),
    )
    for number, (css, text) in enumerate(rows, 1):
        y = top + number * LINE + 7
        style = "--strength: 0.75"
        yield f'<path class="{css}" style="{style}" d="M12 {y}H34" marker-end="url(#to-{css})"/>'
        yield f'<text x="40" y="{y + 4}">{text}</text>'
    where = "at arrows, and where" if has_labels(scale) else "where"
    text = f"Bytes (K: 1024) stand {where} the pointer rests."
    yield f'<text class="soft" x="12" y="{top + 3 * LINE + 11}">{text}</text>'


def has_labels(scale: Scale) -> bool:
    return scale.lane - scale.bar >= 20


def axis(scale: Scale) -> Iterator[str]:
    """Lines for round times, with the times above them."""
    step, unit, name = tick_of(scale.seconds, scale.width / 90)
    y = scale.top - 8
    yield f'<text class="soft" x="12" y="{y - 18}">time by the model, in {name}</text>'
    for i in range(int(scale.seconds / step * (1 + 1e-9)) + 1):
        x = scale.x(i * step)
        yield f'<path class="grid" d="M{x:.1f} {y + 4}V{scale.bottom:.1f}"/>'
        text = f"{i * step / unit:.6g}"
        yield f'<text class="soft tick" x="{x:.1f}" y="{y}" text-anchor="middle">{text}</text>'


def tick_of(seconds: float, count: float) -> tuple[float, float, str]:
    """Return a round time of which at most `count` fit, the unit for it in seconds, its name."""
    rough = seconds / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= rough * (1 - 1e-9))
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
    unit, name = next((one for one in units if step >= one[0] * 0.0999), (1e-9, "ns"))
    return step, unit, name


# ---- ranks and messages


def lanes(scale: Scale, spans: Sequence[Bar]) -> Iterator[str]:
    end = scale.x(scale.seconds)
    by_rank: list[list[Bar]] = [[] for _ in range(scale.ranks)]
    for span in spans:
        by_rank[span.rank].append(span)
    for rank, own in enumerate(by_rank):
        y = scale.y(rank)
        if 1 < scale.local < scale.ranks and rank % scale.local == 0:
            top = y - scale.lane / 2 - 5
            yield f'<text class="soft host" x="12" y="{top:.1f}">host {rank // scale.local}</text>'
        yield '<g class="lane">'
        yield f'<text class="name" x="12" y="{y + 4:.1f}">rank {rank}</text>'
        yield f'<path class="base" d="M{LEFT} {y}H{end:.1f}"/>'
        for span in own:
            yield from bar(scale, span, y)
        yield "</g>"


def bar(scale: Scale, span: Bar, y: float) -> Iterator[str]:
    """Draw what a rank does; what takes no time is a thin line, and no wait."""
    if span.verb == "wait" and span.end <= span.begin:
        return
    x, height = scale.x(span.begin), scale.bar if span.verb != "wait" else scale.bar * 0.4
    width = max(scale.x(span.end) - x, 0 if span.verb == "wait" else 1.5)
    size = f" {show_size(span.bytes)} bytes" if span.bytes else ""
    text = f"{span.verb}{size}, {show_seconds(span.end - span.begin)}"
    yield (
        f'<rect class="{span.verb}" x="{x:.1f}" y="{y - height / 2:.1f}" width="{width:.1f}" '
        f'height="{height:.1f}"><title>{text}</title></rect>'
    )


def strength(scale: Scale, messages: Sequence[Drawn]) -> float:
    """Return how opaque arrows are: the less, the more of them cross, so that they do not blot."""
    crossings = sum(abs(one.receiver - one.sender) for one in messages) / scale.ranks
    return min(0.75, max(0.08, 0.2 * scale.width / max(crossings, 1)))


def arrows(scale: Scale, messages: Sequence[Drawn]) -> Iterator[str]:
    labels = []
    placed: list[tuple[float, float, float]] = []
    for one in messages:
        ends = ends_of(scale, one)
        (x1, y1), (x2, y2) = ends
        size = f"{show_size(one.bytes)} bytes" if one.bytes else "no bytes"
        text = (
            f"{one.lane} from rank {one.sender} to rank {one.receiver}, {size}: sent at "
            f"{show_seconds(one.sent)}, arrives at {show_seconds(one.arrived)}, taken at "
            f"{show_seconds(one.taken)}"
        )
        yield (
            f'<path class="{one.lane}" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" '
            f'marker-end="url(#to-{one.lane})"><title>{text}</title></path>'
        )
        if one.bytes and has_labels(scale):
            labels.append((show_size(one.bytes), ends))
    for words, ends in labels:
        yield from label(scale, words, ends, placed)


Point = tuple[float, float]


def ends_of(scale: Scale, message: Drawn) -> tuple[Point, Point]:
    """An arrow leaves the edge of a bar and ends at the edge of another."""
    down = 1 if message.receiver > message.sender else -1
    edge = down * scale.bar / 2
    return (
        (scale.x(message.sent), scale.y(message.sender) + edge),
        (scale.x(message.arrived), scale.y(message.receiver) - edge),
    )


def label(
    scale: Scale, words: str, ends: tuple[Point, Point], placed: list[tuple[float, float, float]]
) -> Iterator[str]:
    """Write the bytes beside the arrow, between two lanes, where no other label is; or nowhere."""
    (x1, y1), (x2, y2) = ends
    width = len(words) * DIGIT
    gap = scale.lane - scale.bar
    tries = max(1, round(abs(y2 - y1) / scale.lane)) * 4
    for part in sorted((i + 0.5) / tries for i in range(tries)):
        y = y1 + (y2 - y1) * part
        x = x1 + (x2 - x1) * part + 3
        nearest = min(range(scale.ranks), key=lambda rank: abs(scale.y(rank) - y))
        if abs(scale.y(nearest) - y) < scale.bar / 2 + 7 or gap < 20:
            continue
        if x + width > LEFT + scale.width + RIGHT:
            continue
        if all(
            abs(y - other) > 11 or x > right or x + width < left for left, right, other in placed
        ):
            placed.append((x, x + width, y))
            yield f'<text class="bytes" x="{x:.1f}" y="{y + 3.5:.1f}">{words}</text>'
            return
