"""Colors of ranks, the style of the pictures, and their sizes."""

from __future__ import annotations

import colorsys
from typing import NamedTuple

from ringcomm.tools import svg

MOST_RANKS, MOST_CHUNKS = 32, 64  # a cell for each pair: more are too small to be read
# For few ranks: everybody tells them apart.
FEW = (
    svg.BLUE, svg.ORANGE, svg.GREEN, svg.PINK, svg.VERMILION, svg.SKY, svg.BROWN, svg.PURPLE,
)  # fmt: skip
RULES = (
    ".name { font-size: 11px; }",
    ".inside { font-size: 10px; }",
    ".cell { fill: var(--cell); stroke: var(--edge); }",
    ".wanted { fill: none; stroke: var(--soft); stroke-dasharray: 3 2; }",
    ".done { fill: none; stroke: var(--ink); stroke-width: 2px; }",
    ".tick { font-size: 12px; font-weight: 700; }",
    ".arrow { fill: none; stroke: var(--ink); stroke-width: 1.4px; stroke-opacity: 0.8; }",
    ".head { fill: var(--ink); }",
    ".fresh { fill: none; stroke: var(--ink); stroke-width: 1px; }",
)
CELLS = {"cell": ("#f1f3f5", "#20252a"), "edge": ("#d5dae0", "#3d444c")}


class Sizes(NamedTuple):
    """Lengths in pixels. A column is a cell, and a gap in which the arrows of its chunk are."""

    cell: int
    gap: int
    row: int  # the height of a rank, of which `bar` is colored
    bar: int
    name: int  # the width of the ranks' names
    words: bool  # whether there is room for them in a cell

    @property
    def column(self) -> int:
        return self.cell + self.gap


def sizes_of(ranks: int, chunks: int) -> Sizes:
    """Return sizes at which a frame of so many ranks and chunks fits on a screen."""
    most = max(ranks, chunks)
    if most <= 5:
        wide = min(220, max(82, 328 // chunks))
        return Sizes(wide, 34, 52, 18, 74, True)
    if most <= 8:
        return Sizes(min(160, max(76, 600 // chunks)), 26, 44, 15, 70, True)
    if most <= 16:
        return Sizes(min(120, max(40, 640 // chunks)), 18, 26, 14, 62, chunks <= 4)
    return Sizes(min(100, max(30, 700 // chunks)), 14, 20, 10, 58, False)


def colors(ranks: int) -> list[svg.Pair]:
    """Return a color for each rank; many ranks go around the hues."""
    if ranks <= len(FEW):
        return list(FEW[:ranks])
    pairs = []
    for rank in range(ranks):
        hue = rank / ranks
        # Neighbours, which are often added up, differ in lightness as well.
        light = (0.36, 0.52)[rank % 2]
        pairs.append((hexadecimal(hue, light, 0.75), hexadecimal(hue, light + 0.18, 0.65)))
    return pairs


def hexadecimal(hue: float, lightness: float, saturation: float) -> str:
    parts = colorsys.hls_to_rgb(hue, lightness, saturation)
    return "#" + "".join(f"{round(part * 255):02x}" for part in parts)


def style(ranks: int) -> str:
    own = {f"r{rank}": pair for rank, pair in enumerate(colors(ranks))}
    return svg.style({**CELLS, **own}, RULES, "svg.story")
