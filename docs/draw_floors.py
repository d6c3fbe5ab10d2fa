"""Draws docs/floors.svg from the #include lines of csrc/: `python docs/draw_floors.py [--check]`.

With --check nothing is written; the exit status says whether the picture is up to date.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path

DOCS = Path(__file__).resolve().parent
CSRC = DOCS.parent / "csrc"
# Bottom floor last, as drawn; "" is an empty place. A folder includes only what stands lower.
FLOORS = [
    ["torch"],
    ["", "comm", ""],
    ["stream", "cuda", "verify"],
    ["progress", "", ""],
    ["host", "message", ""],
    ["group", "", ""],
    ["report", "", ""],
    ["exec", "device", "elastic"],
    ["plan", "reduce", "transport"],
    ["", "", "net"],
    ["base"],
]
WHAT = {
    "torch": "c10d::Backend, Work, bindings",
    "comm": "groups: how they begin and end",
    "stream": "operations in a device's streams",
    "progress": "who moves a group on: waits, workers",
    "host": "collectives, in their order",
    "message": "send and recv",
    "group": "what a group's engines share",
    "report": "texts, diagnosis, flight records",
    "device": "plans on a stream, device memory",
    "cuda": "driver, runtime, kernels",
    "verify": "proves plans, beside the engine",
    "exec": "interprets plans",
    "elastic": "who goes on when ranks die",
    "plan": "planners, table, plan cache",
    "reduce": "type x op kernels",
    "transport": "shared memory, meeting",
    "net": "addresses, TCP sockets",
    "base": "errors, config, doorbell",
}
WIDTH, BOX, HEIGHT, GAP = 760, 220, 54, 46


def includes() -> Counter[tuple[str, str]]:
    """How many files of one folder include something of another."""
    arrows: Counter[tuple[str, str]] = Counter()
    for path in sorted(CSRC.rglob("*")):
        if path.suffix not in {".h", ".cc", ".cu"}:
            continue
        here = path.relative_to(CSRC).parts[0]
        text = path.read_text()
        there = set(re.findall(r'^#include "(\w+)/', text, re.MULTILINE)) - {here}
        arrows.update((here, folder) for folder in there)
    return arrows


def places() -> dict[str, tuple[int, int]]:
    """Centre of each folder's box."""
    at = {}
    for row, floor in enumerate(FLOORS):
        for column, name in enumerate(floor):
            if not name:
                continue
            x = WIDTH * (2 * column + 1) // (2 * len(floor))
            at[name] = (x, 36 + row * (HEIGHT + GAP))
    return at


def longer_way(here: str, there: str, edges: Counter[tuple[str, str]]) -> bool:
    """Whether `here` reaches `there` through other folders."""
    steps = [after for before, after in edges if before == here and after != there]
    return any((step, there) in edges or longer_way(step, there, edges) for step in steps)


def draw() -> str:
    """The picture as SVG text."""
    at = places()
    height = 36 + len(FLOORS) * (HEIGHT + GAP) - GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="#667"/></marker></defs>',
    ]
    edges = includes()
    for (here, there), files in sorted(edges.items()):
        if longer_way(here, there, edges):
            continue  # a shortcut past a floor: allowed, and not drawn
        (x1, y1), (x2, y2) = at[here], at[there]
        parts.append(
            f'<path d="M{x1} {y1 + HEIGHT // 2}L{x2} {y2 - HEIGHT // 2}" stroke="#667" '
            f'marker-end="url(#tip)"><title>{here} includes {there}: {files} files</title></path>'
        )
    for name, (x, y) in at.items():
        parts.append(
            f'<rect x="{x - BOX // 2}" y="{y - HEIGHT // 2}" width="{BOX}" height="{HEIGHT}" '
            'rx="6" fill="#eef2fb" stroke="#4a5f9e"/>'
            f'<text x="{x}" y="{y - 4}" text-anchor="middle" font-weight="bold">{name}/</text>'
            f'<text x="{x}" y="{y + 15}" text-anchor="middle" fill="#445">{WHAT[name]}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def main() -> int:
    """Writes the picture, or checks it."""
    target = DOCS / "floors.svg"
    picture = draw()
    if "--check" in sys.argv[1:]:
        return 0 if target.exists() and target.read_text() == picture else 1
    target.write_text(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
