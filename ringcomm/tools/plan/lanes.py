"""A plan in time: ranks from top to bottom, time from left to right, messages as arrows.

The picture has the width of a page, and more only for many messages. Where there are too many to
read, only those of the critical path have labels. Its times are those of the simulation.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

from ringcomm._text import show_seconds, show_size
from ringcomm.tools import svg
from ringcomm.tools.plan.simulate.engine import Engine, Span, TimedMessage
from ringcomm.tools.plan.simulate.path import messages_of

MOST_MESSAGES = 20_000  # a browser takes seconds to show more
LEFT, RIGHT = 76, 28  # margins of the time axis, in pixels, as all lengths here
NARROWEST, WIDEST = 660, 1080  # widths of the time axis
PER_MESSAGE = 15  # width for each message that the busiest rank sends
FEW = 40  # messages that all have labels
LETTER = 6.6  # the width of a character of the head, at most
LINE = 17
HOST = 20  # the line that names a host
DIGIT = 6.2  # the width of a character of a label

RULES = (
    ".base { stroke: var(--line); }",
    ".wait { fill: var(--waits); }",
    ".copy { fill: var(--moves); }",
    ".reduce { fill: var(--adds); }",
    ":is(.data, .credit) { fill: none; stroke: var(--ink); stroke-opacity: var(--strength); }",
    ".credit { stroke: var(--credit); stroke-dasharray: 4 3; }",
    ":is(.data, .credit).critical { stroke-width: 2px; stroke-opacity: 1; }",
    ":is(.data, .credit):hover { stroke-opacity: 1; stroke-width: 3px; }",
    ".head { fill: var(--ink); fill-opacity: calc(var(--strength) + 0.3); }",
    ".head-credit { fill: var(--credit); fill-opacity: calc(var(--strength) + 0.3); }",
    ".bytes { font-size: 10px; }",
)
ARROWS = "".join(
    f'<marker id="{name}" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="6" markerHeight="6" '
    f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0 0.5L6 3L0 5.5z" class="{css}"/>'
    "</marker>"
    for name, css in (("to-data", "head"), ("to-credit", "head-credit"))
)


class Scale(NamedTuple):
    """Where ranks and times lie in the picture."""

    seconds: float  # for the whole operation
    width: int  # the time axis
    top: int  # the first lane
    lane: int  # the height of one
    bar: int  # and of what is drawn in it
    ranks: int
    local: int  # ranks on a host; if they are all on one, hosts are not named

    def x(self, seconds: float) -> float:
        return LEFT + seconds / self.seconds * self.width

    def y(self, rank: int) -> float:
        """Return the middle of a lane."""
        hosts = rank // self.local + 1 if self.local < self.ranks else 0
        return self.top + hosts * HOST * (self.local > 1) + (rank + 0.5) * self.lane

    @property
    def bottom(self) -> float:
        return self.y(self.ranks - 1) + self.lane / 2

    @property
    def has_labels(self) -> bool:
        return self.lane - self.bar >= 20


def draw(title: str, notes: Sequence[str], run: Engine, head: bool = True) -> str:
    """Return the SVG of a simulation, with notes beneath the title; `head`: or without both.

    Raises ValueError where there are too many messages.
    """
    check(len(run.messages))
    size = len(run.programs)
    busiest = max(Counter(message.sender for message in run.messages).values(), default=0)
    width = min(max(NARROWEST, PER_MESSAGE * busiest), WIDEST)
    columns = int((LEFT + width - 12) / LETTER)
    heading = textwrap.wrap(title, columns * 4 // 5) if head else []
    lines = [*heading, *(line for note in notes for line in textwrap.wrap(note, columns) if head)]
    lane = 60 if size <= 8 else 36 if size <= 16 else 20
    top = len(lines) * LINE + 3 * LINE + 22 + 14 * bool(lines)
    # Where nothing takes time, all is at its beginning.
    seconds, bar = run.seconds or 1e-9, 14 if lane > 20 else 10
    scale = Scale(seconds, width, top, lane, bar, size, run.local)
    critical = {id(message) for message in messages_of(run)}
    parts = [
        f"<defs>{ARROWS}</defs>",
        *(
            svg.text(12, number * LINE + 4, line, "title" if number <= len(heading) else "soft")
            for number, line in enumerate(lines, 1)
        ),
        *legend(len(lines) * LINE + 14 * bool(lines), scale, len(run.messages) <= FEW),
        *axis(scale),
        *arrows(scale, run.messages, critical),
        *lanes(scale, run.of_rank),
    ]
    strong = f' style="--strength: {strength(scale, run.messages):.2f}"'
    whole, high = LEFT + width + RIGHT, math.ceil(scale.bottom) + 16
    return svg.picture(title, whole, high, svg.style(svg.MEANINGS, RULES), parts, strong)


def check(messages: int) -> None:
    """Raise ValueError where there are too many: it costs less than to simulate them."""
    if messages > MOST_MESSAGES:
        raise ValueError(
            f"{messages:,} messages are too many for a picture, which takes {MOST_MESSAGES:,}: "
            "choose fewer ranks or bytes"
        )


def legend(top: float, scale: Scale, few: bool) -> Iterator[str]:
    """Two lines of bars and arrows, and one on how to read times and bytes."""
    x = 12.0
    for css, words in (("copy", "copies"), ("reduce", "adds up"), ("wait", "waits")):
        height = 4 if css == "wait" else 10
        yield svg.box(x, top + 7 - height / 2, 22, height, css)
        yield svg.text(x + 28, top + 11, words)
        x += 100
    y = top + 7.0
    for css, mark, words in (
        ("data critical", "data", "the critical path"),
        ("data", "data", "message: from its signal to its arrival"),
        ("credit", "credit", "credit: the reader gives a slot back"),
    ):
        more = f' style="--strength: 0.75" marker-end="url(#to-{mark})"'
        yield svg.path(f"M{svg.near(x)} {svg.near(y)}h22", css, more=more)
        yield svg.text(x + 28, y + 4, words)
        x, y = (12.0, y + LINE) if "critical" in css else (312.0, y)
    _, _, name = tick_of(scale.seconds, scale.width / 90)
    where = "where the pointer rests"
    if scale.has_labels:
        where = f"at {'arrows' if few else 'the critical path'}, and {where}"
    words = f"Times are the model's, in {name}. Bytes (K: 1024) stand {where}."
    yield svg.text(12, top + 2 * LINE + 11, words, "soft")


def axis(scale: Scale) -> Iterator[str]:
    """Draw lines for round times, with the times above them."""
    step, unit, name = tick_of(scale.seconds, scale.width / 90)
    y = scale.top - 8
    for i in range(int(scale.seconds / step * (1 + 1e-9)) + 1):
        x = scale.x(i * step)
        yield svg.path(f"M{x:.1f} {y + 4}V{scale.bottom:.1f}", "grid")
        words = f"{i * step / unit:.6g}" if i else f"0 {name}"
        yield svg.text(x, y, words, "soft", "middle")


def tick_of(seconds: float, count: float) -> tuple[float, float, str]:
    """Return a round time of which at most `count` fit, the unit for it in seconds, its name."""
    rough = seconds / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * n for n in (1, 2, 5, 10) if power * n >= rough * (1 - 1e-9))
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
    unit, name = next((pair for pair in units if step >= pair[0] * 0.0999), (1e-9, "ns"))
    return step, unit, name


# ---- ranks and messages


def lanes(scale: Scale, by_rank: Sequence[Sequence[Span]]) -> Iterator[str]:
    end = scale.x(scale.seconds)
    for rank, own in enumerate(by_rank):
        y = scale.y(rank)
        if 1 < scale.local < scale.ranks and rank % scale.local == 0:
            yield svg.text(12, y - scale.lane / 2 - 5, f"host {rank // scale.local}", "soft")
        yield "<g>"
        yield svg.text(12, y + 4, f"rank {rank}", "name")
        yield svg.path(f"M{LEFT} {y}H{end:.1f}", "base")
        for span in own:
            yield from bar(scale, span, y)
        yield "</g>"


def bar(scale: Scale, span: Span, y: float) -> Iterator[str]:
    """Draw a rank's work; a step that takes no time is a thin line, and no wait."""
    if span.verb == "wait" and span.end <= span.begin:
        return
    x, height = scale.x(span.begin), scale.bar if span.verb != "wait" else scale.bar * 0.3
    width = max(scale.x(span.end) - x, 0 if span.verb == "wait" else 1.5)
    size = f" {show_size(span.bytes)} bytes" if span.bytes else ""
    title = f"{span.verb}{size}, {show_seconds(span.end - span.begin)}"
    yield svg.box(x, y - height / 2, width, height, span.verb, title=title)


