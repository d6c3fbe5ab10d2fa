"""Draws docs/memory.svg, one rank's shared memory to scale: `python docs/draw_memory.py [--check]`.

With --check nothing is written; the exit status says whether the picture is up to date. The group
has two ranks on one host. tests/test_docs.py compares the sum with the memory that a rank maps.
"""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
KIB = 1 << 10
COLORS = {
    "owner": ("#cfe0fb", "written by the rank itself"),
    "peer": ("#ffdfae", "written by the peer"),
    "both": ("#d6efd0", "by both, each its own words"),
    "unused": ("#f3f3f3", "unused: its own part, or the rest of a page"),
}
HALF = [
    ("window: 4 x 2 MiB", 8192 * KIB, "owner"),
    ("", 256 * KIB, "unused"),
    ("", 256 * KIB, "peer"),
]
Strip = list[tuple[str, int, str]]
# Name, bytes, who writes there: csrc/transport/segment.h, csrc/plan/shape.h.
SEGMENT: Strip = [
    ("", 8 * KIB, "owner"),
    ("", 4 * KIB, "peer"),
    ("", 1024 * KIB + 256, "unused"),  # the rank's own, as its own inbox is
    ("", 1028 * KIB - 256, "peer"),
    ("", 160 * KIB, "both"),
    *HALF,
    *HALF,
]
FIRST_PAGES: Strip = [
    ("", 384, "owner"),  # magic, nonce, progress
    ("", 112, "owner"),  # board of the host's operations
    ("board of device operations: 64 entries", 3584, "owner"),
    ("", 16, "unused"),
    ("failure text", 1152, "owner"),
    ("", 128, "peer"),  # aborted_by
    ("", 256, "owner"),  # cores
    ("", 8 * KIB - 5632, "unused"),
    ("lines: 8", 1024, "peer"),
    ("", 3072, "unused"),
]
ONE_LINE: Strip = [
    ("count", 8, "peer"),
    ("stamp", 8, "peer"),
    ("payload: 48 bytes beside the counter", 48, "peer"),
    ("payload: 64 bytes more", 64, "peer"),
]
LEFT, WIDTH, HEIGHT = 20, 900, 44
NOTES = {  # strip: (position in bytes, text) below it
    0: [
        (0, "header"),
        (1100 * KIB, "mailbox: 1 MiB; then for devices: 160 KiB"),
        (6300 * KIB, "half 0: operations of even number"),
        (10700 * KIB, "inbox"),
        (13000 * KIB, "half 1: operations of odd number"),
    ],
    1: [(0, "progress; board of the last two operations"), (5248, "first peer that failed")],
    2: [(0, "the first cache line, 64 bytes"), (64, "the second")],
}


def strip(parts: Strip, top: int, number: int, title: str) -> list[str]:
    whole = sum(size for _, size, _ in parts)
    out = [f'<text x="{LEFT}" y="{top - 10}" font-weight="bold">{title}</text>']
    at = 0
    for name, size, writer in parts:
        x, width = LEFT + WIDTH * at / whole, WIDTH * size / whole
        out.append(
            f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{HEIGHT}" '
            f'fill="{COLORS[writer][0]}" stroke="#556" stroke-width="0.6"/>'
        )
        if name:
            middle = f'x="{x + width / 2:.1f}" y="{top + HEIGHT / 2 + 5}"'
            out.append(f'<text {middle} text-anchor="middle">{name}</text>')
        at += size
    for position, text in NOTES[number]:
        x = LEFT + WIDTH * position / whole
        end = ' text-anchor="end"' if x > LEFT + WIDTH * 0.6 and number == 1 else ""
        out.append(
            f'<path d="M{x:.1f} {top + HEIGHT}v7" stroke="#556"/>'
            f'<text x="{x:.1f}" y="{top + HEIGHT + 20}" fill="#445" font-size="12"{end}>'
            f"{text}</text>"
        )
    return out


def draw() -> str:
    """The picture as SVG text."""
    total = sum(size for _, size, _ in SEGMENT)
    strips = [
        (SEGMENT, f"The segment of one rank of two: {total:,} bytes"),
        (FIRST_PAGES, "Its first 12 KiB: header and lines"),
        (ONE_LINE, "One line: 128 bytes"),
    ]
    parts = []
    for number, (strip_parts, title) in enumerate(strips):
        parts += strip(strip_parts, 36 + number * 114, number, title)
    for number, (color, text) in enumerate(COLORS.values()):
        x = LEFT + number * 210
        parts.append(
            f'<rect x="{x}" y="356" width="14" height="14" fill="{color}" stroke="#556"/>'
            f'<text x="{x + 20}" y="368">{text}</text>'
        )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + 2 * LEFT} 382" '
        'font-family="sans-serif" font-size="13">'
    )
    return "\n".join(
        [head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>", ""]
    )


def main() -> int:
    """Writes the picture, or checks it."""
    target = DOCS / "memory.svg"
    if "--check" in sys.argv[1:]:
        return 0 if target.exists() and target.read_text() == draw() else 1
    target.write_text(draw())
    return 0


if __name__ == "__main__":
    sys.exit(main())
