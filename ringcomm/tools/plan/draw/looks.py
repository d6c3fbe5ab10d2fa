"""Colours of ranks, the style of the pictures, and their sizes."""

from __future__ import annotations

import colorsys
from typing import NamedTuple

MOST_RANKS, MOST_CHUNKS = 32, 64  # a cell for each pair: more are too small to be read
# Of Okabe and Ito, for few ranks: everybody tells them apart. Each for light and for dark.
FEW = (
    ("#0072b2", "#56b4e9"),
    ("#e69f00", "#f0b432"),
    ("#009e73", "#2fc79a"),
    ("#cc79a7", "#e19fc4"),
    ("#d55e00", "#f47f3c"),
    ("#56b4e9", "#8fd3ff"),
    ("#8a6d3b", "#c9a66b"),
    ("#6a51a3", "#a58fe0"),
)
STYLE = """
svg.story { font: 12px system-ui, sans-serif; color-scheme: light dark; }
svg.story, .legend { --ground: #ffffff; --ink: #1b1f24; --soft: #5b6470; --line: #d5dae0;
  --cell: #f1f3f5; --new: #1b1f24; LIGHT }
@media (prefers-color-scheme: dark) {
  svg.story, .legend { --ground: #14171a; --ink: #e6e9ec; --soft: #9aa4af; --line: #3d444c;
    --cell: #20252a; --new: #e6e9ec; DARK }
}
.story .ground { fill: var(--ground); }
.story text { fill: var(--ink); }
.story .title { font-size: 15px; font-weight: 600; }
.story .panel { font-size: 13px; font-weight: 600; }
.story .soft { fill: var(--soft); }
.story .name { font-size: 11px; }
.story .inside { font-size: 10px; }
.story .cell { fill: var(--cell); stroke: var(--line); }
.story .wanted { fill: none; stroke: var(--soft); stroke-dasharray: 3 2; }
.story .done { fill: none; stroke: var(--ink); stroke-width: 2px; }
.story .tick { font-size: 12px; font-weight: 700; }
.story .arrow { fill: none; stroke: var(--ink); stroke-width: 1.4px; stroke-opacity: 0.8; }
.story .head { fill: var(--ink); }
.story .fresh { fill: none; stroke: var(--new); stroke-width: 1px; }
"""


class Sizes(NamedTuple):
    """Lengths in pixels. A column is a cell, and a gap in which the arrows of its chunk are."""

    cell: int
    gap: int
    row: int  # the height of a rank, of which `bar` is coloured
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
        wide = min(220, max(96, 420 // chunks))
        return Sizes(wide, 34, 52, 18, 74, True)
    if most <= 8:
        return Sizes(min(160, max(76, 600 // chunks)), 26, 44, 15, 70, True)
    if most <= 16:
        return Sizes(min(120, max(40, 640 // chunks)), 18, 26, 14, 62, chunks <= 4)
    return Sizes(min(100, max(30, 700 // chunks)), 14, 20, 10, 58, False)


def colours(ranks: int) -> list[tuple[str, str]]:
    """Return a colour for each rank, for light and for dark; many ranks go around the hues."""
    if ranks <= len(FEW):
        return list(FEW[:ranks])
    found = []
    for rank in range(ranks):
        hue = rank / ranks
        # Neighbours, which are often added up, differ in lightness as well.
        light = (0.36, 0.52)[rank % 2]
        found.append((hexadecimal(hue, light, 0.75), hexadecimal(hue, light + 0.18, 0.65)))
    return found


def hexadecimal(hue: float, lightness: float, saturation: float) -> str:
    parts = colorsys.hls_to_rgb(hue, lightness, saturation)
    return "#" + "".join(f"{round(part * 255):02x}" for part in parts)


def style(ranks: int) -> str:
    light, dark = (
        " ".join(f"--r{rank}: {pair[way]};" for rank, pair in enumerate(colours(ranks)))
        for way in (0, 1)
    )
    return STYLE.replace("LIGHT", light).replace("DARK", dark)
