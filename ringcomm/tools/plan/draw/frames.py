"""The state of all ranks after a round, as an SVG: a row for each rank, a column for each chunk.

A cell has a bar for each sum that the rank has of the chunk, in the colors of the ranks whose
inputs are in it. Arrows run in the gap behind the chunk that they carry.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from ringcomm._text import ranks_text, show_size, spans
from ringcomm.tools import svg
from ringcomm.tools.plan.draw import looks
from ringcomm.tools.plan.draw.looks import Sizes
from ringcomm.tools.plan.draw.story import Story, Transfer

HEAD = 40  # the top of a frame: its title, and the names of the chunks
PAD = 3  # around the bars of a cell
APART = 4  # between two sums in one cell
MARGIN = 14
IN_A_ROW = 1170  # pixels, as wide as a page: frames beyond it go to the next line
NARROWEST = 1080  # the lines at the top fit into it
KEY = 20  # the height of a line of keys
MOST_FRAMES = 70

GOALS = {
    "all_reduce": "Each rank begins with a whole message of its own. In the end all ranks have the "
    "sum of all of them.",
    "reduce_scatter": "Each rank begins with a whole message of its own. In the end each rank has "
    "its own part of their sum.",
    "all_gather": "Each rank begins with its own part of the message. In the end all ranks have "
    "all parts.",
    "broadcast": "One rank, the root, begins with the message. In the end all ranks have it.",
    "reduce": "Each rank begins with a whole message of its own. In the end the root has the sum "
    "of all of them.",
    "scatter": "One rank, the root, begins with the message. In the end each rank has its own "
    "part.",
    "gather": "Each rank begins with its own part of the message. In the end the root has all "
    "parts.",
    "all_to_all": "Each rank begins with a part for each other. In the end each rank has what all "
    "ranks had for it.",
}  # fmt: skip


def check_ranks(ranks: int) -> None:
    if ranks > looks.MOST_RANKS:
        raise ValueError(f"a picture takes {looks.MOST_RANKS} ranks at most, and these are {ranks}")


def check_chunks(chunks: int) -> None:
    if chunks > looks.MOST_CHUNKS:
        raise ValueError(
            f"the message goes in {chunks} chunks, and a picture takes {looks.MOST_CHUNKS}: "
            "choose fewer ranks or bytes"
        )


def sentence(story: Story, number: int) -> str:
    """Say what goes in the n-th round, counted from 1, in a line."""
    some = [transfer for transfer in story.transfers if transfer.round == story.rounds[number - 1]]
    words = []
    ends = sorted({(transfer.sender, transfer.receiver) for transfer in some})
    for pair in ends[:8]:
        own = {c for t in some if (t.sender, t.receiver) == pair for c in covered(story, t)}
        what = "all chunks" if len(own) == len(story.chunks) > 1 else chunk_text(own)
        words.append(f"{pair[0]} > {pair[1]}: {what}")
    more = [f"and {len(ends) - 8} more pairs"] if len(ends) > 8 else []
    return "; ".join(words + more)


def chunk_text(some: set[int]) -> str:
    return f"chunk{'s' if len(some) > 1 else ''} {spans(some)}"


def covered(story: Story, transfer: Transfer) -> list[int]:
    """Return the chunks that a transfer carries."""
    chunks = enumerate(story.chunks)
    return [n for n, (low, high) in chunks if transfer.low <= low and high <= transfer.high]


class Frames:
    """Draws any frame of one story."""

    def __init__(self, story: Story) -> None:
        self.story, self.ranks = story, story.call.ranks
        self.sizes: Sizes = looks.sizes_of(self.ranks, len(story.chunks))
        self.sums = story.call.adds
        self.several = self.sums or story.call.name == "all_to_all"
        # How many ranks fill a cell: where nothing is added up, a chunk has one owner.
        self.full = self.ranks if self.several else 1

    @property
    def width(self) -> int:
        return self.sizes.name + len(self.story.chunks) * self.sizes.column

    @property
    def height(self) -> int:
        return HEAD + self.ranks * self.sizes.row + 4

    def frame(self, number: int) -> Iterator[str]:
        """Draw the state after the n-th round, with its messages; 0 is the start."""
        rounds = self.story.rounds
        now = rounds[number - 1] if number else 0
        before = (rounds[number - 2] if number > 1 else 0) if number else -1
        title = f"after round {number} of {len(rounds)}" if number else "at the start"
        yield svg.text(0, 13, title, "panel")
        yield from self.names()
        for rank in range(self.ranks):
            for chunk in range(len(self.story.chunks)):
                yield from self.cell(rank, chunk, now, before)
        if number:
            yield from self.arrows(now)

    def names(self) -> Iterator[str]:
        size, row = self.sizes, self.sizes.row
        for chunk in range(len(self.story.chunks)):
            x = size.name + chunk * size.column + size.cell / 2
            words = f"chunk {chunk}" if size.cell > 44 else str(chunk)
            yield svg.text(x, 33, words, "name soft", "middle")
        if size.cell <= 44:
            yield svg.text(size.name - 8, 33, "chunk", "name soft", "end")
        for rank in range(self.ranks):
            y = HEAD + rank * row + row / 2
            yield svg.box(0, y - 5, 10, 10, fill=f"r{rank}")
            yield svg.text(15, y + 4, f"rank {rank}", "name")

    def corner(self, rank: int, chunk: int) -> tuple[float, float]:
        return (
            self.sizes.name + chunk * self.sizes.column,
            HEAD + rank * self.sizes.row + self.sizes.row * 0.07,
        )

    def cell(self, rank: int, chunk: int, now: int, before: int) -> Iterator[str]:
        story, size = self.story, self.sizes
        x, y = self.corner(rank, chunk)
        high = round(size.row * 0.86, 1)
        box = (x, y, size.cell, high)
        pieces = story.pieces(rank, now, chunk)
        words = self.describe(pieces)
        yield f"<g><title>rank {rank}, chunk {chunk}: {words}</title>{svg.box(*box, 'cell')}"
        yield from self.bars(pieces, x + PAD, y + PAD)
        fresh = before >= 0 and pieces != story.pieces(rank, before, chunk)
        if story.done(rank, now, chunk):
            yield svg.box(*box, "done")
            if size.row >= 40:
                yield svg.text(x + size.cell - 14, y + high - 6, "✓", "tick")
        elif story.wanted(rank, chunk):
            yield svg.box(*box, "wanted")
        elif fresh:
            yield svg.box(*box, "fresh")
        if size.words and pieces and self.several:
            yield svg.text(x + PAD + 1, y + high - 7, self.inside(pieces), "inside")
        yield "</g>"

    def bars(self, pieces: Sequence[frozenset[int]], x: float, y: float) -> Iterator[str]:
        """Draw a bar for each sum: those that are not added up yet stand apart."""
        size = self.sizes
        room = size.cell - 2 * PAD - APART * (len(pieces) - 1 if self.full > 1 else 0)
        high = size.bar if size.row >= 40 else size.row * 0.86 - 2 * PAD
        unit = room / self.full
        for piece in pieces:
            for rank in sorted(piece):
                yield svg.box(x, y, unit, high, fill=f"r{rank}")
                x += unit
            x += APART

    def describe(self, pieces: Sequence[frozenset[int]]) -> str:
        if not pieces:
            return "nothing"
        words = [
            f"the sum of {ranks_text(piece)}" if len(piece) > 1 else f"of {ranks_text(piece)}"
            for piece in pieces
        ]
        return ", and ".join(words)

    def inside(self, pieces: Sequence[frozenset[int]]) -> str:
        """Return "0+3 | 1": sums, and what is not added up yet; shorter where that is too long."""
        mark = "+" if self.sums else " "
        words = [mark.join(map(str, sorted(piece))) for piece in pieces]
        if len(pieces) == 1 and len(pieces[0]) == self.full and self.sums and self.full > 2:
            return "sum of all"
        text = " | ".join(words) if self.sums else " ".join(words)
        if len(text) * 5.8 < self.sizes.cell - 22:
            return text
        if not self.sums:
            return f"{len(pieces)} of {self.full}"
        counts = [str(len(piece)) if len(piece) > 1 else "1" for piece in pieces]
        text = " | ".join(f"sum of {n}" if n != "1" else "1 more" for n in counts)
        return text if len(pieces) < 3 else f"{len(pieces)} apart"

    def arrows(self, now: int) -> Iterator[str]:
        """From the sender's row to the receiver's, in the gap behind the chunk."""
        size = self.sizes
        arrows = {
            (chunk, transfer.sender, transfer.receiver)
            for transfer in self.story.transfers
            if transfer.round == now
            for chunk in covered(self.story, transfer)
        }
        for chunk, some in groupby(sorted(arrows), key=lambda key: key[0]):
            x = size.name + chunk * size.column + size.cell + 2
            for _, sender, receiver in some:
                down = 1 if receiver > sender else -1
                y1 = HEAD + (sender + 0.5) * size.row + 5 * down
                y2 = HEAD + (receiver + 0.5) * size.row - 5 * down
                far = abs(receiver - sender) / max(1, self.ranks - 1)
                bulge = x + (size.gap - 4) * 1.3 * (0.35 + 0.65 * far)
                title = f"chunk {chunk} from rank {sender} to rank {receiver}"
                ways = f"{bulge:.1f} {y1:.1f} {bulge:.1f} {y2:.1f} {x + 5} {y2:.1f}"
                yield svg.path(f"M{x} {y1:.1f}C{ways}", "arrow", title=title)
                yield svg.path(f"M{x - 1} {y2:.1f}l7 -3.5v7z", "head")


# ---- the picture with all frames


def draw(title: str, story: Story) -> str:
    """Return the SVG of all frames, from left to right and from top to bottom."""
    frames = Frames(story)
    count = len(story.rounds) + 1
    if count > MOST_FRAMES:
        raise ValueError(f"{count - 1} rounds are too many for a picture: choose fewer ranks")
    columns = max(1, min(count, IN_A_ROW // (frames.width + 3 * MARGIN)))
    lines = [*legend_lines(story)]
    keys = 50 + 18 * len(lines)
    width = max(columns * (frames.width + 3 * MARGIN), NARROWEST) + MARGIN
    top = keys + 24 + KEY * (sum(map(key_width, keys_of(story))) > width - MARGIN)
    height = top + -(-count // columns) * (frames.height + 2 * MARGIN)
    parts = [svg.text(MARGIN, 24, title, "title")]
    parts += [svg.text(MARGIN, 46 + 18 * number, line, "soft") for number, line in enumerate(lines)]
    parts += draw_keys(story, width, keys)
    for number in range(count):
        row, column = divmod(number, columns)
        x = MARGIN + column * (frames.width + 3 * MARGIN)
        y = top + row * (frames.height + 2 * MARGIN) + MARGIN
        parts += [f'<g transform="translate({x} {y})">', *frames.frame(number), "</g>"]
    styled = looks.style(story.call.ranks)
    return svg.picture(title, width, height, styled, parts, ' class="story"')


def legend_lines(story: Story) -> list[str]:
    """Return what a reader must know, a line each."""
    low, high = story.chunks[0]
    lines = [GOALS[story.call.name]]
    rows = (
        f"Rows are ranks, columns are chunks of the message, here of {show_size(high - low)} bytes"
    )
    lines.append(f"{rows}. An arrow is a message, and carries the chunk on its left.")
    return lines


Key = tuple[str, str]  # the class of its mark, and its words


def keys_of(story: Story) -> list[Key]:
    """Return the keys: bars, and the frames of cells."""
    keys = [("has", "what rank 0 began with")]
    if story.call.adds and story.call.ranks > 1:
        keys += [("sum", "added up, ranks 0 and 1"), ("apart", "both there, not added up")]
    keys += [("fresh", "new in this round"), ("wanted", "the result belongs here")]
    return [*keys, ("done", "the result is here")]


def key_width(key: Key) -> int:
    return 36 + 7 * len(key[1]) + 14


def draw_key(key: Key, x: float, y: float) -> Iterator[str]:
    kind, words = key
    if kind in ("fresh", "wanted", "done"):
        yield svg.box(x, y - 10, 26, 13, kind)
    else:
        yield svg.box(x, y - 10, 13, 13, fill="r0")
        if kind != "has":
            yield svg.box(x + (13 if kind == "sum" else 16), y - 10, 13, 13, fill="r1")
    yield svg.text(x + 36, y + 1, words, "soft")


def draw_keys(story: Story, width: float, y: float) -> Iterator[str]:
    """Draw the keys from left to right, in as many lines as they need."""
    x = MARGIN
    for key in keys_of(story):
        if x + key_width(key) > width:
            x, y = MARGIN, y + KEY
        yield from draw_key(key, x, y)
        x += key_width(key)