def strength(scale: Scale, messages: Sequence[TimedMessage]) -> float:
    """Return how opaque arrows are: the less, the more of them cross, so that they do not blot."""
    crossings = sum(abs(message.receiver - message.sender) for message in messages) / scale.ranks
    return min(0.75, max(0.08, 0.2 * scale.width / max(crossings, 1)))


Point = tuple[float, float]


def arrows(
    scale: Scale, messages: Sequence[TimedMessage], critical: Container[int]
) -> Iterator[str]:
    """Draw the messages; `critical` are the ids of those that have a bold arrow and a label.

    Of many critical messages of one pair and one size, the last has the label.
    """
    labels: dict[object, tuple[str, tuple[Point, Point]]] = {}
    placed: list[tuple[float, float, float]] = []
    for message in sorted(messages, key=lambda message: id(message) in critical):
        ends = ends_of(scale, message)
        (x1, y1), (x2, y2) = ends
        size = f"{show_size(message.bytes)} bytes" if message.bytes else "no bytes"
        title = (
            f"{message.lane} from rank {message.sender} to rank {message.receiver}, {size}: "
            f"sent at {show_seconds(message.sent)}, arrives at {show_seconds(message.arrived)}, "
            f"taken at {show_seconds(message.taken)}"
        )
        d, head = f"M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}", f' marker-end="url(#to-{message.lane})"'
        bold = id(message) in critical
        yield svg.path(d, f"{message.lane}{' critical' * bold}", title=title, more=head)
        few = len(messages) <= FEW
        if message.bytes and scale.has_labels and (bold or few):
            same = (message.sender, message.receiver, message.bytes)
            labels[id(message) if few else same] = show_size(message.bytes), ends
    for words, ends in reversed(labels.values()):
        yield from label(scale, words, ends, placed)


def ends_of(scale: Scale, message: TimedMessage) -> tuple[Point, Point]:
    """Return where an arrow leaves the edge of a bar and ends at the edge of another."""
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
            yield svg.text(x, y + 3.5, words, "bytes outlined")
            return
